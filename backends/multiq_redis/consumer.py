"""The consumer: settles and reserves in one script per queue, and sleeps at the server while there is nothing to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from multiq.backend import Abandon, Ack, Bury, Consumer, GiveBack, Release, Touch
from multiq.errors import BackendError, BackendUnavailable, LeaseLost

from .jobs import MICROSECOND, fence, leases, microseconds, pack_id
from .sleeper import Sleeper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import Lease, Verdict

    from .caller import Callers
    from .wire import Word

_LOOK_EVERY = 4.5  # seconds: without a bell, the queues are looked at so often...
_LOOK_LATE = 1.0  # ...or so much later, where a call ends then anyway
_HORIZON = 6.0  # seconds, more than both; lua/include/bell.lua
_COARSE_FROM = 0.5  # seconds: a longer timeout may be some tenths of a second longer still
_SLICE = 500  # jobs or verdicts in one script: a few milliseconds of the server

_DONE = ord("1")

_NEVER = float("inf")

_Key: TypeAlias = "tuple[type[Verdict], str, str, str]"


class _Call(NamedTuple):
    """A call that may or may not have arrived."""

    slot: bytes
    queue: str
    number: int
    arguments: tuple[Word, ...]
    verdicts: Sequence[Verdict]


class _Trade:
    """What an exchange has come to so far."""

    def __init__(self, verdicts: Sequence[Verdict], limit: int) -> None:
        self.verdicts = verdicts
        self.limit = limit
        self.answers: dict[int, LeaseLost | None] = {}
        self.leases: list[Lease] = []

    @property
    def wanted(self) -> int:
        """How many more jobs to ask for."""
        return self.limit - len(self.leases)

    def left(self, queue: str) -> list[int]:
        """Where in the list the verdicts about a queue's leases stand that have no answer yet."""
        return [
            at for at, verdict in enumerate(self.verdicts) if verdict.lease.queue == queue and at not in self.answers
        ]


class RedisConsumer(Consumer):
    """Reserves from a server's queues. Connects at the first call."""

    def __init__(self, callers: Callers, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._caller = callers.own()
        self._sleeper = Sleeper(callers, self._caller, self.queues)
        self._interrupted = False
        self._looked_at = -_NEVER  # when all queues were last found empty; monotonic, like all times here
        self._change_at: dict[str, float] = {}  # when time alone brings a queue the next job
        self._is_on_watch = False  # whether a bell called us, so that nobody else was told
        self._uncertain: _Call | None = None
        self._answered: dict[_Key, LeaseLost | None] = {}  # answers that a failed call has got
        self._gained: list[Lease] = []  # jobs that a failed call has got

    def reserve(self, limit: int, timeout: float) -> list[Lease]:
        return self.exchange((), limit, timeout)[1]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return self._trade(verdicts, 0)[0]

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        give_up_at = time.monotonic() + timeout
        answers: list[LeaseLost | None] = []
        found: list[Lease] = []
        if verdicts or timeout <= 0 or not self._knows_that_nothing_is_due():
            answers, found = self._trade(verdicts, limit)
        if not found:
            try:
                found = self._wait(limit, give_up_at)
            except BackendError:
                if not verdicts:
                    raise
        self._interrupted = False
        return answers, found

    def interrupt(self) -> None:
        self._interrupted = True
        self._sleeper.nudge()

    def close(self) -> None:
        self._sleeper.close()
        self._caller.close()

    # --- settling and reserving ---

    def _trade(self, verdicts: Sequence[Verdict], limit: int) -> tuple[list[LeaseLost | None], list[Lease]]:
        """Settle, then reserve, without waiting."""
        trade = _Trade(verdicts, limit)
        if limit > 0:
            self._looked_at = -_NEVER
        started = time.monotonic()
        try:
            self._make_sure()
            self._use_what_is_known(trade)
            for queue in self._route(trade):
                self._trade_with(queue, trade)
        except BackendError:
            if not trade.leases or len(trade.answers) < len(verdicts):
                self._keep(trade)
                raise
        self._answered.clear()
        if limit > 0 and not trade.leases:
            self._looked_at = started
        if trade.leases:
            self._is_on_watch = False  # the script told somebody else
        return [trade.answers[at] for at in range(len(verdicts))], trade.leases

    def _route(self, trade: _Trade) -> Iterator[str]:
        """The queues to visit, in order; those of a lease that is to be settled included, whose ever they are."""
        yield from self.queues
        if trade.verdicts:
            yield from dict.fromkeys(
                verdict.lease.queue for verdict in trade.verdicts if verdict.lease.queue not in self.queues
            )

    def _trade_with(self, queue: str, trade: _Trade) -> None:
        """As many scripts as it takes: one, unless there is more than one may hold the server for."""
        to_settle = trade.left(queue) if trade.verdicts else []
        can_have_more = queue in self.queues
        while True:
            now, to_settle = to_settle[:_SLICE], to_settle[_SLICE:]
            asked = 0 if to_settle or not can_have_more else min(trade.wanted, _SLICE)
            if not now and asked <= 0:
                return
            got, is_unfinished = self._call(queue, now, asked, trade)
            can_have_more = can_have_more and (is_unfinished or asked in {0, got})

    def _call(self, queue: str, now: list[int], asked: int, trade: _Trade) -> tuple[int, bool]:
        """One script. Returns how many jobs it handed out, and whether it has to promote more before it can."""
        verdicts = [trade.verdicts[at] for at in now]
        number = self._caller.next_number()
        arguments: list[Word] = [self._caller.token(number), asked]
        for verdict in verdicts:
            arguments += (pack_id(verdict.lease.id), fence(verdict.lease) + _details(verdict))
        call = _Call(self._caller.slot, queue, number, tuple(arguments), verdicts)
        answers, found, is_unfinished = self._perform(call)
        trade.answers.update(zip(now, answers, strict=True))
        trade.leases += found
        return len(found), is_unfinished

    def _perform(self, call: _Call) -> tuple[list[LeaseLost | None], list[Lease], bool]:
        try:
            reply = self._caller.call("exchange", call.queue, call.arguments, number=call.number)
        except BackendUnavailable:
            self._uncertain = call
            raise
        heard_at = time.monotonic()
        unfinished, now, change_at, letters, *handed_out = reply
        # reckoned from when the reply came: never early, and late by half a round trip
        self._change_at[call.queue] = heard_at + (int(change_at) - int(now)) / MICROSECOND if change_at else _NEVER
        answers = [
            None if letter == _DONE else LeaseLost(verdict.lease.queue, verdict.lease.id)
            for letter, verdict in zip(letters, call.verdicts, strict=True)
        ]
        return answers, leases(call.queue, handed_out, int(now)), unfinished == b"1"

    # --- after a failure ---

    def _make_sure(self) -> None:
        """Find out what became of a call whose reply was lost, by making it again under its old number."""
        call = self._uncertain
        if call is None:
            return
        if call.slot == self._caller.slot:  # else it was our parent's, before a fork
            answers, found, _ = self._perform(call)
            self._answered.update(_without_touches(zip(call.verdicts, answers, strict=True)))
            self._gained += found
        self._uncertain = None

    def _use_what_is_known(self, trade: _Trade) -> None:
        if self._answered:
            for at, verdict in enumerate(trade.verdicts):
                if (key := _key(verdict)) in self._answered:
                    trade.answers[at] = self._answered[key]
        if self._gained:
            trade.leases, self._gained = self._gained[: trade.limit], self._gained[trade.limit :]

    def _keep(self, trade: _Trade) -> None:
        """What a failed exchange has come to, for the next one."""
        known = ((trade.verdicts[at], answer) for at, answer in trade.answers.items())
        self._answered.update(_without_touches(known))
        self._gained = trade.leases + self._gained

    # --- waiting ---

    def _wait(self, limit: int, give_up_at: float) -> list[Lease]:
        while not self._interrupted:
            now = time.monotonic()
            if now >= give_up_at:
                break
            change_at = min(self._change_at.values(), default=_NEVER)
            look_at = min(change_at, self._looked_at + _LOOK_EVERY)
            wake_at = min(look_at if give_up_at - look_at > _LOOK_LATE else give_up_at, change_at, give_up_at)
            rang = False
            if wake_at > now:
                exact = change_at == wake_at or wake_at - now < _COARSE_FROM
                rang = self._sleeper.sleep(wake_at - now, exact=exact)
                self._is_on_watch = self._is_on_watch or rang
            if rang or time.monotonic() >= look_at:
                _, found = self._trade((), limit)
                if found:
                    return found
        self._hand_over_the_watch()
        return []

    def _knows_that_nothing_is_due(self) -> bool:
        """Whether the last look at the queues still holds: what has come since has left a marker at the bell."""
        if self._uncertain is not None or self._gained:
            return False
        change_at = min(self._change_at.values(), default=_NEVER)
        return time.monotonic() < min(self._looked_at + _LOOK_EVERY, change_at)

    def _hand_over_the_watch(self) -> None:
        """We were told of something that is due soon, and shall not be here."""
        if not self._is_on_watch:
            return
        self._is_on_watch = False
        soon = time.monotonic() + _HORIZON
        for queue, change_at in self._change_at.items():
            if change_at < soon:
                self._sleeper.ring(queue)


def _details(verdict: Verdict) -> bytes:
    match verdict:
        case Ack():
            return b"a"
        case GiveBack():
            return b"g"
        case Touch():
            return b"t"
        case Bury(reason=reason):
            return b"b" + _text(reason)
        case Abandon(reason=reason):
            return b"x" + _text(reason)
        case Release(delay=delay, priority=priority, reason=reason):
            return b"r%d:%b:%b" % (microseconds(delay), b"" if priority is None else b"%d" % priority, _text(reason))


def _text(reason: str | None) -> bytes:
    """A reason as it is stored: an error's text may hold halves of surrogate pairs, which UTF-8 cannot."""
    return b"" if reason is None else b"+" + reason.encode("utf-8", "backslashreplace")


def _key(verdict: Verdict) -> _Key:
    return type(verdict), verdict.lease.queue, verdict.lease.id, verdict.lease.token


def _without_touches(
    known: Iterator[tuple[Verdict, LeaseLost | None]],
) -> Iterator[tuple[_Key, LeaseLost | None]]:
    """A touch that went through says nothing about the next one of the same lease: it is simply made again."""
    return ((_key(verdict), answer) for verdict, answer in known if not isinstance(verdict, Touch))
