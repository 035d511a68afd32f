"""The consumer: settles and reserves in one packet, on connections that its leases live and die with.

One connection, the main one, takes what is ready. It watches one tube at a time, so that earlier queues come first. A
wait blocks a connection, and nothing can be said on it before it ends: so a consumer that holds something waits on a
spare one, which holds nothing, watches all its tubes, and can be dropped when another thread interrupts.
"""

from __future__ import annotations

import logging
import math
import select
import time
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Abandon, Ack, Bury, Consumer, GiveBack, Release, Touch
from multiq.errors import BackendError, LeaseLost

from .clock import now
from .doubts import Doubts
from .ear import Ear
from .facts import tube_facts
from .failures import FAILURES, explain, refused
from .holding import Holding, Reserved
from .jobs import RESERVE, whole_seconds
from .wires import forks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Lease, Verdict

    from .connection import Reply, Wire
    from .holding import Held
    from .wires import Wires

_log = logging.getLogger("multiq.beanstalk")

_SLICE = 500  # jobs asked for in one packet
_SAFE = 1.0  # seconds: with less of a lease left, a delete might arrive after its end
_PROBED_FROM = 3  # queues: so many are asked first which of them have jobs
_LONGEST_WAIT = 60  # seconds that one command waits
_ABOUT = 0.2  # seconds that a wait may last longer, as the server counts whole ones
_AT_ONCE = 0.05  # seconds: a reply that took no longer has cost its lease no more than that

_EMPTY = (b"TIMED_OUT", b"DEADLINE_SOON")


class _Said(NamedTuple):
    """A verdict that goes to the server."""

    at: int
    verdict: Verdict
    held: Held


class _Trade:
    """What an exchange has come to so far."""

    def __init__(self, verdicts: Sequence[Verdict], limit: int) -> None:
        self.verdicts = verdicts
        self.limit = limit
        self.answers: dict[int, LeaseLost | None] = {}
        self.found: list[Reserved] = []
        self.leases: list[Lease] = []
        self.failure: Exception | None = None

    @property
    def wanted(self) -> int:
        """How many more jobs to ask for."""
        return self.limit - len(self.found)

    @property
    def is_settled(self) -> bool:
        return len(self.answers) == len(self.verdicts)

    def refuse(self, at: int) -> None:
        lease = self.verdicts[at].lease
        self.answers[at] = LeaseLost(lease.queue, lease.id)


class BeanstalkConsumer(Consumer):
    """Reserves from a server's tubes. Connects at the first call."""

    def __init__(self, wires: Wires, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._tubes = tuple(dict.fromkeys(queues))
        self._wires = wires
        self._ear = Ear()
        self._interrupted = False
        self._expected: dict[str, int] = {}  # tube -> how many jobs are worth asking for
        self._start_over()

    def _start_over(self) -> None:
        """In a forked child, too: the leases, and the connections that they hang on, are the parent's."""
        self._generation = forks.generation
        self._main: Wire | None = None
        self._spares: list[Wire] = []
        self._holding = Holding()
        self._doubts = Doubts()

    def reserve(self, limit: int, timeout: float) -> list[Lease]:
        return self.exchange((), limit, timeout)[1]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return self._trade(verdicts, 0)[0] if verdicts else []

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        give_up_at = time.monotonic() + timeout
        answers, leases = self._trade(verdicts, limit)
        if not leases and timeout > 0 and limit > 0:
            try:
                leases = self._wait(give_up_at)
            except BackendError:
                if not verdicts:
                    raise
        self._interrupted = False
        self._ear.forget()
        return answers, leases

    def interrupt(self) -> None:
        self._interrupted = True
        self._ear.nudge()

    def close(self) -> None:
        for wire in (self._main, *self._spares):
            if wire is not None:
                wire.close()
        self._ear.close()
        self._start_over()

    # --- settling ---

    def _trade(self, verdicts: Sequence[Verdict], limit: int) -> tuple[list[LeaseLost | None], list[Lease]]:
        if self._generation != forks.generation:
            self._start_over()
        with self._holding.lock:
            return self._trade_locked(_Trade(verdicts, limit))

    def _trade_locked(self, trade: _Trade) -> tuple[list[LeaseLost | None], list[Lease]]:
        verdicts, limit, deadline = trade.verdicts, trade.limit, self._wires.deadline()
        said = self._sort(trade, deadline) if verdicts else {}
        on_main = said.pop(self._main, ()) if self._main is not None else ()
        for wire, some in said.items():
            self._try(trade, wire, some, deadline)
        if on_main or limit > 0:
            self._try(trade, None, on_main, deadline)
        self._tell_the_rest(trade)
        return [trade.answers[at] for at in range(len(verdicts))], trade.leases

    def _sort(self, trade: _Trade, deadline: float) -> dict[Wire, list[_Said]]:
        """What has to be said on which connection. What is known to be lost, or was answered already, is not."""
        if self._doubts:
            self._doubts.resolve(self._wires, [verdict.lease.token for verdict in trade.verdicts])
        said: dict[Wire, list[_Said]] = {}
        settled: set[str] = set()
        moment = now()
        for at, verdict in enumerate(trade.verdicts):
            lease = verdict.lease
            if self._doubts:
                is_known, answer = self._doubts.recall(verdict)
                if is_known:
                    trade.answers[at] = answer
                    continue
            held = self._holding.live(lease, moment)
            if held is None or lease.token in settled:
                trade.refuse(at)
                continue
            if not isinstance(verdict, Touch):
                settled.add(lease.token)
            said.setdefault(held.wire, []).append(_Said(at, verdict, held))
        for wire in list(said):
            if not wire.is_alive():
                self._lose(trade, said.pop(wire))
            else:
                self._make_safe(trade, wire, said[wire], deadline)
        return said

    def _lose(self, trade: _Trade, said: Iterable[_Said]) -> None:
        for at, verdict, held in said:
            self._holding.end(verdict.lease.token, held)
            trade.refuse(at)

    def _make_safe(self, trade: _Trade, wire: Wire, said: list[_Said], deadline: float) -> None:
        """Touch what is acked so late that its lease might end on the way: then a touch is refused, a delete not."""
        safe_from = now() + _SAFE
        late = [one for one in said if one.held.ends_at < safe_from and isinstance(one.verdict, Ack)]
        if not late:
            return
        touched_at = now()
        packet = b"".join(b"touch %b\r\n" % one.verdict.lease.id.encode() for one in late)
        try:
            replies = wire.ask(packet, len(late), deadline)
        except FAILURES:
            self._lose(trade, said)
            said.clear()
            return
        for one, (line, _) in zip(late, replies, strict=True):
            if line == b"TOUCHED":
                one.held.extend(touched_at)
            else:
                self._lose(trade, [one])
                said.remove(one)

    def _try(self, trade: _Trade, wire: Wire | None, said: Sequence[_Said], deadline: float) -> None:
        """Settle on this connection; on the main one, reserve as well. What fails is noted."""
        try:
            if wire is not None:
                self._say(trade, wire, said, b"", 0, deadline)
            elif trade.limit <= 0:
                assert self._main is not None  # noqa: S101 - its leases are to be settled
                self._say(trade, self._main, said, b"", 0, deadline)
            else:
                self._take(trade, said, deadline)
        except FAILURES as exc:
            trade.failure = explain(exc, self._wires.address, self._wires.timeout)
            trade.failure.__cause__ = exc
        except BackendError as exc:
            trade.failure = exc

    def _say(  # noqa: PLR0917 - one call for each of the three ways to speak
        self, trade: _Trade, wire: Wire, said: Sequence[_Said], packet: bytes, count: int, deadline: float
    ) -> list[Reply]:
        """Send verdicts and what follows them in one packet. Returns the replies to the latter."""
        for _, verdict, held in said:
            if not isinstance(verdict, Touch):
                self._holding.end(verdict.lease.token, held)
        sent_at = now()
        replies: list[Reply] = []
        try:
            wire.send(b"".join([_command(verdict) for _, verdict, _ in said]) + packet, deadline)
            replies = wire.read_many(len(said) + count, deadline)
        except FAILURES as exc:
            replies = getattr(exc, "partly_read", replies)
            for place, (at, verdict, held) in enumerate(said):
                if isinstance(verdict, Touch):  # of no use any more, heard or not
                    trade.refuse(at)
                elif place >= len(replies):
                    self._doubts.add(verdict, held)
                else:
                    self._hear(trade, said[place], replies[place][0], sent_at)
            raise
        for one, (line, _) in zip(said, replies, strict=False):
            self._hear(trade, one, line, sent_at)
        return replies[len(said) :]

    def _hear(self, trade: _Trade, said: _Said, line: bytes, sent_at: float) -> None:
        at, verdict, held = said
        if line == _DONE[type(verdict)]:
            trade.answers[at] = None
            if isinstance(verdict, Touch):
                held.extend(sent_at)
        elif line == b"NOT_FOUND":
            self._holding.end(verdict.lease.token, held)
            trade.refuse(at)
        elif line == b"BURIED":
            trade.answers[at] = None
            _log.error(
                "%s had no memory to release job %s of queue %r, and has buried it: kick it when there is some",
                self._wires.shown, verdict.lease.id, verdict.lease.queue,
            )  # fmt: skip
        else:
            self._holding.resume(verdict.lease, held)
            trade.failure = refused(line, self._wires.address)

    def _tell_the_rest(self, trade: _Trade) -> None:
        """Find out what became of verdicts without an answer. Raises what stood in their way, unless all have one."""
        if trade.failure is None:
            return
        in_doubt = [verdict.lease.token for at, verdict in enumerate(trade.verdicts) if at not in trade.answers]
        try:
            self._doubts.resolve(self._wires, in_doubt)
        except BackendError as exc:
            trade.failure = exc
        for at, verdict in enumerate(trade.verdicts):
            if at not in trade.answers:
                is_known, answer = self._doubts.recall(verdict)
                if is_known:
                    trade.answers[at] = answer
        if trade.is_settled and (trade.verdicts or trade.leases):
            return
        for at, answer in trade.answers.items():
            if not isinstance(trade.verdicts[at], Touch):
                self._doubts.remember(trade.verdicts[at], answer)
        raise trade.failure

    # --- taking ---

    def _take(self, trade: _Trade, said: Sequence[_Said], deadline: float) -> None:
        """Settle, and take what is ready from one tube after the other until there is enough."""
        if self._main is None or not (said or self._main.is_alive()):
            self._main = self._wires.open(deadline, to_keep=True)
        wire = self._main
        probed: dict[str, bool] | None = None
        for tube in self._tubes:
            if probed is not None and not probed[tube]:
                continue
            while trade.wanted > 0:
                asked = min(trade.wanted, self._expected.get(tube, 1), _SLICE)
                others = self._tubes[1:] if tube is self._tubes[0] and len(self._tubes) >= _PROBED_FROM else ()
                packet, count = _watch(wire, (tube,))
                packet += RESERVE * asked + b"".join(b"stats-tube %b\r\n" % name.encode() for name in others)
                asked_at = now()
                replies = self._say(trade, wire, said, packet, count + asked + len(others), deadline)
                said = ()
                got = self._sort_out(trade, wire, replies[count : count + asked], asked_at)
                if others:
                    stats = replies[count + asked :]
                    probed = {name: _has_some(reply) for name, reply in zip(others, stats, strict=True)}
                self._expected[tube] = max(1, 2 * got)
                if got < asked:
                    break
        if trade.found:
            trade.leases = self._begin(wire, trade.found, deadline)

    def _sort_out(self, trade: _Trade, wire: Wire, replies: Sequence[Reply], asked_at: float) -> int:
        """Note the jobs among the replies to reserves. Returns how many."""
        before = len(trade.found)
        for line, body in replies:
            if line.startswith(b"RESERVED "):
                trade.found.append(Reserved(line.split()[1], body, asked_at))
            elif line not in _EMPTY:
                wire.close()
                raise refused(line, self._wires.address)
        return len(trade.found) - before

    def _begin(self, wire: Wire, found: Sequence[Reserved], deadline: float) -> list[Lease]:
        asked_at = now()
        stats = wire.ask(b"".join([b"stats-job %b\r\n" % job.id for job in found]), len(found), deadline)
        return self._holding.begin(wire, found, stats, asked_at=asked_at)

    # --- waiting ---

    def _wait(self, give_up_at: float) -> list[Lease]:
        ear = self._ear.open()
        has_failed = False
        while not self._interrupted and (left := give_up_at - time.monotonic()) > 0:
            deadline = self._wires.deadline()
            wire = self._waiting_wire(deadline)
            try:
                leases = self._wait_on(wire, ear, left, give_up_at)
            except ConnectionError as exc:
                if has_failed:  # one that breaks is no news; one that breaks again is
                    raise explain(exc, self._wires.address, self._wires.timeout) from exc
                has_failed = True
            except FAILURES as exc:
                raise explain(exc, self._wires.address, self._wires.timeout) from exc
            else:
                if leases or left < _ABOUT:
                    return leases
        return []

    def _waiting_wire(self, deadline: float) -> Wire:
        """A connection that holds nothing, and watches all tubes."""
        main = self._main
        if main is not None and len(self._tubes) == 1 and not main.held and not main.is_closed:
            return main
        self._spares = [wire for wire in self._spares if not wire.is_closed]
        for wire in self._spares:
            if not wire.held and wire.is_alive():
                return wire
        wire = self._wires.open(deadline, to_keep=True)
        self._spares.append(wire)
        try:
            packet, count = _watch(wire, self._tubes)
            for line, _ in wire.ask(packet, count, deadline):
                if not line.startswith(b"WATCHING "):
                    raise refused(line, self._wires.address)
        except FAILURES as exc:
            raise explain(exc, self._wires.address, self._wires.timeout) from exc
        return wire

    def _wait_on(self, wire: Wire, ear: int, left: float, give_up_at: float) -> list[Lease]:
        """One command's wait. Empty: nobody came, or another thread has ended it."""
        seconds = min(math.floor(left + _ABOUT), _LONGEST_WAIT)
        drop_at = give_up_at if seconds == 0 else math.inf
        sent_at, deadline = now(), time.monotonic() + max(1, seconds) + self._wires.timeout
        wire.send(b"reserve-with-timeout %d\r\n" % max(1, seconds), deadline)
        try:
            poll = select.poll()
            poll.register(wire.sock, select.POLLIN)
            poll.register(ear, select.POLLIN)
            poll.poll(max(0.0, min(drop_at, deadline) - time.monotonic()) * 1000)
            is_over = time.monotonic() >= drop_at or self._interrupted
            if is_over and not wire.is_readable():
                wire.drop()  # what comes in this very moment goes back
                return []
            line, body = wire.read(deadline)
        except BaseException:
            wire.drop()
            raise
        if not line.startswith(b"RESERVED "):
            if line not in _EMPTY:
                wire.close()
                raise refused(line, self._wires.address)
            return []
        with self._holding.lock:
            return self._begin_late(wire, Reserved(line.split()[1], body, sent_at), deadline)

    def _begin_late(self, wire: Wire, job: Reserved, deadline: float) -> list[Lease]:
        """The lease of a job that was waited for: as nobody knows when it began, it begins anew."""
        asked_at = now()
        if asked_at - job.asked_at <= _AT_ONCE:
            return self._begin(wire, [job], deadline)
        (touched, _), *stats = wire.ask(b"touch %b\r\nstats-job %b\r\n" % (job.id, job.id), 2, deadline)
        return self._holding.begin(wire, [job], stats, asked_at=asked_at, touched=touched == b"TOUCHED")


_DONE: dict[type[Verdict], bytes] = {
    Ack: b"DELETED", Touch: b"TOUCHED", Bury: b"BURIED", Release: b"RELEASED", GiveBack: b"RELEASED",
    Abandon: b"RELEASED",
}  # fmt: skip


def _command(verdict: Verdict) -> bytes:
    lease = verdict.lease
    number = lease.id.encode()
    match verdict:
        case Ack():
            return b"delete %b\r\n" % number
        case Touch():
            return b"touch %b\r\n" % number
        case Bury():
            return b"bury %b %d\r\n" % (number, lease.priority)
        case Release(delay=delay, priority=priority):
            return b"release %b %d %d\r\n" % (
                number,
                lease.priority if priority is None else priority,
                whole_seconds(delay) if delay else 0,
            )
        case _:
            return b"release %b %d 0\r\n" % (number, lease.priority)


def _watch(wire: Wire, tubes: tuple[str, ...]) -> tuple[bytes, int]:
    """What makes a connection watch exactly these, and how many commands that is."""
    if wire.watched == tubes:
        return b"", 0
    commands = [b"watch %b\r\n" % tube.encode() for tube in tubes if tube not in wire.watched]
    commands += [b"ignore %b\r\n" % tube.encode() for tube in wire.watched if tube not in tubes]
    wire.watched = tubes
    return b"".join(commands), len(commands)


def _has_some(reply: Reply) -> bool:
    line, body = reply
    if not line.startswith(b"OK "):
        return False
    tube = tube_facts(body)
    return bool(tube.ready and not tube.pause)
