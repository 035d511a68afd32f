"""The consumer: settles and reserves in one packet, on connections that its leases live and die with.

One connection, the main one, takes what is ready. It watches one tube at a time, so that earlier queues come first. A
consumer that holds something, or has several queues, waits on another one; see waiting.py.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from multiq.backend import Ack, Consumer, Touch
from multiq.errors import BackendError
from multiq.forks import forks

from .clock import now
from .doubts import Doubts
from .facts import tube_facts
from .failures import FAILURES, explain, refused
from .holding import Holding
from .jobs import NOTHING_READY, RESERVE, Reserved
from .trade import DONE, Said, Trade, command
from .waiting import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Lease, Verdict
    from multiq.errors import LeaseLost

    from .connection import Reply, Wire
    from .wires import Wires

_log = logging.getLogger("multiq.beanstalk")

_SLICE = 500  # jobs asked for in one packet
_SAFE = 1.0  # seconds: with less of a lease left, a delete might arrive after its end
_PROBED_FROM = 3  # queues: so many are asked first which of them have jobs
_AT_ONCE = 0.05  # seconds: a reply that took no longer has cost its lease no more than that


class BeanstalkConsumer(Consumer):
    """Reserves from a server's tubes. Connects at the first call."""

    def __init__(self, wires: Wires, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._tubes = tuple(dict.fromkeys(queues))
        self._wires = wires
        self._waiter = Waiter(wires, self._tubes)
        self._expected: dict[str, int] = {}  # tube -> how many jobs are worth asking for
        self._start_over()

    def _start_over(self) -> None:
        """In a forked child, too: the leases, and the connections that they hang on, are the parent's."""
        self._generation = forks.generation
        self._main: Wire | None = None
        self._waiter.forget_wires()
        self._holding = Holding()
        self._doubts = Doubts()

    def reorder(self, queues: Sequence[str]) -> None:
        super().reorder(queues)
        self._tubes = tuple(dict.fromkeys(self.queues))  # a wait watches them all at once, and needs no order

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
        self._waiter.forget()
        return answers, leases

    def interrupt(self) -> None:
        self._waiter.interrupt()

    def close(self) -> None:
        if self._main is not None:
            self._main.close()
        self._waiter.close()
        self._start_over()

    # --- settling ---

    def _trade(self, verdicts: Sequence[Verdict], limit: int) -> tuple[list[LeaseLost | None], list[Lease]]:
        if self._generation != forks.generation:
            self._start_over()
        with self._holding.lock:
            return self._trade_locked(Trade(verdicts, limit))

    def _trade_locked(self, trade: Trade) -> tuple[list[LeaseLost | None], list[Lease]]:
        verdicts, limit, deadline = trade.verdicts, trade.limit, self._wires.deadline()
        said = self._sort(trade, deadline) if verdicts else {}
        on_main = said.pop(self._main, ()) if self._main is not None else ()
        for wire, some in said.items():
            self._try(trade, wire, some, deadline)
        if on_main or limit > 0:
            self._try(trade, None, on_main, deadline)
        self._tell_the_rest(trade)
        return [trade.answers[at] for at in range(len(verdicts))], trade.leases

    def _sort(self, trade: Trade, deadline: float) -> dict[Wire, list[Said]]:
        """What has to be said on which connection. What is known to be lost, or was answered already, is not."""
        if self._doubts:
            self._doubts.resolve(self._wires, [verdict.lease.token for verdict in trade.verdicts])
        said: dict[Wire, list[Said]] = {}
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
            said.setdefault(held.wire, []).append(Said(at, verdict, held))
        for wire in list(said):
            if not wire.is_alive():
                self._lose(trade, said.pop(wire))
            else:
                self._make_safe(trade, wire, said[wire], deadline)
        return said

    def _lose(self, trade: Trade, said: Iterable[Said]) -> None:
        for at, verdict, held in said:
            self._holding.end(verdict.lease.token, held)
            trade.refuse(at)

    def _make_safe(self, trade: Trade, wire: Wire, said: list[Said], deadline: float) -> None:
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

    def _try(self, trade: Trade, wire: Wire | None, said: Sequence[Said], deadline: float) -> None:
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
        self, trade: Trade, wire: Wire, said: Sequence[Said], packet: bytes, count: int, deadline: float
    ) -> list[Reply]:
        """Send verdicts and what follows them in one packet. Returns the replies to the latter."""
        for _, verdict, held in said:
            if not isinstance(verdict, Touch):
                self._holding.end(verdict.lease.token, held)
        sent_at = now()
        replies: list[Reply] = []
        try:
            wire.send(b"".join([command(verdict) for _, verdict, _ in said]) + packet, deadline)
            replies = wire.read_many(len(said) + count, deadline, lines=len(said))
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

    def _hear(self, trade: Trade, said: Said, line: bytes, sent_at: float) -> None:
        at, verdict, held = said
        if line == DONE[type(verdict)]:
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

    def _tell_the_rest(self, trade: Trade) -> None:
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

    def _take(self, trade: Trade, said: Sequence[Said], deadline: float) -> None:
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
                packet, count = wire.watch((tube,))
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

    def _sort_out(self, trade: Trade, wire: Wire, replies: Sequence[Reply], asked_at: float) -> int:
        """Note the jobs among the replies to reserves. Returns how many."""
        before = len(trade.found)
        for line, body in replies:
            if line.startswith(b"RESERVED "):
                trade.found.append(Reserved(line.split()[1], body, asked_at))
            elif line not in NOTHING_READY:
                wire.close()
                raise refused(line, self._wires.address)
        return len(trade.found) - before

    def _begin(self, wire: Wire, found: Sequence[Reserved], deadline: float) -> list[Lease]:
        leases: list[Lease] = []
        for at in range(0, len(found), _SLICE):
            some = found[at : at + _SLICE]
            asked_at = now()
            stats = wire.ask(b"".join([b"stats-job %b\r\n" % job.id for job in some]), len(some), deadline)
            leases += self._holding.begin(wire, some, stats, asked_at=asked_at)
        return leases

    # --- waiting ---

    def _wait(self, give_up_at: float) -> list[Lease]:
        came = self._waiter.wait(self._main, give_up_at)
        if came is None:
            return []
        wire, job = came
        with self._holding.lock:
            try:
                return self._begin_late(wire, job, self._wires.deadline())
            except FAILURES as exc:
                raise explain(exc, self._wires.address, self._wires.timeout) from exc

    def _begin_late(self, wire: Wire, job: Reserved, deadline: float) -> list[Lease]:
        """The lease of a job that was waited for: as nobody knows when it began, it begins anew."""
        asked_at = now()
        if asked_at - job.asked_at <= _AT_ONCE:
            return self._begin(wire, [job], deadline)
        (touched, _), *stats = wire.ask(b"touch %b\r\nstats-job %b\r\n" % (job.id, job.id), 2, deadline)
        return self._holding.begin(wire, [job], stats, asked_at=asked_at, touched=touched == b"TOUCHED")


def _has_some(reply: Reply) -> bool:
    line, body = reply
    if not line.startswith(b"OK "):
        return False
    tube = tube_facts(body)
    return bool(tube.ready and not tube.pause)
