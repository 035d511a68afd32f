"""The consumer settles and reserves with one script per partition. If there are no jobs, the consumer waits at the
server."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from multiq.backend import Ack, Consumer, Touch
from multiq.driverkit.fork import forks
from multiq.errors import BackendCorrupt, BackendError, BackendUnavailable, LeaseLost

from . import keys
from .errors import guarded
from .exchange import (
    MOST_WEIGHT,
    NEVER,
    PLAIN,
    SLICE,
    WITH_AFTER,
    WITH_GATES,
    WITH_STEPS,
    WITH_UNIQUE,
    Exchange,
    PartitionCall,
    repeat,
    replies,
)
from .known_answers import KnownAnswers
from .node_backoff import NodeBackoff
from .partitions import MOST
from .records import GATED, MICROSECOND, fence, is_gated, leases, pack_ids, partition_of
from .steps import StepEncoder, queues_with_new_jobs
from .verdicts import ACK, details, details_after, find_after, sizes
from .waiting import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import Lease, Verdict

    from .connection import Word
    from .partitions import Partitions
    from .pool import Pool
    from .relay import Relay

_LOOK_LATER = 1.0  # seconds by which a poll may be postponed to the end of the wait
# seconds: a job that is due within this time needs a notification. The time must be longer than _LOOK_LATER and
# Servers.look_every together, and the same as in lua/include/notify.lua.
_HORIZON = 6.0
_COARSE_FROM = 0.5  # seconds: a longer wait may end some tenths of a second late
_GATED_FOR = 10.0  # seconds for which WITH_GATES is used after a reply has shown that such jobs may be handed out
_RESTORE_EVERY = 10.0  # seconds between two uses of WITH_GATES while jobs are parked; it restores a lost marker
_PARKING_PAUSE = 1.0  # seconds in which ready jobs are not parked first, after an exchange has used up its time
_MIN_TIMEOUT = 0.25  # seconds: a server of a cluster has at least this time for its answer

_DONE = b"1"
_UNFINISHED = b"1"  # no job was handed out, although there may be jobs
_HAS_GATES = b"3"  # there may be jobs that only the script WITH_GATES hands out
_FULL = b"2"  # the jobs have as many bytes as one reserve may hand out


@guarded("reserve", "settle", "exchange")
class RedisConsumer(Consumer):
    """Reserves from a server's queues. Connects at the first call."""

    def __init__(
        self,
        pool: Pool,
        partitions: Partitions,
        relay: Relay,
        queues: Sequence[str],
        check_size: Callable[[int], None],
    ) -> None:
        """*check_size* raises ``PayloadTooLarge`` for a number of bytes that the server refuses in one value."""
        self.queues = self._order = tuple(queues)
        """``_order`` has the queues in the order of the current call."""
        self._check_size = check_size
        self._partitions = partitions
        self._relay = relay
        self._gated_until: dict[str, float] = {}  # partition with gated jobs -> next try of the plain script
        self._parks_from: dict[str, float] = {}
        """Partition -> the time from which an exchange parks ready jobs of fair limits first again."""
        self._parked_until: dict[str, float] = {}  # partition with parked jobs -> next try of the script WITH_GATES
        self._to_relay: dict[str, list[bytes]] = {}  # partition -> the first groups of its outbox
        self._client = pool.dedicated()
        self._waiter = Waiter(pool, self._client, partitions, self.queues)
        self._is_cluster = pool.servers.is_cluster
        self._backoff = NodeBackoff(pool.servers)
        self._turns: dict[str, int] = {}  # queue -> counter that selects its next partition
        self._notified_partition = ""  # the partition whose notification ended the last wait
        self._asked: set[str] = set()  # partitions that the last exchange asked for jobs
        self._has_new_partitions = False  # whether a reply named partitions that were unknown before
        self._interrupted = False
        self._clocks = -NEVER, 0  # the time of the last request for jobs, and the server's time in its reply
        self._looked_at = -NEVER  # the time at which a poll last found all queues empty; all times here are monotonic
        self._change_at: dict[str, float] = {}  # partition -> the time at which the next delay, lease or pause ends
        self._is_notified = False  # whether this consumer took a notification from the server
        self._uncertain: dict[str, PartitionCall] = {}  # partition -> the call that may or may not have arrived
        self._known_answers = KnownAnswers()
        self._undelivered: list[Lease] = []  # jobs that a failed exchange reserved
        self._generation = forks.generation  # the process of the uncertain calls and undelivered jobs

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return self.exchange((), limit, timeout, queues)[1]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        answers, _ = self._exchange(verdicts, 0)
        if self._to_relay:
            self._carry_out_elsewhere()
        return answers

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        self._order = self.queues if queues is None else self.in_order(queues)
        give_up_at = time.monotonic() + timeout
        answers: list[LeaseLost | None] = []
        found: list[Lease] = []
        # After an interrupt, poll now. A wait would end immediately, before a notification could arrive.
        if verdicts or timeout <= 0 or self._interrupted or not self._is_known_empty():
            answers, found = self._exchange(verdicts, limit)
            if self._to_relay and self._carry_out_elsewhere() and limit > 0 and not found:
                found = self._look_again(limit)
        if not found:
            try:
                found = self._wait_for_jobs(limit, give_up_at) if limit > 0 else self._wait_without_jobs(give_up_at)
            except BaseException as exc:
                self._looked_at = -NEVER  # the wait may have consumed a marker
                if not verdicts or not isinstance(exc, BackendError):
                    raise
        self._interrupted = False
        return answers, found

    def interrupt(self) -> None:
        self._interrupted = True
        self._waiter.interrupt()

    def close(self) -> None:
        self._waiter.close()
        self._client.close()

    def _discard_connections(self) -> None:
        """Close all connections. After a malformed reply, later replies may belong to earlier requests."""
        self.close()

    # --- settling and reserving ---

    def _exchange(
        self, verdicts: Sequence[Verdict], limit: int, *, is_look: bool = False
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        """Settle, then reserve, without waiting.

        *is_look*: this is a poll without a notification, so the queues are probably empty.
        """
        started = time.monotonic()
        exchange = self._new_exchange(verdicts, limit)
        if limit > 0:
            self.asked_at = started
            self._looked_at = -NEVER
            self._asked.clear()
        try:
            if self._backoff.failures or self._uncertain or self._known_answers.by_verdict or self._undelivered:
                self._recover(exchange)
            for queue in self._route(exchange):
                self._exchange_with(queue, exchange, is_look=is_look)
            if exchange.leases:
                self._hand_over_notification()
        except BaseException as exc:
            if not isinstance(exc, BackendError) or not exchange.leases or len(exchange.answers) < len(verdicts):
                self._keep_results(exchange)
                raise
        if exchange.failure is not None:
            self._raise_if_empty(exchange, exchange.failure)
        if self._known_answers.by_verdict:
            self._known_answers.forget(verdicts)
        if limit > 0 and not exchange.leases:
            self._found_nothing(exchange, started)
        self._has_new_partitions = False
        return list(map(exchange.answers.__getitem__, range(len(verdicts)))), exchange.leases

    def _found_nothing(self, exchange: Exchange, started: float) -> None:
        partitions = {partition for queue in self._order for partition in self._partitions.all_of(queue)}
        # Another call of this process may have learned of new partitions, too.
        is_part = exchange.is_cut_short or not partitions <= self._asked | exchange.excluded
        self.sees_all = not (exchange.excluded or is_part)
        if not is_part:
            self._looked_at = started

    def _new_exchange(self, verdicts: Sequence[Verdict], limit: int) -> Exchange:
        """Raises ``PayloadTooLarge``, before any verdict is sent."""
        exchange = Exchange(verdicts, limit)
        if verdicts and (after := find_after(verdicts)):
            all_sizes = {at: sizes(verdicts[at], one) for at, one in after.items()}
            self._check_size(max(map(max, all_sizes.values())))
            exchange.after = after
            weights = {at: (sum(own), len(after[at].steps)) for at, own in all_sizes.items()}
            columns = zip(*weights.values(), strict=True)
            if any(sum(column) > most for column, most in zip(columns, MOST_WEIGHT, strict=True)):
                exchange.weights = weights
            if self._partitions.count > 1:
                for queue in {queue for one in after.values() for queue in queues_with_new_jobs(one.steps)}:
                    self._partitions.announce(queue)
        return exchange

    def _route(self, exchange: Exchange) -> Iterator[str]:
        """Yields this consumer's queues in order, then other queues that have verdicts to settle."""
        yield from self._order
        for queue in exchange.queues:
            if queue not in self.queues:
                yield queue

    def _exchange_with(self, queue: str, exchange: Exchange, *, is_look: bool) -> None:
        """Settle and reserve in one queue, in as many round trips as the scripts need.

        If the queue has several partitions, the first partition of ``_in_turn`` is emptied first. After that, the other
        partitions are asked whether they have jobs. With *is_look*, all partitions are asked this question before any
        job is reserved.
        """
        to_settle = exchange.unanswered(queue)
        partitions = self._in_turn(queue) if exchange.limit > 0 and queue in self.queues else []
        if exchange.excluded:
            to_settle = {
                partition: indexes for partition, indexes in to_settle.items() if partition not in exchange.excluded
            }
            partitions = [partition for partition in partitions if partition not in exchange.excluded]
        asked, others = ([], partitions) if is_look and len(partitions) > 1 else (partitions[:1], partitions[1:])
        give_up_at = time.monotonic() + self._client.servers.timeout
        while True:
            if not asked and others and exchange.wanted > 0:
                asked, others = self._with_jobs(queue, others, exchange), []
            if asked and time.monotonic() > give_up_at:  # there are too many jobs to promote or to park
                if exchange.parks_until < NEVER:
                    self._parks_from.update(dict.fromkeys(asked, time.monotonic() + _PARKING_PAUSE))
                asked = []
                exchange.is_cut_short = True
            give_up_at = min(give_up_at, exchange.gives_up_at)
            calls = self._next_calls(to_settle, asked, exchange)
            if not calls:
                return
            can_have_more = self._perform(calls, exchange)
            asked = [partition for partition in asked if can_have_more.get(partition, True)]
            if asked and exchange.gives_up_at < NEVER and not to_settle:
                self._settle_elsewhere(queue, exchange)

    def _settle_elsewhere(self, queue: str, exchange: Exchange) -> None:
        """Settle the verdicts for other queues than this one, because parking its jobs may take longer than a lease."""
        for other in exchange.queues:
            to_settle = exchange.unanswered(other) if other != queue else {}
            while calls := self._next_calls(to_settle, (), exchange):
                self._perform(calls, exchange)

    def _in_turn(self, queue: str) -> list[str]:
        """Returns the queue's partitions in rotated order.

        If a partition was notified, it comes first. If not, each call begins with the next partition.
        """
        partitions = self._partitions.all_of(queue)
        if len(partitions) == 1:
            return partitions
        # random, so that not all consumers begin with the same partition
        turn = self._turns[queue] = self._turns.get(queue, secrets.randbelow(MOST)) + 1
        first = (
            partitions.index(self._notified_partition)
            if self._notified_partition in partitions
            else turn % len(partitions)
        )
        self._notified_partition = ""
        return partitions[first:] + partitions[:first]

    def _with_jobs(self, queue: str, partitions: Sequence[str], exchange: Exchange) -> list[str]:
        """Return the partitions that have jobs to hand out.

        In a cluster, ``lua/has_jobs.lua`` runs once for each partition. Outside a cluster, it runs once for all
        partitions.
        """
        in_order = sorted(partitions, key=len)  # the partition that stores the count comes first
        together = [in_order] if not self._client.servers.is_cluster else [[partition] for partition in in_order]
        calls = [self._client.new_call("has_jobs", first)._replace(also=tuple(rest)) for first, *rest in together]
        found = set()
        answers = self._client.perform_each(calls, self._deadline_for(in_order, exchange))
        for group, reply in zip(together, answers, strict=True):
            if isinstance(reply, BackendError):
                self._failed(group[0], reply, exchange)
                continue
            self._succeeded(group[0], exchange)
            now, stored_count, *rest = reply
            for partition, has_something, change_at in zip(group, rest[::2], rest[1::2], strict=True):
                self._note_change(partition, now, change_at)
                self._learn_partitions(partition, stored_count if partition == queue else b"")
                self._asked.add(partition)
                if has_something == b"1":
                    found.add(partition)
        return [partition for partition in partitions if partition in found]

    def _next_calls(
        self, to_settle: dict[str, list[int]], asked: Sequence[str], exchange: Exchange
    ) -> list[PartitionCall]:
        """Returns one call for each partition with verdicts to settle or jobs to ask for."""
        shares: dict[str, int] = {}
        wanted = in_all = exchange.wanted
        for partition in asked:
            if exchange.fits(to_settle.get(partition, [])):  # if they do not fit, the remaining verdicts are sent first
                shares[partition] = min(wanted, -(-in_all // len(asked)), SLICE)
                wanted -= shares[partition]
        calls = []
        for partition in exchange.excluded & to_settle.keys():
            del to_settle[partition]  # a further call would take the place of one whose reply is lost
        for partition in dict.fromkeys((*to_settle, *shares)):
            indexes, rest = exchange.sliced(to_settle.pop(partition, []))
            if rest:
                to_settle[partition] = rest
            share = max(shares.get(partition, 0), 0)
            if share:
                self._asked.add(partition)
            if indexes or share:
                calls.append(self._new_call(partition, indexes, share, exchange))
        return calls

    def _new_call(self, partition: str, indexes: Sequence[int], share: int, exchange: Exchange) -> PartitionCall:
        verdicts, tokens = exchange.verdicts, exchange.tokens
        if len(indexes) < len(verdicts):
            verdicts, tokens = [verdicts[at] for at in indexes], [tokens[at] for at in indexes]
        number = self._client.next_number()
        arguments: list[Word] = [self._client.token(number), share, *[b""] * (2 * len(verdicts))]
        arguments[2::2] = pack_ids([verdict.lease.id for verdict in verdicts])
        arguments[3::2] = [
            # most verdicts are acks; the calls that this saves would be a fiftieth of a worker's time for an empty job
            fence(token) + (ACK if type(verdict) is Ack else details(verdict))
            for token, verdict in zip(tokens, verdicts, strict=True)
        ]
        verb, parks_first = PLAIN, False
        encoder: StepEncoder | None = None
        for place, at in enumerate(indexes) if exchange.after else ():
            after = exchange.after.get(at)
            if after is None:
                continue
            arguments[3 + 2 * place] = fence(tokens[place]) + details_after(verdicts[place], after)
            verb = verb if verb == WITH_STEPS else WITH_AFTER
            if after.steps:
                verb = WITH_STEPS
                encoder = encoder or StepEncoder(self._partitions, partition)
                encoder.add(place + 1, after.steps)
        if encoder is not None:
            if encoder.has_terms:
                verb = WITH_UNIQUE
            arguments += encoder.arguments()
        if self._has_gates(partition, tokens):
            verb = WITH_GATES
            most = self.most_gated
            parks_first = share > 0 and self._parks_first(partition, exchange)
            arguments.append(int(parks_first))
            arguments.append(b"" if most is None else max(0, most - exchange.gated_count))
        if verb in {WITH_STEPS, WITH_UNIQUE, WITH_GATES}:
            arguments.append(len(verdicts))
        call = self._client.new_call(verb, partition, arguments, number=number)
        return PartitionCall(call, verdicts, indexes, share, parks_first)

    def _parks_first(self, partition: str, exchange: Exchange) -> bool:
        """Whether the next call parks ready jobs of fair limits before it hands out one of them. If the exchange has
        jobs already, they must not wait."""
        now = time.monotonic()
        if exchange.parks_until <= now:
            self._parks_from[partition] = now + _PARKING_PAUSE
        return not exchange.leases and now >= self._parks_from.get(partition, 0.0)

    def _has_gates(self, partition: str, tokens: Sequence[str]) -> bool:
        """Whether this call must use the script ``WITH_GATES``. *tokens*: those of the verdicts' leases."""
        if self._gated_until and time.monotonic() < self._gated_until.get(partition, 0.0):
            return True
        # The plain script learns from the marker that a gate is open. An older worker may have removed the marker.
        if self._parked_until and time.monotonic() >= self._parked_until.get(partition, NEVER):
            return True
        return GATED in "".join(tokens)  # a token has the character only at its end

    def _perform(self, calls: Sequence[PartitionCall], exchange: Exchange) -> dict[str, bool]:
        """Make one round trip. Returns for each partition whether the partition may have more jobs to hand out."""
        can_have_more = {}
        sent_at, had_leases = time.monotonic(), bool(exchange.leases)
        failures: list[tuple[str, BackendError]] = []
        uncertain = self._uncertain
        scripts, deadline = [], None
        for one in calls:
            uncertain[one.call.partition] = one  # until the reply is read, even after an interruption
            scripts.append(one.call)
        if self._is_cluster:
            deadline = self._deadline_for([script.partition for script in scripts], exchange)
        for call, reply in zip(calls, replies(self._client, scripts, deadline), strict=True):
            partition = call.call.partition
            if isinstance(reply, BackendError):
                can_have_more[partition] = False
                if not isinstance(reply, BackendUnavailable):
                    del uncertain[partition]
                failures.append((partition, reply))
                continue
            answers, found, more = self._read_reply(call, reply)
            exchange.answers.update(zip(call.indexes, answers, strict=True))
            if found and not had_leases:
                self.asked_at = sent_at  # the requests before have reserved nothing
            exchange.leases += found
            if more == _FULL:
                exchange.limit = len(exchange.leases)
            del uncertain[partition]
            exchange.was_answered = True
            if self._backoff.failures:
                self._backoff.answered(partition)
            goes_on = more == _UNFINISHED and exchange.goes_on(call, found, sent_at)
            can_have_more[partition] = goes_on or call.share in {0, len(found)}
        for partition, failure in failures:
            self._failed(partition, failure, exchange)
        return can_have_more

    def _read_reply(self, call: PartitionCall, reply: Any) -> tuple[list[LeaseLost | None], list[Lease], bytes]:
        """Parse a reply of ``lua/exchange.lua``. Returns the verdicts' answers, the jobs, and the first field."""
        is_parked = False
        if call.call.verb in {WITH_STEPS, WITH_UNIQUE, WITH_GATES}:
            reply, groups, *parked = reply
            is_parked = parked == [b"1"]
            if groups:
                self._to_relay[call.call.partition] = groups
        more, now, change_at, letters, stored_count, *handed_out = reply
        partition = call.call.partition
        if call.share:  # without a share, the script reserves nothing
            self._clocks = self.asked_at, int(now)
            self._note_change(partition, now, change_at)
        if stored_count:
            self._learn_partitions(partition, stored_count)
        answers = _answers(letters, call.verdicts)
        found = leases(partition, handed_out, int(now))
        if more == _HAS_GATES or (call.call.verb == WITH_GATES and any(map(is_gated, found))):
            self._gated_until[partition] = time.monotonic() + _GATED_FOR
        if is_parked:
            self._parked_until[partition] = time.monotonic() + _RESTORE_EVERY
        elif call.call.verb == WITH_GATES:
            self._parked_until.pop(partition, None)
        return answers, found, _UNFINISHED if more == _HAS_GATES else more

    def _note_change(self, partition: str, now: bytes, change_at: bytes) -> None:
        # The time counts from the arrival of the reply. So a wait may end late by half a round trip, but never early.
        wait = (int(change_at) - int(now)) / MICROSECOND if change_at else NEVER
        self._change_at[partition] = time.monotonic() + wait

    def _learn_partitions(self, partition: str, stored_count: bytes) -> None:
        if stored_count and self._partitions.learn(partition, stored_count):
            self._has_new_partitions = True

    # --- steps for other partitions and queues ---

    def _carry_out_elsewhere(self) -> bool:
        """Relay the outboxes that the last calls have named. Returns whether an outbox had steps for this
        consumer's queues.

        A failure leaves the steps in the outbox.
        """
        to_relay, self._to_relay = self._to_relay, {}
        targets: set[str] = set()
        for partition, groups in to_relay.items():
            targets |= self._relay.after(partition, groups)
        return any(keys.queue_and_number(target)[0] in self.queues for target in targets)

    def _look_again(self, limit: int) -> list[Lease]:
        """Reserve jobs that relayed steps have made ready."""
        try:
            return self._exchange((), limit)[1]
        except BackendError:  # the verdicts are settled; the next call raises the error
            self._looked_at = -NEVER
            return []

    # --- after a failure ---

    def _recover(self, exchange: Exchange) -> None:
        """Finish the work of earlier exchanges that failed."""
        if self._generation != forks.generation:  # the calls and jobs belong to the parent
            self._generation = forks.generation
            self._uncertain.clear()
            self._undelivered.clear()
        self._exclude_unreachable(exchange)
        self._resolve_uncertain(exchange)
        if self._undelivered and exchange.limit > 0:
            self._deliver_undelivered(exchange)
        self._known_answers.use(exchange)

    def _raise_if_empty(self, exchange: Exchange, failure: BackendError) -> None:
        """Raise *failure*, unless there is a result to return instead."""
        if exchange.has_nothing_to_return:
            self._keep_results(exchange)
            failure.is_partial = exchange.was_answered or bool(exchange.leases)
            raise failure.with_traceback(None)  # the same error may have been raised before

    def _resolve_uncertain(self, exchange: Exchange) -> None:
        """Repeat the calls whose replies were lost. The old numbers make the server repeat its replies.

        The server remembers only one call per client. So a partition gets no other call while its last call is
        uncertain.
        """
        for partition, call in tuple(self._uncertain.items()):
            if partition not in exchange.excluded:
                try:
                    reply = repeat(self._client, call.call, self._deadline_for([partition], exchange))
                except BackendError as exc:
                    if not isinstance(exc, BackendUnavailable):
                        del self._uncertain[partition]  # the call was refused
                    self._failed(partition, exc, exchange)
                    continue
                answers, found, _ = self._read_reply(call, reply)
                self._known_answers.remember(zip(call.verdicts, answers, strict=True))
                self._undelivered += found
                del self._uncertain[partition]
                self._succeeded(partition, exchange)

    def _deliver_undelivered(self, exchange: Exchange) -> None:
        """Hand out the jobs that earlier exchanges have reserved and not returned, because these exchanges failed. Each
        job is touched first, because its lease may have ended."""
        by_partition: dict[str, list[Lease]] = {}
        for lease in {
            (lease.queue, lease.id, lease.token): lease for lease in self._undelivered
        }.values():  # without duplicates
            by_partition.setdefault(partition_of(lease), []).append(lease)
        kept: list[Lease] = []
        for partition, undelivered in by_partition.items():
            part, rest = undelivered[: min(exchange.wanted, SLICE)], undelivered[min(exchange.wanted, SLICE) :]
            kept += rest
            if not part:
                continue
            if partition in exchange.excluded or partition in self._uncertain:
                kept += part
                continue
            call = self._new_call(partition, range(len(part)), 0, Exchange([Touch(lease) for lease in part], 0))
            try:
                reply = self._client.perform(call.call, self._deadline_for([partition], exchange))
            except BackendError as exc:
                self._failed(partition, exc, exchange)
                kept += part
                continue
            answers, _, _ = self._read_reply(call, reply)
            self._succeeded(partition, exchange)
            exchange.leases += [lease for lease, lost in zip(part, answers, strict=True) if lost is None]
        self._undelivered = kept

    def _exclude_unreachable(self, exchange: Exchange) -> None:
        """Exclude the partitions whose servers have not answered lately. If this would exclude all partitions, exclude
        none."""
        if not self._backoff.failures:
            return
        own = {partition for queue in self.queues for partition in self._partitions.all_of(queue)}
        partitions = {partition_of(verdict.lease) for verdict in exchange.verdicts}
        self._backoff.forget_others((*own, *partitions, *self._uncertain))
        if exchange.limit > 0:
            partitions |= own
        excluded = self._backoff.excluded((*partitions, *self._uncertain))
        if not partitions <= excluded:
            exchange.excluded |= excluded
            exchange.failure = next(
                (error for partition in excluded if (error := self._backoff.error_of(partition))), None
            )
        for partition in excluded:
            self._change_at.pop(partition, None)

    def _succeeded(self, partition: str, exchange: Exchange) -> None:
        exchange.was_answered = True
        if self._backoff.failures:
            self._backoff.answered(partition)

    def _failed(self, partition: str, failure: BackendError, exchange: Exchange) -> None:
        """Exclude this partition for a while, or raise *failure*.

        A partition whose keys have another program's data is excluded. In a cluster, a partition whose server does not
        answer is excluded, too.
        """
        if isinstance(failure, BackendCorrupt):
            self._backoff.corrupt(partition, failure)
            exchange.failure = failure
            exchange.excluded |= {partition}
            self._change_at.pop(partition, None)
            return
        if not self._is_cluster or not isinstance(failure, BackendUnavailable):
            raise failure
        self._backoff.failed(partition, failure)
        if exchange.failure is None:
            exchange.deadline = time.monotonic() + self._client.servers.timeout / 2
        exchange.failure = failure
        exchange.excluded |= {partition}
        self._change_at.pop(partition, None)
        partitions = (partition for queue in self.queues for partition in self._partitions.all_of(queue))
        exchange.excluded |= self._backoff.excluded(partitions)  # the partitions of the same server

    def _deadline_for(self, partitions: Sequence[str], exchange: Exchange) -> float:
        """Returns the time at which to stop waiting for the servers of these partitions. The rest of the time is for
        other partitions."""
        now, timeout = time.monotonic(), self._client.servers.timeout
        if not self._is_cluster or not (len(self.queues) > 1 or self._partitions.has_several(self.queues[0])):
            return now + timeout
        left = timeout if exchange.failure is None else max(exchange.deadline - now, _MIN_TIMEOUT)
        if self._backoff.failures:
            left = min(left, max(map(self._backoff.timeout_of, partitions)))
        return now + max(left / 2, _MIN_TIMEOUT)

    def _keep_results(self, exchange: Exchange) -> None:
        """Store the results of a failed exchange for the next exchange."""
        known = ((exchange.verdicts[at], answer) for at, answer in exchange.answers.items())
        self._known_answers.remember(known)
        self._undelivered = exchange.leases + self._undelivered

    # --- waiting ---

    def _wait_without_jobs(self, give_up_at: float) -> list[Lease]:
        """Wait until the time is over or ``interrupt`` is called. This method does not ask for jobs."""
        if not self._interrupted and time.monotonic() < give_up_at:
            self._waiter.pause(give_up_at)
        return []

    def _wait_for_jobs(self, limit: int, give_up_at: float) -> list[Lease]:
        look_every = self._client.servers.look_every
        while not self._interrupted:
            now = time.monotonic()
            if now >= give_up_at:
                break
            change_at = min(self._change_at.values(), default=NEVER)
            look_at = min(change_at, self._looked_at + look_every, self._backoff.next_end())
            wake_at = min(look_at if give_up_at - look_at > _LOOK_LATER else give_up_at, change_at, give_up_at)
            if self._backoff.failures:
                wake_at = min(look_at, give_up_at)
            elif wake_at == give_up_at:  # a poll at the end of this wait saves a poll in the next wait
                look_at = min(look_at, self._looked_at + look_every - _LOOK_LATER)
            notified = False
            if wake_at > now:
                exact = change_at == wake_at or wake_at - now < _COARSE_FROM
                notified, taken = self._wait_once(wake_at - now, limit, exact=exact)
                if taken:
                    return taken
                if taken is not None:
                    continue
            if notified or time.monotonic() >= look_at:
                self._notified_partition = next(iter(self._waiter.notified), "")
                _, found = self._exchange((), limit, is_look=not notified)
                self._pass_on_unvisited()
                if found:
                    return found
        self._hand_over_notification()
        return []

    def _wait_once(self, seconds: float, limit: int, *, exact: bool) -> tuple[bool, list[Lease] | None]:
        """Wait once. Returns two values:

        - whether to poll the queues, because a notification came, or may have come;
        - the jobs that the follow-up call reserved, or None if no follow-up call has finished.
        """
        partition = self.queues[0]
        if limit <= 0 or self._uncertain or not self._waiter.can_follow_up(partition):
            partitions = (partition for queue in self.queues for partition in self._partitions.all_of(queue))
            excluded = self._backoff.excluded(partitions) if self._is_cluster else frozenset()
            notified = self._waiter.wait(seconds, exact=exact, excluded=excluded)
            self._is_notified = self._is_notified or notified
            return notified, None
        call = self._new_call(partition, (), min(limit, SLICE), Exchange((), limit))
        self._uncertain[partition] = call  # until its reply is read
        waiting_since = time.monotonic()
        notified = self._waiter.wait(seconds, exact=exact, follow_up=call.call)
        self._is_notified = self._is_notified or notified
        if self._waiter.follow_up_reply is None:
            return True, None
        self._looked_at, woke_at = -NEVER, time.monotonic()
        # This process may have been stopped before it woke up. The server's clock says when the jobs were reserved.
        asked_at, then = self._clocks
        reply = self._waiter.follow_up_reply
        since = (int((reply[0] if call.call.verb == WITH_GATES else reply)[1]) - then) / MICROSECOND
        self.asked_at = min(woke_at, max(waiting_since, asked_at + since))
        _, found, more = self._read_reply(call, self._waiter.follow_up_reply)
        self._uncertain.clear()
        if found:
            self._is_notified = False  # the script notified another consumer
        elif more == _UNFINISHED or self._has_new_partitions:
            return True, None
        else:
            self._looked_at = woke_at
        return notified, found

    def _is_known_empty(self) -> bool:
        """Whether no poll is needed. This is so if the last poll found no jobs, because each later job leaves a
        marker."""
        if self._uncertain or self._undelivered or time.monotonic() >= self._backoff.next_end():
            return False
        change_at = min(self._change_at.values(), default=NEVER)
        return time.monotonic() < min(self._looked_at + self._client.servers.look_every, change_at)

    def _pass_on_unvisited(self) -> None:
        """Pass on the notifications of partitions that this consumer did not ask for jobs.

        A consumer does not ask a partition if earlier partitions gave enough jobs.
        """
        for partition in self._waiter.notified:
            if partition not in self._asked:
                self._waiter.notify(partition)
        self._waiter.notified.clear()

    def _hand_over_notification(self) -> None:
        """Notify another consumer of the jobs that are due soon, because this consumer stops waiting.

        If a follow-up call has handed out jobs, its script has already notified another consumer.
        """
        if not self._is_notified:
            return
        self._is_notified = False
        soon = time.monotonic() + _HORIZON
        for partition, change_at in self._change_at.items():
            if change_at < soon:
                self._waiter.notify(partition)


def _answers(letters: bytes, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
    """Returns for each verdict None, or that its lease was lost. *letters* has one letter for each verdict."""
    if letters == _DONE * len(verdicts):  # the common case
        return [None] * len(verdicts)
    return [
        None if letter == _DONE[0] else LeaseLost(verdict.lease.queue, verdict.lease.id)
        for letter, verdict in zip(letters, verdicts, strict=True)
    ]
