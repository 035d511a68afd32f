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
from .errors import CONNECTION_ERRORS, explain, refused
from .exchange import DONE, STRANDED, Exchange, OutOfReach, PendingVerdict, command
from .leases import HeldLeases
from .multiplex import Multiplexer
from .records import NOTHING_READY, RESERVE, Reserved
from .server_info import parse_tube_stats
from .waiting import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Lease, Verdict
    from multiq.errors import LeaseLost

    from .connection import Connection, Reply
    from .multiplex import Steps
    from .pool import Pool

_log = logging.getLogger("multiq.beanstalk")

_SLICE = 500  # jobs asked for in one packet
_TOUCH_BELOW = 1.0  # seconds: with less of a lease left, a delete might arrive after its end
_PROBE_FROM = 3  # queues: so many are asked first which of them have jobs
_PROMPT = 0.05  # seconds: a reply that took no longer has cost its lease no more than that
_PACKETS_PER_TIMEOUT = 8  # of a call's time: one packet's jobs are to take no more than one of them


@guarded("reserve", "settle", "exchange", server="a beanstalkd")
class BeanstalkConsumer(Consumer):
    """Reserves from a server's tubes. Connects at the first call."""

    def __init__(self, pool: Pool, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._tubes = tuple(dict.fromkeys(queues))
        self._pool = pool
        self._waiter = Waiter(pool, self._tubes)
        self._expected: dict[str, int] = {}  # tube -> how many jobs are worth asking for
        self._reset()

    def _reset(self) -> None:
        """In a forked child, too: the leases, and the connections that they hang on, are the parent's."""
        self._generation = forks.generation
        self._main: Connection | None = None
        self._waiter.forget_connections()
        self._held_leases = HeldLeases()

    def reorder(self, queues: Sequence[str]) -> None:
        super().reorder(queues)
        self._tubes = tuple(dict.fromkeys(self.queues))  # a wait watches them all at once, and needs no order

    def reserve(self, limit: int, timeout: float) -> list[Lease]:
        return self.exchange((), limit, timeout)[1]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return self._exchange(verdicts, 0)[0] if verdicts else []

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        give_up_at = time.monotonic() + timeout
        answers, leases = self._exchange(verdicts, limit)
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
        self._reset()

    def _out_of_step(self) -> None:
        """A reply was none: those that come after it may be none either."""
        self.close()

    # --- settling ---

    def _exchange(self, verdicts: Sequence[Verdict], limit: int) -> tuple[list[LeaseLost | None], list[Lease]]:
        if self._generation != forks.generation:
            self._reset()
        deadline = self._pool.deadline()
        held_leases = self._held_leases
        try:
            self._acquire(held_leases)
            return self._exchange_locked(Exchange(verdicts, limit), deadline)
        finally:
            held_leases.release()

    def _acquire(self, held_leases: HeldLeases) -> None:
        """Have the connections to ourselves. Raises ``BackendTimeout`` if another thread has them for too long.

        That is half of the time: with less of it left, our own end might cut short what works.
        """
        at_most = self._pool.timeout / 2
        if not held_leases.acquire(at_most):
            raise BackendTimeout(
                f"{self._pool.shown} has not answered another call of this consumer for {at_most:g} s: it is stopped, "
                "overloaded or cut off; it can be given more time with ?timeout= in the URL"
            )

    def _exchange_locked(self, exchange: Exchange, deadline: float) -> tuple[list[LeaseLost | None], list[Lease]]:
        verdicts, limit = exchange.verdicts, exchange.limit
        pending = self._by_connection(exchange) if verdicts else {}
        if len(pending) > 1 or (limit > 0 and pending and self._main not in pending):
            self._exchange_multiplexed(exchange, pending, deadline)
        elif pending:
            ((connection, some),) = pending.items()
            self._exchange_on(exchange, None if connection is self._main else connection, some, deadline)
        elif limit > 0:
            self._exchange_on(exchange, None, [], deadline)
        if exchange.error is not None:
            if not verdicts:
                raise exchange.error
            _log.warning("%s; of %d verdicts those without an answer are refused", exchange.error, len(verdicts))
        return [exchange.answers[at] for at in range(len(verdicts))], exchange.leases

    def _exchange_multiplexed(
        self, exchange: Exchange, pending: dict[Connection, list[PendingVerdict]], deadline: float
    ) -> None:
        """Settle on several connections at the same time, or on others than the one that is to reserve.

        The latter gets half of the time at least: a silent connection must not end those that work.
        """
        multiplexer = Multiplexer()
        try:
            for connection, some in pending.items():
                if connection.is_alive():
                    multiplexer.add(connection, self._steps(exchange, connection, some))
                else:
                    self._refuse_lost(exchange, some)
            if exchange.limit > 0:
                multiplexer.run(deadline - self._pool.timeout / 2)
                if self._main is None or multiplexer.is_done(self._main):
                    self._exchange_on(exchange, None, [], deadline)
            multiplexer.run(deadline)
            multiplexer.give_up()
        except BaseException:
            multiplexer.abort()
            raise

    def _steps(self, exchange: Exchange, connection: Connection, pending: list[PendingVerdict]) -> Steps:
        """What ``_touch_expiring`` and ``_send_verdicts`` do, for one of several connections."""
        try:
            yield from self._touch_steps(exchange, pending)
            if not pending:
                return
            sent_at = now()
            try:
                replies = yield self._verdict_packet(pending), len(pending)
            except CONNECTION_ERRORS as exc:
                self._apply_partial_replies(exchange, connection, pending, getattr(exc, "partly_read", ()), sent_at)
                raise
            self._apply_replies(exchange, connection, pending, replies, sent_at)
        except CONNECTION_ERRORS as exc:
            self._record_error(exchange, exc)

    def _by_connection(self, exchange: Exchange) -> dict[Connection, list[PendingVerdict]]:
        """What has to be pending on which connection. What is known to be lost is not."""
        pending: dict[Connection, list[PendingVerdict]] = {}
        settled: set[str] = set()
        moment = now()
        for at, verdict in enumerate(exchange.verdicts):
            lease = verdict.lease
            held = self._held_leases.live(lease, moment)
            if held is None or lease.token in settled:
                exchange.refuse(at)
                continue
            if not isinstance(verdict, Touch):
                settled.add(lease.token)
            pending.setdefault(held.connection, []).append(PendingVerdict(at, verdict, held))
        return pending

    def _refuse_lost(self, exchange: Exchange, pending: Iterable[PendingVerdict]) -> None:
        for at, verdict, held in pending:
            self._held_leases.end(verdict.lease.token, held)
            exchange.refuse(at)

    def _touch_expiring(
        self, exchange: Exchange, connection: Connection, pending: list[PendingVerdict], deadline: float
    ) -> None:
        """Leave in *pending* what may be sent now."""
        if not connection.is_alive():
            self._refuse_lost(exchange, pending)
            pending.clear()
        if not self._expiring(pending):
            return
        steps = self._touch_steps(exchange, pending)
        try:
            packet, count = next(steps)
            while True:
                try:
                    replies = connection.ask(packet, count, deadline)
                except CONNECTION_ERRORS as exc:
                    packet, count = steps.throw(exc)
                else:
                    packet, count = steps.send(replies)
        except StopIteration:
            pass

    def _touch_steps(self, exchange: Exchange, pending: list[PendingVerdict]) -> Steps:
        """Leave in *pending* what may be sent now.

        What is acked so late that its lease might end on the way is touched first: a touch is refused then, a delete is
        not. That takes its time, in which others come near their end.
        """
        while late := self._expiring(pending):
            touched_at = now()
            try:
                replies = yield b"".join([b"touch %b\r\n" % one.verdict.lease.id.encode() for one in late]), len(late)
            except CONNECTION_ERRORS:
                self._refuse_lost(exchange, pending)
                pending.clear()
                return
            for one, (line, _) in zip(late, replies, strict=True):
                if line == b"TOUCHED":
                    one.held.extend(touched_at)
                else:
                    self._refuse_lost(exchange, [one])
                    pending.remove(one)

    def _expiring(self, pending: Iterable[PendingVerdict]) -> list[PendingVerdict]:
        """Acks of leases with less than a second left; of a shorter ttr half of it, as a touch gives no more."""
        moment = now()
        safe_from = moment + _TOUCH_BELOW
        return [
            one
            for one in pending
            if one.held.ends_at < safe_from
            and isinstance(one.verdict, Ack)
            and one.held.ends_at < moment + one.held.stats.ttr / 2
        ]

    def _exchange_on(
        self, exchange: Exchange, connection: Connection | None, pending: list[PendingVerdict], deadline: float
    ) -> None:
        """Settle on this connection; on the main one, reserve as well. What fails is noted."""
        on = self._main if connection is None else connection
        try:
            if pending and on is not None:
                self._touch_expiring(exchange, on, pending, deadline)
            if connection is None and exchange.limit > 0:
                self._reserve(exchange, pending, deadline)
            elif pending and on is not None:
                self._send_verdicts(exchange, on, pending, b"", 0, deadline)
        except CONNECTION_ERRORS as exc:
            self._record_error(exchange, exc)
        except BackendError as exc:
            exchange.error = exc

    def _record_error(self, exchange: Exchange, exc: Exception) -> None:
        exchange.error = explain(exc, self._pool.address, self._pool.timeout)
        exchange.error.__cause__ = exc

    def _send_verdicts(  # noqa: PLR0917 - one call for each of the three ways to speak
        self,
        exchange: Exchange,
        connection: Connection,
        pending: Sequence[PendingVerdict],
        packet: bytes,
        count: int,
        deadline: float,
    ) -> list[Reply]:
        """Send verdicts and what follows them in one packet. Returns the replies to the latter."""
        packet = self._verdict_packet(pending) + packet if pending else packet
        sent_at = now()
        try:
            connection.send(packet, deadline)
            replies = connection.read_many(len(pending) + count, deadline, lines=len(pending))
        except CONNECTION_ERRORS as exc:
            self._apply_partial_replies(exchange, connection, pending, getattr(exc, "partly_read", ()), sent_at)
            raise
        except BaseException:  # from a signal's handler: nobody would read the replies
            connection.abort()
            raise
        if not pending:
            return replies
        self._apply_replies(exchange, connection, pending, replies, sent_at)
        return replies[len(pending) :]

    def _verdict_packet(self, pending: Sequence[PendingVerdict]) -> bytes:
        """The commands of these verdicts, whose leases are over with them, touches aside."""
        for _, verdict, held in pending:
            if not isinstance(verdict, Touch):
                self._held_leases.end(verdict.lease.token, held)
        return b"".join([command(verdict) for _, verdict, _ in pending])

    def _apply_partial_replies(
        self,
        exchange: Exchange,
        connection: Connection,
        pending: Sequence[PendingVerdict],
        replies: Sequence[Reply],
        sent_at: float,
    ) -> None:
        """The connection has ended: those without a reply are refused.

        Whether or not the server has carried them out: that a job is gone, or is ready, may as well be the doing of
        somebody who had it after us.
        """
        self._apply_replies(exchange, connection, pending, replies, sent_at)
        for at, _, _ in pending[len(replies) :]:
            exchange.refuse(at)

    def _apply_replies(
        self,
        exchange: Exchange,
        connection: Connection,
        pending: Sequence[PendingVerdict],
        replies: Sequence[Reply],
        sent_at: float,
    ) -> None:
        received_at = now()
        for one, (line, _) in zip(pending, replies, strict=False):
            if line == b"DELETED" and one.held.ends_at > received_at and type(one.verdict) is Ack:  # as most are
                exchange.answers[one.at] = None
            else:
                self._apply_reply(exchange, connection, one, line, sent_at, received_at)

    def _apply_reply(  # noqa: PLR0917 - see above
        self,
        exchange: Exchange,
        connection: Connection,
        pending: PendingVerdict,
        line: bytes,
        sent_at: float,
        received_at: float,
    ) -> None:
        at, verdict, held = pending
        if line == DONE[type(verdict)]:
            is_in_vain = False
            if isinstance(verdict, Touch):
                held.extend(sent_at)
                is_in_vain = connection.is_closed
            elif isinstance(verdict, Ack):  # the server may have deleted what was somebody else's by then
                is_in_vain = received_at >= held.ends_at
            if is_in_vain:
                exchange.refuse(at)
            else:
                exchange.answers[at] = None
            return
        self._held_leases.end(verdict.lease.token, held)
        if line == b"BURIED":
            exchange.answers[at] = None
            _log.error(
                "%s had no memory to release job %s of queue %r, and has buried it: kick it when there is some",
                self._pool.shown, verdict.lease.id, verdict.lease.queue,
            )  # fmt: skip
        elif line in STRANDED:
            exchange.refuse(at, OutOfReach)
            _log.error("%s: %s", self._pool.shown, exchange.answers[at])
        else:
            exchange.refuse(at)
            if line != b"NOT_FOUND":
                connection.close()  # it is out of step
                exchange.error = refused(line, self._pool.address)

    # --- taking ---

    def _reserve(self, exchange: Exchange, pending: Sequence[PendingVerdict], deadline: float) -> None:
        """Settle, and take what is ready from one tube after the other until there is enough.

        Or until half of the time is over: what has come by then is worth more than what a slow link may still bring.
        """
        if self._main is None or not (pending or self._main.is_alive()):
            self._main = self._pool.open(deadline, close_with_pool=True)
        try:
            self._reserve_on(self._main, exchange, pending, deadline)
        except BaseException:
            self._main.abort()  # it may hold jobs of which nobody will know
            raise

    def _reserve_on(
        self, connection: Connection, exchange: Exchange, pending: Sequence[PendingVerdict], deadline: float
    ) -> None:
        enough_at = deadline - self._pool.timeout / 2
        others = self._tubes[1:] if len(self._tubes) >= _PROBE_FROM else ()
        probed: dict[str, bool] = {}
        for place, tube in enumerate(self._tubes):
            if place and others:
                if not probed:
                    probed = self._has_some(
                        self._send_verdicts(exchange, connection, (), _probes(others), len(others), deadline)
                    )
                if not probed[tube]:
                    continue
            is_empty = False
            while not is_empty and exchange.wanted > 0 and not (exchange.found and time.monotonic() > enough_at):
                # the others are asked about at once where the first one has come up short the last time
                is_short = others and not place and not probed and self._expected.get(tube, 1) == 1
                is_empty, replies = self._reserve_from(
                    exchange, connection, pending, tube, others if is_short else (), deadline
                )
                pending = ()
                if replies:
                    probed = self._has_some(replies)
            if exchange.found and not is_empty:
                break
        if exchange.found:
            exchange.leases = self._begin_leases(connection, exchange.found, deadline)

    def _reserve_from(  # noqa: PLR0917 - as _send_verdicts
        self,
        exchange: Exchange,
        connection: Connection,
        pending: Sequence[PendingVerdict],
        tube: str,
        probed: Sequence[str],
        deadline: float,
    ) -> tuple[bool, list[Reply]]:
        """One packet's jobs of one tube. Returns whether that were all, and the replies about the *probed* tubes."""
        asked = min(exchange.wanted, self._expected.get(tube, 1), _SLICE)
        packet, count = connection.watch((tube,))
        packet += RESERVE * asked
        if probed:
            packet += _probes(probed)
        asked_at = now()
        try:
            replies = self._send_verdicts(exchange, connection, pending, packet, count + asked + len(probed), deadline)
        except TimeoutError as exc:  # it was too much for the link
            came = sum(line.startswith(b"RESERVED ") for line, _ in getattr(exc, "partly_read", ()))
            self._expected[tube] = max(1, came // 2)
            raise
        if count:
            self._check_watched(connection, replies[:count])
        got = self._collect_reserved(exchange, connection, replies[count : count + asked], asked_at)
        elapsed, most = now() - asked_at, self._pool.timeout / _PACKETS_PER_TIMEOUT
        self._expected[tube] = max(1, 2 * got if elapsed <= most else int(got * most / elapsed))
        return got < asked, replies[count + asked :]

    def _check_watched(self, connection: Connection, replies: Sequence[Reply]) -> None:
        """A tube that is not watched, or still is, would have jobs of the wrong queue come."""
        for line, _ in replies:
            if not line.startswith(b"WATCHING "):
                connection.close()
                raise refused(line, self._pool.address)

    def _collect_reserved(
        self, exchange: Exchange, connection: Connection, replies: Sequence[Reply], asked_at: float
    ) -> int:
        """Note the jobs among the replies to reserves. Returns how many."""
        before = len(exchange.found)
        for line, body in replies:
            if line.startswith(b"RESERVED "):
                exchange.found.append(Reserved(line.split()[1], body, asked_at))
            elif line not in NOTHING_READY:
                connection.close()
                raise refused(line, self._pool.address)
        return len(exchange.found) - before

    def _has_some(self, replies: Sequence[Reply]) -> dict[str, bool]:
        """Which of the tubes after the first have jobs to hand out, by the replies to ``_probes``."""
        return {name: _has_some(reply) for name, reply in zip(self._tubes[1:], replies, strict=True)}

    def _begin_leases(self, connection: Connection, found: Sequence[Reserved], deadline: float) -> list[Lease]:
        """The leases of jobs that were reserved.

        Where that was a while ago, by our clock, they are touched first: the server may have ended a reservation, and
        ``stats-job`` says *reserved* of somebody else's just the same.
        """
        leases: list[Lease] = []
        for at in range(0, len(found), _SLICE):
            some = found[at : at + _SLICE]
            moment, asked_at = time.monotonic(), now()  # two clocks: see there
            if not at:
                self.asked_at = moment - min(asked_at - found[0].asked_at, _PROMPT)
            packet = b"".join([b"stats-job %b\r\n" % job.id for job in some])
            touched: dict[bytes, bool] = {}
            late: list[bytes] = []
            if asked_at - some[0].asked_at > _PROMPT:  # the first one is the oldest
                late = [job.id for job in some if asked_at - job.asked_at > _PROMPT]
                packet = b"".join([b"touch %b\r\n" % job_id for job_id in late]) + packet
            replies = connection.ask(packet, len(late) + len(some), deadline)
            if late:
                touched = {job_id: line == b"TOUCHED" for job_id, (line, _) in zip(late, replies, strict=False)}
                replies = replies[len(late) :]
            leases += self._held_leases.begin(connection, some, replies, touched, asked_at)
        return leases

    # --- waiting ---

    def _wait(self, give_up_at: float) -> list[Lease]:
        came = self._waiter.wait(self._main, give_up_at)
        if came is None:
            return []
        connection, job = came
        deadline = self._pool.deadline()
        held_leases = self._held_leases
        try:
            self._acquire(held_leases)
            return self._begin_leases(connection, [job], deadline)
        except CONNECTION_ERRORS as exc:
            connection.abort()
            raise explain(exc, self._pool.address, self._pool.timeout) from exc
        except BaseException:
            connection.abort()  # it holds a job of which nobody will know
            raise
        finally:
            held_leases.release()


def _probes(tubes: Iterable[str]) -> bytes:
    return b"".join([b"stats-tube %b\r\n" % name.encode() for name in tubes])


def _has_some(reply: Reply) -> bool:
    line, body = reply
    if not line.startswith(b"OK "):
        return False
    tube = parse_tube_stats(body)
    return bool(tube.ready and not tube.pause)
