"""Carries out the steps in outboxes. Each step is carried out once, at its target, and the steps keep their order
(docs/decisions/0051).

====================  ======================================================================
step                  what a crash right after it leaves
====================  ======================================================================
1 the verdict         the group of steps is in the outbox; the next relay carries it out
2 read the outbox     the same
3 carry out           the mark at the target, so that the group is not carried out again
4 delete              nothing
====================  ======================================================================

Outside a cluster, and also with Sentinel, one script does steps 3 and 4. If the group is not in the outbox, or its turn
has not come, the script does nothing. So a failover keeps or loses a verdict together with its steps. A relay may have
read the outbox of the old primary. If the new primary does not have a group, the relay does not carry the group out
there. In a cluster the two partitions may be on two nodes, and the nodes fail over independently.

Several processes may relay one outbox at the same time. Each process begins with the outbox's first group, and
continues with the next group when the target has answered. So groups are carried out in the order of the outbox.
"""

from __future__ import annotations

import itertools
import struct
import time
from typing import TYPE_CHECKING

from multiq.errors import BackendCorrupt, BackendError

from . import keys
from .steps import OutboxGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .client import Call, Client
    from .partitions import Partitions
    from .pool import Pool

_PAUSE = 5.0  # for this number of seconds after a failure, settle and carry_out leave steps in the outbox
_TIMEOUT = 1.0  # seconds for which settle and carry_out relay, and for which they wait for a target's server
_MOST_READ = 100  # groups
_MOST_STEPS = 1500  # steps in one round trip, which takes the server some milliseconds; a single group may have more
_MOST_TARGETS = 64  # the number of partitions through which one relay forwards an arrival at a job of another partition


class Relay:
    """Relays the outboxes of one backend, in any thread."""

    def __init__(self, pool: Pool, partitions: Partitions) -> None:
        self._pool = pool
        self._partitions = partitions
        self._paused_until = 0.0  # monotonic

    def after(self, partition: str, groups: Sequence[bytes]) -> set[str]:
        """Relay the outbox of a partition. *groups*: the first groups of this outbox, as a call has returned them.
        After a failure, the steps stay in the outbox.

        Returns the partitions in which steps were carried out.
        """
        targets: set[str] = set()
        if not groups or time.monotonic() < self._paused_until:
            return targets
        try:
            with self._pool.borrowed() as client:
                self._relay(client, partition, groups, targets, min(self._pool.servers.timeout, _TIMEOUT))
        except BackendError:
            self._paused_until = time.monotonic() + _PAUSE
        return targets

    def all_of(self, queues: Iterable[str]) -> int:
        """Relay the outboxes of these queues. Returns the number of groups that remain. Raises ``BackendError``."""
        queues = list(dict.fromkeys(queues))
        left, failure = 0, None
        with self._pool.borrowed() as client:
            needed = self._needed(client, [one for queue in queues for one in self._partitions.all_of(queue)])
            for partition in needed:
                try:
                    left += self._relay(client, partition, (), set(), self._pool.servers.timeout)
                except BackendError as exc:  # the other partitions may be on other nodes
                    failure = exc
        if failure is not None:
            raise failure
        return left

    def _needed(self, client: Client, partitions: Sequence[str]) -> list[str]:
        """Return the partitions that have work for ``outbox.lua``. *partitions* and the other partitions of their
        queues are examined."""
        if not partitions:
            return []
        together = [list(partitions)] if not client.servers.is_cluster else [[one] for one in partitions]
        needed: list[str] = []
        unknown: list[str] = []
        for first, *rest in together:
            reply = client.perform(client.new_call("to_relay", first)._replace(also=tuple(rest)))
            for partition, is_needed, stored_count in zip((first, *rest), reply[::2], reply[1::2], strict=True):
                if is_needed == b"1":
                    needed.append(partition)
                queue, number = keys.queue_and_number(partition)
                if number == 0:
                    unknown += self._partitions.learn(queue, stored_count)
        return needed + self._needed(client, unknown)

    def _relay(self, client: Client, partition: str, groups: Sequence[bytes], targets: set[str], timeout: float) -> int:
        """Relay an outbox, and the outboxes to which arrivals were forwarded. Returns the number of groups that remain.

        - *groups*: the first groups of the outbox, if they are known.
        - *targets*: a set. The partitions in which steps were carried out are added to this set.
        - *timeout*: seconds. After this time, no further group is carried out. Each call may take this long, too.
        """
        give_up_at = time.monotonic() + timeout
        waiting: dict[str, Sequence[bytes]] = {partition: groups}
        left = 0
        for _ in range(_MOST_TARGETS):
            if not waiting:
                break
            one, groups = waiting.popitem()
            count = 1
            while count and time.monotonic() < give_up_at:
                batch = _first_batch(one, groups)
                targets.update(batch)
                waiting |= dict.fromkeys(self._carry_out(client, one, batch, timeout), ())
                done = [word for group in itertools.chain(*batch.values()) for word in (group.score, group.mark)]
                groups = groups[len(done) :]
                if not client.servers.is_cluster:
                    done = []  # the script that carried out the groups has deleted them
                # the groups are deleted now, so that less work is left if the process dies later
                reply = client.perform(
                    client.new_call("outbox", one, (0 if groups else _MOST_READ, *done)), time.monotonic() + timeout
                )
                count, groups = reply[0], groups or reply[1:]
            left += count
        return left

    def _carry_out(
        self, client: Client, partition: str, batch: dict[str, list[OutboxGroup]], timeout: float
    ) -> list[str]:
        """Carry out groups at their targets. Returns the partitions that have put steps into their own outbox.

        *partition*: the partition whose outbox has the groups.
        """
        also = () if client.servers.is_cluster else (partition,)
        calls: list[Call] = []
        for target, groups in batch.items():
            arguments = itertools.chain.from_iterable(group.arguments() for group in groups)
            words = (b"", client.token(client.next_number()), *arguments)
            verb = "relay_unique" if any(group.has_terms for group in groups) else "relay"
            calls.append(client.new_call(verb, target, words)._replace(also=also))
        replies = client.perform_each(calls, time.monotonic() + timeout)
        for reply in replies:
            if isinstance(reply, BackendError):
                raise reply
        return [target for target, forwarded in zip(batch, replies, strict=True) if forwarded]


def _first_batch(partition: str, groups: Sequence[bytes]) -> dict[str, list[OutboxGroup]]:
    """Return the first groups that can be carried out in one round trip, grouped by target.

    Either all groups of a batch have the same target, or all their steps are plain arrivals.
    """
    batch: dict[str, list[OutboxGroup]] = {}
    is_plain, steps = True, 0
    for score, member in zip(groups[::2], groups[1::2], strict=True):
        group = _read(partition, score, member)
        is_plain = is_plain and group.is_plain
        steps += len(group.steps) // 3
        if batch and ((not is_plain and batch.keys() != {group.partition}) or steps > _MOST_STEPS):
            break
        batch.setdefault(group.partition, []).append(group)
    return batch


def _read(partition: str, score: bytes, member: bytes) -> OutboxGroup:
    try:
        return OutboxGroup.read(score, member)
    except (struct.error, ValueError) as exc:
        raise BackendCorrupt(
            f"the outbox of {partition!r} has steps that are not multiq's: another program or a newer multiq wrote them"
        ) from exc
