"""The consumer settles and reserves in one packet. A lease ends with the connection that reserved the job.

The main connection reserves ready jobs, from one tube at a time, so that jobs of earlier queues come first. A consumer
with leases or several queues waits on another connection; see waiting.py.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from multiq.backend import Ack, Consumer, Touch
from multiq.driverkit.fork import forks
from multiq.driverkit.replies import guarded
from multiq.errors import BackendError, BackendTimeout, LeaseLost

from .commands import DONE, STRANDED, OutOfReach, settle_command
from .errors import CONNECTION_ERRORS, explain, reply_error
from .leases import HeldLeases, now
from .multiplex import Multiplexer
from .records import NOTHING_READY, RESERVE, Reserved
from .stats import parse_tube_stats
from .waiting import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Lease, Verdict

    from .connection import Connection
    from .leases import PendingVerdict
    from .multiplex import Steps
    from .pool import Pool
    from .replies import Reply

_log = logging.getLogger("multiq.beanstalk")

_SLICE = 500  # jobs requested in one packet
_TOUCH_BELOW = 1.0  # seconds; if a lease has less time left, it is touched before its job is deleted
_PROBE_FROM = 3  # with this many queues or more, the consumer first asks which queues have jobs
_PROMPT = 0.05  # seconds: leases need no touch if the reply came within this time
_PACKETS_PER_TIMEOUT = 8  # one packet's jobs may take this fraction (1/8) of the timeout


@guarded("reserve", "settle", "exchange", server="a beanstalkd")
class BeanstalkConsumer(Consumer):
    """Reserves jobs from the tubes of one server. Connects at the first call."""

    def __init__(self, pool: Pool, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._tubes = self._own_order = tuple(dict.fromkeys(queues))
        """``_tubes`` has the order of the current call. ``_own_order`` has the order of the constructor."""
        self._pool = pool
        self._waiter = Waiter(pool, self._tubes)
        self._expected: dict[str, int] = {}  # tube -> the number of jobs to request in one packet
        self._reset()

    def _reset(self) -> None:
        """Drop all leases and connections. A forked child also calls this, because the leases and connections belong to
        the parent."""
        self._generation = forks.generation
        self._main: Connection | None = None
        self._waiter.forget_connections()
        self._held_leases = HeldLeases()

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return self.exchange((), limit, timeout, queues)[1]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return self._exchange(verdicts, 0)[0] if verdicts else []

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        # A wait does not use this order, because it watches all tubes together.
        self._tubes = self._own_order if queues is None else tuple(dict.fromkeys(self.in_order(queues)))
        give_up_at = time.monotonic() + timeout
        answers, leases = self._exchange(verdicts, limit)
        if not leases and timeout > 0 and limit > 0:
            try:
                leases = self._wait_for_jobs(give_up_at)
            except BackendError:
                if not verdicts:
                    raise
        if self._waiter.is_interrupted:
            self._waiter.clear_interrupt()
        return answers, leases

    def interrupt(self) -> None:
        self._waiter.interrupt()

    def close(self) -> None:
        if self._main is not None:
            self._main.close()
        self._waiter.close()
        self._reset()

    def _discard_connections(self) -> None:
        """Close all connections. After a malformed reply, later replies may be malformed, too."""
        self.close()

    # --- settling ---

    def _exchange(self, verdicts: Sequence[Verdict], limit: int) -> tuple[list[LeaseLost | None], list[Lease]]:
        if self._generation != forks.generation:
            self._reset()
        deadline = self._pool.deadline()
        held_leases = self._held_leases
        try:
            self._acquire(held_leases)
            return self._exchange_locked(_Exchange(verdicts, limit), deadline)
        finally:
            held_leases.release()

    def _acquire(self, held_leases: HeldLeases) -> None:
        """Lock the connections. Raises ``BackendTimeout`` if another thread holds the lock for half of the timeout.

        The other half of the timeout is for this call's own requests. With less time, the call's deadline might end a
        connection that works.
        """
        at_most = self._pool.timeout / 2
        if not held_leases.acquire(at_most):
            raise BackendTimeout(
                f"{self._pool.server_name} has not answered another call of this consumer for {at_most:g} s: it is "
                "stopped, overloaded or cut off; ?timeout= in the URL gives it more time"
            )

    def _exchange_locked(self, exchange: _Exchange, deadline: float) -> tuple[list[LeaseLost | None], list[Lease]]:
        verdicts, limit = exchange.verdicts, exchange.limit
        pending = self._held_leases.by_connection(verdicts, exchange.answers) if verdicts else {}
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
            _log.warning("%s; of %d verdicts, those without a reply are refused", exchange.error, len(verdicts))
        return [exchange.answers[at] for at in range(len(verdicts))], exchange.leases

    def _exchange_multiplexed(
        self, exchange: _Exchange, pending: dict[Connection, list[PendingVerdict]], deadline: float
    ) -> None:
        """Settle on several connections at the same time, and reserve on the main connection.

        At least half of the time is for the reserve. So a connection that does not answer cannot use up all the time.
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

    def _steps(self, exchange: _Exchange, connection: Connection, pending: list[PendingVerdict]) -> Steps:
        """The work of ``_touch_expiring`` and ``_send_verdicts``, as steps on one of several connections."""
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

    def _refuse_lost(self, exchange: _Exchange, pending: Iterable[PendingVerdict]) -> None:
        for at, verdict, held in pending:
            self._held_leases.end(verdict.lease.token, held)
            exchange.refuse(at)

    def _touch_expiring(
        self, exchange: _Exchange, connection: Connection, pending: list[PendingVerdict], deadline: float
    ) -> None:
        """Touch leases that are about to end, and drop verdicts on lost leases from *pending*."""
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

    def _touch_steps(self, exchange: _Exchange, pending: list[PendingVerdict]) -> Steps:
        """Touch leases that might end before their acks arrive. Drop verdicts on lost leases from *pending*.

        After the end of a lease, the server refuses a touch, but not a delete. A round of touches takes time. During
        this time, other leases come near their ends. So rounds are repeated until no lease is near its end.
        """
        while expiring := self._expiring(pending):
            touched_at = now()
            try:
                packet = b"".join([b"touch %b\r\n" % one.verdict.lease.id.encode() for one in expiring])
                replies = yield packet, len(expiring)
            except CONNECTION_ERRORS:
                self._refuse_lost(exchange, pending)
                pending.clear()
                return
            for one, (line, _) in zip(expiring, replies, strict=True):
                if line == b"TOUCHED":
                    one.held.extend(touched_at)
                else:
                    self._refuse_lost(exchange, [one])
                    pending.remove(one)

    def _expiring(self, pending: Iterable[PendingVerdict]) -> list[PendingVerdict]:
        """Return the acks whose leases have less than a second and less than half of their ttr left."""
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
        self, exchange: _Exchange, connection: Connection | None, pending: list[PendingVerdict], deadline: float
    ) -> None:
        """Settle on *connection*, or settle and reserve on the main connection if *connection* is None.

        Records errors in *exchange*.
        """
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

    def _record_error(self, exchange: _Exchange, exc: Exception) -> None:
        exchange.error = explain(exc, self._pool.address, self._pool.timeout)
        exchange.error.__cause__ = exc

    def _send_verdicts(  # noqa: PLR0917 - one signature for three kinds of packets
        self,
        exchange: _Exchange,
        connection: Connection,
        pending: Sequence[PendingVerdict],
        packet: bytes,
        count: int,
        deadline: float,
    ) -> list[Reply]:
        """Send *pending*, followed by *packet* of *count* commands, and return the replies to *packet*."""
        packet = self._verdict_packet(pending) + packet if pending else packet
        sent_at = now()
        try:
            connection.send(packet, deadline)
            replies = connection.read_many(len(pending) + count, deadline, lines=len(pending))
        except CONNECTION_ERRORS as exc:
            self._apply_partial_replies(exchange, connection, pending, getattr(exc, "partly_read", ()), sent_at)
            raise
        except BaseException:  # a signal handler has raised it; the replies would stay unread
            connection.abort()
            raise
        if not pending:
            return replies
        self._apply_replies(exchange, connection, pending, replies, sent_at)
        return replies[len(pending) :]

    def _verdict_packet(self, pending: Sequence[PendingVerdict]) -> bytes:
        """Return the commands of these verdicts. Also ends the leases of the verdicts. A lease that is only touched
        does not end."""
        for _, verdict, held in pending:
            if not isinstance(verdict, Touch):
                self._held_leases.end(verdict.lease.token, held)
        return b"".join([settle_command(verdict) for _, verdict, _ in pending])

    def _apply_partial_replies(
        self,
        exchange: _Exchange,
        connection: Connection,
        pending: Sequence[PendingVerdict],
        replies: Sequence[Reply],
        sent_at: float,
    ) -> None:
        """Apply the replies that arrived before the connection ended, and refuse the other verdicts.

        It is unknown whether the server has carried out the other verdicts. The driver cannot find this out: if the job
        is gone or ready, another consumer may have acked or released it.
        """
        self._apply_replies(exchange, connection, pending, replies, sent_at)
        for at, _, _ in pending[len(replies) :]:
            exchange.refuse(at)

    def _apply_replies(
        self,
        exchange: _Exchange,
        connection: Connection,
        pending: Sequence[PendingVerdict],
        replies: Sequence[Reply],
        sent_at: float,
    ) -> None:
        received_at = now()
        for one, (line, _) in zip(pending, replies, strict=False):
            if line == b"DELETED" and one.held.ends_at > received_at and type(one.verdict) is Ack:  # the common case
                exchange.answers[one.at] = None
            else:
                self._apply_reply(exchange, connection, one, line, sent_at, received_at)

    def _apply_reply(  # noqa: PLR0917 - as above
        self,
        exchange: _Exchange,
        connection: Connection,
        pending: PendingVerdict,
        line: bytes,
        sent_at: float,
        received_at: float,
    ) -> None:
        at, verdict, held = pending
        if line == DONE[type(verdict)]:
            if isinstance(verdict, Touch):
                held.extend(sent_at)
            if held.is_late(verdict, received_at):
                exchange.refuse(at)
            else:
                exchange.answers[at] = None
            return
        self._held_leases.end(verdict.lease.token, held)
        if line == b"BURIED":
            exchange.answers[at] = None
            _log.error(
                "%s had no memory to release job %s of queue %r, and has buried it: kick it when there is memory",
                self._pool.server_name, verdict.lease.id, verdict.lease.queue,
            )  # fmt: skip
        elif line in STRANDED:
            exchange.refuse(at, OutOfReach)
            _log.error("%s: %s", self._pool.server_name, exchange.answers[at])
        else:
            exchange.refuse(at)
            if line != b"NOT_FOUND":
                connection.close()  # later replies may belong to other commands
                exchange.error = reply_error(line, self._pool.address)

    # --- reserving ---

    def _reserve(self, exchange: _Exchange, pending: Sequence[PendingVerdict], deadline: float) -> None:
        """Settle, and reserve ready jobs from one tube after the other, until there are enough jobs.

        Stops at half of the timeout if jobs have arrived, because these jobs must not wait for a slow network.
        """
        if self._main is None or not (pending or self._main.is_alive()):
            self._main = self._pool.open(deadline, close_with_pool=True)
        try:
            self._reserve_on(self._main, exchange, pending, deadline)
        except BaseException:
            self._main.abort()  # the connection may hold jobs that were not returned to the caller
            raise

    def _reserve_on(
        self, connection: Connection, exchange: _Exchange, pending: Sequence[PendingVerdict], deadline: float
    ) -> None:
        enough_at = deadline - self._pool.timeout / 2
        others = self._tubes[1:] if len(self._tubes) >= _PROBE_FROM else ()
        probed: dict[str, bool] = {}
        for position, tube in enumerate(self._tubes):
            if position and others:
                if not probed:
                    probed = self._tubes_with_jobs(
                        self._send_verdicts(exchange, connection, (), _probes(others), len(others), deadline)
                    )
                if not probed[tube]:
                    continue
            is_empty = False
            while not is_empty and exchange.wanted > 0 and not (exchange.found and time.monotonic() > enough_at):
                # If the last reserve from the first tube found too few jobs, the packet also requests the stats of the
                # other tubes.
                is_short = others and not position and not probed and self._expected.get(tube, 1) == 1
                is_empty, replies = self._reserve_from(
                    exchange, connection, pending, tube, others if is_short else (), deadline
                )
                pending = ()
                if replies:
                    probed = self._tubes_with_jobs(replies)
            if exchange.found and not is_empty:
                break
        if exchange.found:
            exchange.leases = self._begin_leases(connection, exchange.found, deadline)

    def _reserve_from(  # noqa: PLR0917 - as _send_verdicts
        self,
        exchange: _Exchange,
        connection: Connection,
        pending: Sequence[PendingVerdict],
        tube: str,
        probed: Sequence[str],
        deadline: float,
    ) -> tuple[bool, list[Reply]]:
        """Reserve jobs of one tube with one packet.

        Returns whether the tube is empty now, and the replies to the stats commands for the tubes *probed*.
        """
        asked = min(exchange.wanted, self._expected.get(tube, 1), _SLICE)
        packet, count = connection.watch((tube,))
        packet += RESERVE * asked
        if probed:
            packet += _probes(probed)
        asked_at = now()
        try:
            replies = self._send_verdicts(exchange, connection, pending, packet, count + asked + len(probed), deadline)
        except TimeoutError as exc:  # the network is too slow for this number of jobs
            arrived = sum(line.startswith(b"RESERVED ") for line, _ in getattr(exc, "partly_read", ()))
            self._expected[tube] = max(1, arrived // 2)
            raise
        if count:
            self._check_watched(connection, replies[:count])
        got = self._collect_reserved(exchange, connection, replies[count : count + asked], asked_at)
        elapsed, most = now() - asked_at, self._pool.timeout / _PACKETS_PER_TIMEOUT
        self._expected[tube] = max(1, 2 * got if elapsed <= most else int(got * most / elapsed))
        return got < asked, replies[count + asked :]

    def _check_watched(self, connection: Connection, replies: Sequence[Reply]) -> None:
        """Raise if a ``watch`` or ``ignore`` failed, because reserves would return jobs of the wrong queue."""
        for line, _ in replies:
            if not line.startswith(b"WATCHING "):
                connection.close()
                raise reply_error(line, self._pool.address)

    def _collect_reserved(
        self, exchange: _Exchange, connection: Connection, replies: Sequence[Reply], asked_at: float
    ) -> int:
        """Add to *exchange* the jobs that are in the replies to reserves. Returns the number of these jobs."""
        before = len(exchange.found)
        for line, body in replies:
            if line.startswith(b"RESERVED "):
                exchange.found.append(Reserved(line.split()[1], body, asked_at))
            elif line not in NOTHING_READY:
                connection.close()
                raise reply_error(line, self._pool.address)
        return len(exchange.found) - before

    def _tubes_with_jobs(self, replies: Sequence[Reply]) -> dict[str, bool]:
        """Return, for each tube except the first one, whether it has ready jobs. *replies*: the replies to
        ``_probes``."""
        return {name: _has_ready_jobs(reply) for name, reply in zip(self._tubes[1:], replies, strict=True)}

    def _begin_leases(self, connection: Connection, found: Sequence[Reserved], deadline: float) -> list[Lease]:
        """Return the leases of reserved jobs.

        Jobs whose reserve was sent some time ago are touched first, because the server may have ended their
        reservations. ``stats-job`` would not show this: if another consumer has the job now, its state is also
        *reserved*.
        """
        leases: list[Lease] = []
        for at in range(0, len(found), _SLICE):
            some = found[at : at + _SLICE]
            moment, asked_at = time.monotonic(), now()  # two clocks; see leases.now
            if not at:
                self.asked_at = moment - min(asked_at - found[0].asked_at, _PROMPT)
            packet = b"".join([b"stats-job %b\r\n" % job.id for job in some])
            touched: dict[bytes, bool] = {}
            late: list[bytes] = []
            if asked_at - some[0].asked_at > _PROMPT:  # the first job is the oldest
                late = [job.id for job in some if asked_at - job.asked_at > _PROMPT]
                packet = b"".join([b"touch %b\r\n" % job_id for job_id in late]) + packet
            replies = connection.ask(packet, len(late) + len(some), deadline)
            if late:
                touched = {job_id: line == b"TOUCHED" for job_id, (line, _) in zip(late, replies, strict=False)}
                replies = replies[len(late) :]
            leases += self._held_leases.begin(connection, some, replies, touched, asked_at)
        return leases

    # --- waiting ---

    def _wait_for_jobs(self, give_up_at: float) -> list[Lease]:
        reserved = self._waiter.wait(self._main, give_up_at)
        if reserved is None:
            return []
        connection, job = reserved
        deadline = self._pool.deadline()
        held_leases = self._held_leases
        try:
            self._acquire(held_leases)
            return self._begin_leases(connection, [job], deadline)
        except CONNECTION_ERRORS as exc:
            connection.abort()
            raise explain(exc, self._pool.address, self._pool.timeout) from exc
        except BaseException:
            connection.abort()  # the connection holds a job that was not returned to the caller
            raise
        finally:
            held_leases.release()


class _Exchange:
    """One call's verdicts, the answers to the verdicts, and the reserved jobs."""

    def __init__(self, verdicts: Sequence[Verdict], limit: int) -> None:
        self.verdicts = verdicts
        self.limit = limit
        self.answers: dict[int, LeaseLost | None] = {}
        self.found: list[Reserved] = []
        self.leases: list[Lease] = []
        self.error: Exception | None = None

    @property
    def wanted(self) -> int:
        """The number of jobs that are still to be reserved."""
        return self.limit - len(self.found)

    def refuse(self, at: int, kind: type[LeaseLost] = LeaseLost) -> None:
        """Answer the verdict at this index with ``LeaseLost``."""
        lease = self.verdicts[at].lease
        self.answers[at] = kind(lease.queue, lease.id)


def _probes(tubes: Iterable[str]) -> bytes:
    return b"".join([b"stats-tube %b\r\n" % name.encode() for name in tubes])


def _has_ready_jobs(reply: Reply) -> bool:
    line, body = reply
    if not line.startswith(b"OK "):
        return False
    tube = parse_tube_stats(body)
    return bool(tube.ready and not tube.pause)
