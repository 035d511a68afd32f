"""Encodes steps for ``lua/include/steps.lua``: those that the script carries out, and those for the outbox.

A script reaches the keys of one partition. Steps for another partition or another queue go into the outbox, in groups.
All steps of a group are for the same partition. A group is carried out as a whole, before the next groups. So the steps
of a verdict are carried out in their order. All steps for one partition are carried out in their order, too.

A *plain* arrival has neither ``expect`` nor ``doom``. Plain arrivals can be carried out in any order, because the order
in which members arrive does not matter.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from multiq.backend.effects import Arrive, Drop, Enqueue, Put

from . import keys
from .records import details_of, has_key_or_gates, microseconds, pack_id, record_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from multiq.backend.effects import Step, Version

    from .client import Call, Client
    from .connection import Word
    from .partitions import Partitions

_VERDICT = struct.Struct(">H")
_EXPECT = struct.Struct(">I")
_TTL = struct.Struct(">Q")
_GROUP = struct.Struct(">Hc")
_SIZE = struct.Struct(">I")

_MARK = slice(0, 14)
_PLAIN_AT = 14
_TARGET_SIZE = struct.Struct(">H")
_TARGET_AT = 15 + _TARGET_SIZE.size
_NAME_AT = 2  # index in a target; the bytes before it are for arrivals at a job of another partition


class _Group(msgspec.Struct):
    """Steps for one partition."""

    number: int
    target: bytes
    is_plain: bool = True
    """Whether all steps are plain arrivals."""


class StepEncoder:
    """Makes the arguments for the steps of one script."""

    def __init__(self, partitions: Partitions, partition: str) -> None:
        """*partition*: the partition whose keys the script gets."""
        self._partitions = partitions
        self._partition = partition
        self._steps: list[tuple[bytes, bytes, bytes, _Group | None]] = []
        self._groups: dict[str, _Group] = {}  # partition -> its last group
        self._count = 0
        self._held: dict[tuple[str, str], tuple[str, bytes]] = {}  # held job -> its partition and packed id

    def add(self, verdict: int, steps: Iterable[Step]) -> None:
        """Add the steps of a verdict. *verdict*: the verdict's index in the script, from 1. 0: steps without a
        verdict."""
        index = _VERDICT.pack(verdict)
        after_all = after_wishes = -1  # numbers of this verdict's last group, and of its last group that is not plain
        for step in steps:
            partition, letter, name, details, value = self._encode(step)
            if partition == self._partition:
                self._steps.append((letter + index + details, name, value, None))
                continue
            is_plain = letter == b"a"
            group = self._group(partition, after_wishes if is_plain else after_all)
            group.is_plain = group.is_plain and is_plain
            after_all = max(after_all, group.number)
            if not is_plain:
                after_wishes = after_all
            packed = b"".join(map(_packed, (letter + b"\0\0" + details, name, value)))
            self._steps.append((b"o" + index, group.target, packed, group))

    @property
    def has_terms(self) -> bool:
        """Whether the script enqueues a job with a unique key or gates."""
        return any(head[:1] == b"u" for head, *_ in self._steps)

    def arguments(self) -> Iterator[Word]:
        for head, name, value, group in self._steps:
            yield head if group is None else head + _GROUP.pack(group.number, b"p" if group.is_plain else b"x")
            yield name
            yield value

    def _group(self, partition: str, after: int) -> _Group:
        """Return the group for a partition's next step. This step must come after the group with the number *after*."""
        group = self._groups.get(partition)
        if group is None or group.number < after:
            number = keys.queue_and_number(partition)[1]
            target = bytes([number, 0]) + partition.encode()
            group = self._groups[partition] = _Group(self._count, target)
            self._count += 1
        return group

    def _encode(self, step: Step) -> tuple[str, bytes, bytes, bytes, bytes]:
        """Returns the partition, the letter, the id or key, the details, and the value."""
        if isinstance(step, Arrive):
            key = step.queue, step.id
            known = self._held.get(key)  # many members arrive at one job
            if known is None:
                packed = pack_id(step.id)
                known = self._held[key] = self._partitions.likely_for(step.queue, packed), packed
            partition, packed = known
            if step.doom:
                return partition, b"d", packed, step.doom.encode("utf-8", "backslashreplace"), b""
            member = step.member.encode("utf-8", "surrogatepass")
            if step.expect:
                return partition, b"e", packed, _EXPECT.pack(step.expect), member
            return partition, b"a", packed, b"", member
        if isinstance(step, Enqueue):
            job = step.job
            packed, has_terms = pack_id(job.id), has_key_or_gates(job)
            partition = self._partitions.partition_for(step.queue, packed, has_key_or_gates=has_terms)
            return partition, b"u" if has_terms else b"q", packed, details_of(job), record_of(job)
        if isinstance(step, Put):
            ttl = b"" if step.ttl is None else _TTL.pack(microseconds(step.ttl))
            return step.home, b"p", step.key.encode(), ttl, step.value
        return step.home, b"x", step.key.encode(), b"", b""


def carry_out_call(
    client: Client, partition: str, verb: str, when: Sequence[tuple[bytes, bytes]], encoder: StepEncoder
) -> Call:
    """Make a call of ``lua/carry_out.lua``, or of another script with the same arguments. *when*: keys and versions of
    notes."""
    number = client.next_number()
    conditions = [word for condition in when for word in condition]
    arguments = [client.token(number), len(when), *conditions, *encoder.arguments()]
    return client.new_call(verb, partition, arguments, number=number)


class OutboxGroup(msgspec.Struct):
    """A group of steps, as an outbox stores it."""

    score: bytes
    mark: bytes
    partition: str
    """The partition in which the steps are to be carried out."""
    is_plain: bool
    asked: bytes
    """The first bytes of the target: see ``forward`` in ``lua/include/steps.lua``."""
    steps: list[bytes]
    """Three values for each step."""

    @classmethod
    def read(cls, score: bytes, member: bytes) -> OutboxGroup:
        """Raises ``struct.error``, ``ValueError``."""
        (size,) = _TARGET_SIZE.unpack_from(member, 15)
        end = _TARGET_AT + size
        target, steps, at = member[_TARGET_AT:end], [], end
        while at < len(member):
            (length,) = _SIZE.unpack_from(member, at)
            at += _SIZE.size + length
            steps.append(member[at - length : at])
        partition = target[_NAME_AT:].decode()
        is_plain = member[_PLAIN_AT : _PLAIN_AT + 1] == b"p"
        return cls(score, member[_MARK], partition, is_plain, target[:_NAME_AT], steps)

    @property
    def has_terms(self) -> bool:
        """Whether a step enqueues a job with a unique key or gates."""
        return any(head[:1] == b"u" for head in self.steps[::3])

    def arguments(self) -> list[Word]:
        return [self.score, self.mark, self.asked, len(self.steps) // 3, *self.steps]


def home_of(partitions: Partitions, steps: Sequence[Step], when: Sequence[Version]) -> str | None:
    """Return the partition in which ``carry_out`` begins. Notes are in the first partition of their home. None: there
    are no steps."""
    if when:
        return when[0].home
    if not steps:
        return None
    first = steps[0]
    if isinstance(first, (Put, Drop)):
        return first.home
    if any(isinstance(step, (Put, Drop)) and step.home == first.queue for step in steps):
        return first.queue
    if isinstance(first, Arrive):
        return partitions.likely_for(first.queue, pack_id(first.id))
    is_in_first = has_key_or_gates(first.job)
    return partitions.partition_for(first.queue, pack_id(first.job.id), has_key_or_gates=is_in_first)


def queues_with_new_jobs(steps: Iterable[Step]) -> set[str]:
    """The queues to which the steps add jobs."""
    return {step.queue for step in steps if isinstance(step, Enqueue)}


def size_of(step: Step) -> int:
    """The bytes of the body or note that the step stores."""
    if isinstance(step, Enqueue):
        return len(step.job.body)
    return len(step.value) if isinstance(step, Put) else 0


def adds_nothing(steps: Sequence[Step]) -> bool:
    """Whether the steps add neither jobs nor notes. If so, a full server can carry out all of them."""
    return all(isinstance(step, (Arrive, Drop)) for step in steps)


def _packed(value: bytes) -> bytes:
    return _SIZE.pack(len(value)) + value
