"""The consumer: settles and reserves in one packet, on connections that its leases live and die with.

One connection, the main one, takes what is ready. It watches one tube at a time, so that earlier queues come first. A
consumer that holds something, or has several queues, waits on another one; see waiting.py.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from multiq.backend import Ack, Consumer, Touch
from multiq.driverkit.fork import forks
from multiq.driverkit.replies import guarded
from multiq.errors import BackendError, BackendTimeout

from .clock import now
from .errors import FAILURES, explain, refused
from .exchange import DONE, STRANDED, OutOfReach, Said, Trade, command
from .leases import Holding
from .multiplex import Parallel
from .records import NOTHING_READY, RESERVE, Reserved
from .server_info import tube_facts
from .waiting import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Lease, Verdict
    from multiq.errors import LeaseLost

    from .connection import Reply, Wire
    from .multiplex import Steps
    from .pool import Wires

_log = logging.getLogger("multiq.beanstalk")

_SLICE = 500  # jobs asked for in one packet
_SAFE = 1.0  # seconds: with less of a lease left, a delete might arrive after its end
_PROBED_FROM = 3  # queues: so many are asked first which of them have jobs
_AT_ONCE = 0.05  # seconds: a reply that took no longer has cost its lease no more than that
_PARTS = 8  # of a call's time: one packet's jobs are to take no more than one of them


@guarded("reserve", "settle", "exchange", server="a beanstalkd")
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

    def _discard_connections(self) -> None:
        """A reply was none: those that come after it may be none either."""
        self.close()

    # --- settling ---

    def _trade(self, verdicts: Sequence[Verdict], limit: int) -> tuple[list[LeaseLost | None], list[Lease]]:
        if self._generation != forks.generation:
            self._start_over()
        deadline = self._wires.deadline()
        holding = self._holding
        try:
            self._acquire(holding)
            return self._trade_locked(Trade(verdicts, limit), deadline)
        finally:
            holding.release()

    def _acquire(self, holding: Holding) -> None:
        """Have the connections to ourselves. Raises ``BackendTimeout`` if another thread has them for too long.

        That is half of the time: with less of it left, our own end might cut short what works.
        """
        at_most = self._wires.timeout / 2
        if not holding.acquire(at_most):
            raise BackendTimeout(
                f"{self._wires.shown} has not answered another call of this consumer for {at_most:g} s: it is stopped, "
                "overloaded or cut off; it can be given more time with ?timeout= in the URL"
            )

    def _trade_locked(self, trade: Trade, deadline: float) -> tuple[list[LeaseLost | None], list[Lease]]:
        verdicts, limit = trade.verdicts, trade.limit
        said = self._sort(trade) if verdicts else {}
        if len(said) > 1 or (limit > 0 and said and self._main not in said):
            self._try_all(trade, said, deadline)
        elif said:
            ((wire, some),) = said.items()
            self._try(trade, None if wire is self._main else wire, some, deadline)
        elif limit > 0:
            self._try(trade, None, [], deadline)
        if trade.failure is not None:
            if not verdicts:
                raise trade.failure
            _log.warning("%s; of %d verdicts those without an answer are refused", trade.failure, len(verdicts))
        return [trade.answers[at] for at in range(len(verdicts))], trade.leases

    def _try_all(self, trade: Trade, said: dict[Wire, list[Said]], deadline: float) -> None:
        """Settle on several connections at the same time, or on others than the one that is to reserve.

        The latter gets half of the time at least: a silent connection must not end those that work.
        """
        parallel = Parallel()
        try:
            for wire, some in said.items():
                if wire.is_alive():
                    parallel.add(wire, self._steps(trade, wire, some))
                else:
                    self._lose(trade, some)
            if trade.limit > 0:
                parallel.run(deadline - self._wires.timeout / 2)
                if self._main is None or parallel.is_done(self._main):
                    self._try(trade, None, [], deadline)
            parallel.run(deadline)
            parallel.give_up()
        except BaseException:
            parallel.drop()
            raise

    def _steps(self, trade: Trade, wire: Wire, said: list[Said]) -> Steps:
        """What ``_make_safe`` and ``_say`` do, for one of several connections."""
        try:
            yield from self._touch_late(trade, said)
            if not said:
                return
            sent_at = now()
            try:
                replies = yield self._last_words(said), len(said)
            except FAILURES as exc:
                self._hear_some(trade, wire, said, getattr(exc, "partly_read", ()), sent_at)
                raise
            self._hear_all(trade, wire, said, replies, sent_at)
        except FAILURES as exc:
            self._note(trade, exc)

    def _sort(self, trade: Trade) -> dict[Wire, list[Said]]:
        """What has to be said on which connection. What is known to be lost is not."""
        said: dict[Wire, list[Said]] = {}
        settled: set[str] = set()
        moment = now()
        for at, verdict in enumerate(trade.verdicts):
            lease = verdict.lease
            held = self._holding.live(lease, moment)
            if held is None or lease.token in settled:
                trade.refuse(at)
                continue
            if not isinstance(verdict, Touch):
                settled.add(lease.token)
            said.setdefault(held.wire, []).append(Said(at, verdict, held))
        return said

    def _lose(self, trade: Trade, said: Iterable[Said]) -> None:
        for at, verdict, held in said:
            self._holding.end(verdict.lease.token, held)
            trade.refuse(at)

    def _make_safe(self, trade: Trade, wire: Wire, said: list[Said], deadline: float) -> None:
        """Leave in *said* what may be sent now."""
        if not wire.is_alive():
            self._lose(trade, said)
            said.clear()
        if not self._late(said):
            return
        steps = self._touch_late(trade, said)
        try:
            packet, count = next(steps)
            while True:
                try:
                    replies = wire.ask(packet, count, deadline)
                except FAILURES as exc:
                    packet, count = steps.throw(exc)
                else:
                    packet, count = steps.send(replies)
        except StopIteration:
            pass

    def _touch_late(self, trade: Trade, said: list[Said]) -> Steps:
        """Leave in *said* what may be sent now.

        What is acked so late that its lease might end on the way is touched first: a touch is refused then, a delete is
        not. That takes its time, in which others come near their end.
        """
        while late := self._late(said):
            touched_at = now()
            try:
                replies = yield b"".join([b"touch %b\r\n" % one.verdict.lease.id.encode() for one in late]), len(late)
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

    def _late(self, said: Iterable[Said]) -> list[Said]:
        """Acks of leases with less than a second left; of a shorter ttr half of it, as a touch gives no more."""
        moment = now()
        safe_from = moment + _SAFE
        return [
            one
            for one in said
            if one.held.ends_at < safe_from
            and isinstance(one.verdict, Ack)
            and one.held.ends_at < moment + one.held.facts.ttr / 2
        ]

    def _try(self, trade: Trade, wire: Wire | None, said: list[Said], deadline: float) -> None:
        """Settle on this connection; on the main one, reserve as well. What fails is noted."""
        on = self._main if wire is None else wire
        try:
            if said and on is not None:
                self._make_safe(trade, on, said, deadline)
            if wire is None and trade.limit > 0:
                self._take(trade, said, deadline)
            elif said and on is not None:
                self._say(trade, on, said, b"", 0, deadline)
        except FAILURES as exc:
            self._note(trade, exc)
        except BackendError as exc:
            trade.failure = exc

    def _note(self, trade: Trade, exc: Exception) -> None:
        trade.failure = explain(exc, self._wires.address, self._wires.timeout)
        trade.failure.__cause__ = exc

    def _say(  # noqa: PLR0917 - one call for each of the three ways to speak
        self, trade: Trade, wire: Wire, said: Sequence[Said], packet: bytes, count: int, deadline: float
    ) -> list[Reply]:
        """Send verdicts and what follows them in one packet. Returns the replies to the latter."""
        packet = self._last_words(said) + packet if said else packet
        sent_at = now()
        try:
            wire.send(packet, deadline)
            replies = wire.read_many(len(said) + count, deadline, lines=len(said))
        except FAILURES as exc:
            self._hear_some(trade, wire, said, getattr(exc, "partly_read", ()), sent_at)
            raise
        except BaseException:  # from a signal's handler: nobody would read the replies
            wire.drop()
            raise
        if not said:
            return replies
        self._hear_all(trade, wire, said, replies, sent_at)
        return replies[len(said) :]

    def _last_words(self, said: Sequence[Said]) -> bytes:
        """The commands of these verdicts, whose leases are over with them, touches aside."""
        for _, verdict, held in said:
            if not isinstance(verdict, Touch):
                self._holding.end(verdict.lease.token, held)
        return b"".join([command(verdict) for _, verdict, _ in said])

    def _hear_some(
        self, trade: Trade, wire: Wire, said: Sequence[Said], replies: Sequence[Reply], sent_at: float
    ) -> None:
        """The connection has ended: those without a reply are refused.

        Whether or not the server has carried them out: that a job is gone, or is ready, may as well be the doing of
        somebody who had it after us.
        """
        self._hear_all(trade, wire, said, replies, sent_at)
        for at, _, _ in said[len(replies) :]:
            trade.refuse(at)

    def _hear_all(
        self, trade: Trade, wire: Wire, said: Sequence[Said], replies: Sequence[Reply], sent_at: float
    ) -> None:
        heard_at = now()
        for one, (line, _) in zip(said, replies, strict=False):
            if line == b"DELETED" and one.held.ends_at > heard_at and type(one.verdict) is Ack:  # as most are
                trade.answers[one.at] = None
            else:
                self._hear(trade, wire, one, line, sent_at, heard_at)

    def _hear(  # noqa: PLR0917 - see above
        self, trade: Trade, wire: Wire, said: Said, line: bytes, sent_at: float, heard_at: float
    ) -> None:
        at, verdict, held = said
        if line == DONE[type(verdict)]:
            is_in_vain = False
            if isinstance(verdict, Touch):
                held.extend(sent_at)
                is_in_vain = wire.is_closed
            elif isinstance(verdict, Ack):  # the server may have deleted what was somebody else's by then
                is_in_vain = heard_at >= held.ends_at
            if is_in_vain:
                trade.refuse(at)
            else:
                trade.answers[at] = None
            return
        self._holding.end(verdict.lease.token, held)
        if line == b"BURIED":
            trade.answers[at] = None
            _log.error(
                "%s had no memory to release job %s of queue %r, and has buried it: kick it when there is some",
                self._wires.shown, verdict.lease.id, verdict.lease.queue,
            )  # fmt: skip
        elif line in STRANDED:
            trade.refuse(at, OutOfReach)
            _log.error("%s: %s", self._wires.shown, trade.answers[at])
        else:
            trade.refuse(at)
            if line != b"NOT_FOUND":
                wire.close()  # it is out of step
                trade.failure = refused(line, self._wires.address)

    # --- taking ---

    def _take(self, trade: Trade, said: Sequence[Said], deadline: float) -> None:
        """Settle, and take what is ready from one tube after the other until there is enough.

        Or until half of the time is over: what has come by then is worth more than what a slow link may still bring.
        """
        if self._main is None or not (said or self._main.is_alive()):
            self._main = self._wires.open(deadline, to_keep=True)
        try:
            self._take_on(self._main, trade, said, deadline)
        except BaseException:
            self._main.drop()  # it may hold jobs of which nobody will know
            raise

    def _take_on(self, wire: Wire, trade: Trade, said: Sequence[Said], deadline: float) -> None:
        enough_at = deadline - self._wires.timeout / 2
        others = self._tubes[1:] if len(self._tubes) >= _PROBED_FROM else ()
        probed: dict[str, bool] = {}
        for place, tube in enumerate(self._tubes):
            if place and others:
                if not probed:
                    probed = self._has_some(self._say(trade, wire, (), _probes(others), len(others), deadline))
                if not probed[tube]:
                    continue
            is_empty = False
            while not is_empty and trade.wanted > 0 and not (trade.found and time.monotonic() > enough_at):
                # the others are asked about at once where the first one has come up short the last time
                is_short = others and not place and not probed and self._expected.get(tube, 1) == 1
                is_empty, replies = self._take_from(trade, wire, said, tube, others if is_short else (), deadline)
                said = ()
                if replies:
                    probed = self._has_some(replies)
            if trade.found and not is_empty:
                break
        if trade.found:
            trade.leases = self._begin(wire, trade.found, deadline)

    def _take_from(  # noqa: PLR0917 - as _say
        self, trade: Trade, wire: Wire, said: Sequence[Said], tube: str, probed: Sequence[str], deadline: float
    ) -> tuple[bool, list[Reply]]:
        """One packet's jobs of one tube. Returns whether that were all, and the replies about the *probed* tubes."""
        asked = min(trade.wanted, self._expected.get(tube, 1), _SLICE)
        packet, count = wire.watch((tube,))
        packet += RESERVE * asked
        if probed:
            packet += _probes(probed)
        asked_at = now()
        try:
            replies = self._say(trade, wire, said, packet, count + asked + len(probed), deadline)
        except TimeoutError as exc:  # it was too much for the link
            came = sum(line.startswith(b"RESERVED ") for line, _ in getattr(exc, "partly_read", ()))
            self._expected[tube] = max(1, came // 2)
            raise
        if count:
            self._check_watched(wire, replies[:count])
        got = self._sort_out(trade, wire, replies[count : count + asked], asked_at)
        took, most = now() - asked_at, self._wires.timeout / _PARTS
        self._expected[tube] = max(1, 2 * got if took <= most else int(got * most / took))
        return got < asked, replies[count + asked :]

    def _check_watched(self, wire: Wire, replies: Sequence[Reply]) -> None:
        """A tube that is not watched, or still is, would have jobs of the wrong queue come."""
        for line, _ in replies:
            if not line.startswith(b"WATCHING "):
                wire.close()
                raise refused(line, self._wires.address)

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

    def _has_some(self, replies: Sequence[Reply]) -> dict[str, bool]:
        """Which of the tubes after the first have jobs to hand out, by the replies to ``_probes``."""
        return {name: _has_some(reply) for name, reply in zip(self._tubes[1:], replies, strict=True)}

    def _begin(self, wire: Wire, found: Sequence[Reserved], deadline: float) -> list[Lease]:
        """The leases of jobs that were reserved.

        Where that was a while ago, by our clock, they are touched first: the server may have ended a reservation, and
        ``stats-job`` says *reserved* of somebody else's just the same.
        """
        leases: list[Lease] = []
        for at in range(0, len(found), _SLICE):
            some = found[at : at + _SLICE]
            moment, asked_at = time.monotonic(), now()  # two clocks: see there
            if not at:
                self.asked_at = moment - min(asked_at - found[0].asked_at, _AT_ONCE)
            packet = b"".join([b"stats-job %b\r\n" % job.id for job in some])
            touched: dict[bytes, bool] = {}
            late: list[bytes] = []
            if asked_at - some[0].asked_at > _AT_ONCE:  # the first one is the oldest
                late = [job.id for job in some if asked_at - job.asked_at > _AT_ONCE]
                packet = b"".join([b"touch %b\r\n" % job_id for job_id in late]) + packet
            replies = wire.ask(packet, len(late) + len(some), deadline)
            if late:
                touched = {job_id: line == b"TOUCHED" for job_id, (line, _) in zip(late, replies, strict=False)}
                replies = replies[len(late) :]
            leases += self._holding.begin(wire, some, replies, touched, asked_at)
        return leases

    # --- waiting ---

    def _wait(self, give_up_at: float) -> list[Lease]:
        came = self._waiter.wait(self._main, give_up_at)
        if came is None:
            return []
        wire, job = came
        deadline = self._wires.deadline()
        holding = self._holding
        try:
            self._acquire(holding)
            return self._begin(wire, [job], deadline)
        except FAILURES as exc:
            wire.drop()
            raise explain(exc, self._wires.address, self._wires.timeout) from exc
        except BaseException:
            wire.drop()  # it holds a job of which nobody will know
            raise
        finally:
            holding.release()


def _probes(tubes: Iterable[str]) -> bytes:
    return b"".join([b"stats-tube %b\r\n" % name.encode() for name in tubes])


def _has_some(reply: Reply) -> bool:
    line, body = reply
    if not line.startswith(b"OK "):
        return False
    tube = tube_facts(body)
    return bool(tube.ready and not tube.pause)
