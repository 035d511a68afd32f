"""The consumer: settles and reserves in one script per line, and sleeps at the server while there is nothing to do."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from multiq.backend import Consumer, Touch
from multiq.driverkit.fork import forks
from multiq.errors import BackendCorrupt, BackendError, BackendUnavailable, LeaseLost

from .node_backoff import Resting
from .partitions import MOST
from .pipeline import call_together
from .records import MICROSECOND, fence, leases, line_of, pack_ids
from .replies import guarded
from .verdicts import details
from .waiting import Sleeper

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from multiq.backend import Lease, Verdict

    from .client import Call, Callers
    from .connection import Word
    from .partitions import Lines

_LOOK_LATE = 1.0  # seconds: without a bell, the queues are looked at so much later, where a call ends then anyway
_HORIZON = 6.0  # seconds, more than that and Servers.look_every; lua/include/bell.lua
_COARSE_FROM = 0.5  # seconds: a longer timeout may be some tenths of a second longer still
_SLICE = 500  # jobs or verdicts in one script: a few milliseconds of the server

_MOST_ANSWERS = 100_000  # that are kept for callers who may ask again

_DONE = ord("1")
_UNFINISHED = b"1"  # it has to promote more before it can hand out anything
_FULL = b"2"  # there are as many bytes of jobs as one reserve may hand out

_NEVER = float("inf")
_LEAST = 0.25  # seconds that a server of a cluster has to answer in

_Key: TypeAlias = "tuple[type[Verdict], str, str, str]"


class _Call(NamedTuple):
    """One script: some verdicts, and how many jobs are asked for."""

    script: Call
    verdicts: Sequence[Verdict]
    places: Sequence[int]
    """Where the verdicts stand in the caller's list."""
    share: int


class _Trade:
    """What an exchange has come to so far."""

    # of the class, as it takes a failure to change them
    deadline = _NEVER
    """When it has to be over, once a server did not answer; monotonic."""
    failure: BackendError | None = None
    out: frozenset[str] = frozenset()
    """Lines that are not asked, or not any more, as their server does not answer."""
    was_answered = False

    def __init__(self, verdicts: Sequence[Verdict], limit: int) -> None:
        self.verdicts = verdicts
        self.limit = limit
        """No more than it has got, once these are as many bytes as one reserve may hand out."""
        self.answers: dict[int, LeaseLost | None] = {}
        self.leases: list[Lease] = []

    @property
    def wanted(self) -> int:
        """How many more jobs to ask for, if it is more than none."""
        return self.limit - len(self.leases)

    @property
    def is_in_vain(self) -> bool:
        """Whether there is nothing that its caller could be told instead of a failure."""
        return len(self.answers) < len(self.verdicts) or not (self.leases or self.was_answered)

    def left(self, queue: str) -> dict[str, list[int]]:
        """Where in the list the verdicts stand that have no answer yet, for each of the queue's lines."""
        places: dict[str, list[int]] = {}
        for at, verdict in enumerate(self.verdicts):
            if verdict.lease.queue == queue and at not in self.answers:
                places.setdefault(line_of(verdict.lease), []).append(at)
        return places


@guarded("reserve", "settle", "exchange")
class RedisConsumer(Consumer):
    """Reserves from a server's queues. Connects at the first call."""

    def __init__(self, callers: Callers, lines: Lines, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._lines = lines
        self._caller = callers.own()
        self._sleeper = Sleeper(callers, self._caller, lines, self.queues)
        self._is_cluster = callers.servers.is_cluster
        self._resting = Resting(callers.servers)
        self._turns: dict[str, int] = {}  # queue -> whose turn it is of its lines
        self._called_to = ""  # the line where a bell rang
        self._asked: set[str] = set()  # lines that the last trade asked for jobs
        self._has_new_lines = False  # whether a queue turned out to have more lines than were looked at
        self._interrupted = False
        self._clocks = -_NEVER, 0  # when we asked last, and the server's time when it answered
        self._looked_at = -_NEVER  # when all queues were last found empty; monotonic, like all times here
        self._change_at: dict[str, float] = {}  # when time alone brings a line the next job
        self._is_on_watch = False  # whether a bell called us, so that nobody else was told
        self._uncertain: dict[str, _Call] = {}  # line -> the call that may or may not have arrived
        self._answered: dict[_Key, LeaseLost | None] = {}  # answers whose callers do not have them yet
        self._gained: list[Lease] = []  # jobs that a failed call has got
        self._generation = forks.generation  # whose the last two are

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
        # an interrupted wait hears no bell
        if verdicts or timeout <= 0 or self._interrupted or not self._knows_that_nothing_is_due():
            answers, found = self._trade(verdicts, limit)
        if not found:
            try:
                found = self._wait(limit, give_up_at) if limit > 0 else self._wait_for_nothing(give_up_at)
            except BaseException as exc:
                self._looked_at = -_NEVER  # whatever ended the sleep may have taken a marker with it
                if not verdicts or not isinstance(exc, BackendError):
                    raise
        self._interrupted = False
        return answers, found

    def interrupt(self) -> None:
        self._interrupted = True
        self._sleeper.nudge()

    def close(self) -> None:
        self._sleeper.close()
        self._caller.close()

    def _discard_connections(self) -> None:
        """A reply was none: those that come after it may be none either."""
        self.close()

    # --- settling and reserving ---

    def _trade(
        self, verdicts: Sequence[Verdict], limit: int, *, is_look: bool = False
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        """Settle, then reserve, without waiting. A look expects to find nothing."""
        started = time.monotonic()
        trade = _Trade(verdicts, limit)
        if limit > 0:
            self.asked_at = started
            self._looked_at = -_NEVER
            self._asked.clear()
        try:
            if self._resting.failures or self._uncertain or self._answered or self._gained:
                self._after_a_failure(trade)
            for queue in self._route(trade):
                self._trade_with(queue, trade, is_look=is_look)
            if trade.leases:
                self._hand_over_the_watch()
        except BaseException as exc:
            if not isinstance(exc, BackendError) or not trade.leases or len(trade.answers) < len(verdicts):
                self._keep(trade)
                raise
        if trade.failure is not None:
            self._raise_if_in_vain(trade, trade.failure)
        if self._answered:
            self._forget(verdicts)
        if limit > 0 and not trade.leases and not self._has_new_lines:
            self._looked_at = started
        self._has_new_lines = False
        return [trade.answers[at] for at in range(len(verdicts))], trade.leases

    def _route(self, trade: _Trade) -> Iterator[str]:
        """The queues to visit, in order; those of a lease that is to be settled included, whose ever they are."""
        yield from self.queues
        if trade.verdicts:
            yield from dict.fromkeys(
                verdict.lease.queue for verdict in trade.verdicts if verdict.lease.queue not in self.queues
            )

    def _trade_with(self, queue: str, trade: _Trade, *, is_look: bool) -> None:
        """As many round trips as it takes: one, unless there is more than one may hold the server for.

        Of several lines the one whose turn it is gives all it can, before the others are asked whether they have
        something. A look asks all of them that.
        """
        to_settle = trade.left(queue)
        lines = self._in_turn(queue) if trade.limit > 0 and queue in self.queues else []
        if trade.out:
            to_settle = {line: places for line, places in to_settle.items() if line not in trade.out}
            lines = [line for line in lines if line not in trade.out]
        asked, others = ([], lines) if is_look and len(lines) > 1 else (lines[:1], lines[1:])
        give_up_at = time.monotonic() + self._caller.servers.timeout
        while True:
            if not asked and others and trade.wanted > 0:
                asked, others = self._those_with_something(queue, others, trade), []
            if asked and time.monotonic() > give_up_at:  # it promotes for ever: the next call goes on
                asked = []
            calls = self._next_calls(to_settle, asked, trade)
            if not calls:
                return
            can_have_more = self._make(calls, trade)
            asked = [line for line in asked if can_have_more.get(line, True)]

    def _in_turn(self, queue: str) -> list[str]:
        """The queue's lines: first the one where a bell rang, else another one each time."""
        lines = self._lines.of(queue)
        if len(lines) == 1:
            return lines
        # not all consumers begin with the same line
        turn = self._turns[queue] = self._turns.get(queue, secrets.randbelow(MOST)) + 1
        first = lines.index(self._called_to) if self._called_to in lines else turn % len(lines)
        self._called_to = ""
        return lines[first:] + lines[:first]

    def _those_with_something(self, queue: str, lines: Sequence[str], trade: _Trade) -> list[str]:
        """Of these lines those that have something to hand out, by one question to each server."""
        in_order = sorted(lines, key=len)  # the first line, which knows how many there are, in front
        together = [in_order] if not self._caller.servers.is_cluster else [[line] for line in in_order]
        calls = [self._caller.new_call("glance", first)._replace(also=tuple(rest)) for first, *rest in together]
        found = set()
        replies = call_together(self._caller, calls, self._until(in_order, trade))
        for group, reply in zip(together, replies, strict=True):
            if isinstance(reply, BackendError):
                self._went_wrong(group[0], reply, trade)
                continue
            self._went_well(group[0], trade)
            now, told, *rest = reply
            for line, has_something, change_at in zip(group, rest[::2], rest[1::2], strict=True):
                self._note_change(line, now, change_at)
                self._note_lines(line, told if line == queue else b"")
                self._asked.add(line)
                if has_something == b"1":
                    found.add(line)
        return [line for line in lines if line in found]

    def _next_calls(self, to_settle: dict[str, list[int]], asked: Sequence[str], trade: _Trade) -> list[_Call]:
        """The next round: one call for each line that has verdicts to hear or jobs to give."""
        shares: dict[str, int] = {}
        wanted = in_all = trade.wanted
        for line in asked:
            if len(to_settle.get(line, ())) <= _SLICE:  # else it hears the rest of its verdicts first
                shares[line] = min(wanted, -(-in_all // len(asked)), _SLICE)
                wanted -= shares[line]
        calls = []
        for line in dict.fromkeys((*to_settle, *shares)):
            places = to_settle.pop(line, [])
            if places[_SLICE:]:
                to_settle[line] = places[_SLICE:]
            share = max(shares.get(line, 0), 0)
            if share:
                self._asked.add(line)
            if places or share:
                calls.append(self._new_call(line, places[:_SLICE], share, trade))
        return calls

    def _new_call(self, line: str, places: Sequence[int], share: int, trade: _Trade) -> _Call:
        verdicts = [trade.verdicts[at] for at in places]
        number = self._caller.next_number()
        arguments: list[Word] = [self._caller.token(number), share, *[b""] * (2 * len(verdicts))]
        arguments[2::2] = pack_ids([verdict.lease.id for verdict in verdicts])
        arguments[3::2] = [fence(verdict.lease) + details(verdict) for verdict in verdicts]
        script = self._caller.new_call("exchange", line, arguments, number=number)
        return _Call(script, verdicts, places, share)

    def _make(self, calls: Sequence[_Call], trade: _Trade) -> dict[str, bool]:
        """One round. Returns for each line whether it can have more jobs to hand out."""
        can_have_more = {}
        failures: list[tuple[str, BackendError]] = []
        uncertain, scripts, until = self._uncertain, [], None
        for call in calls:
            script = call.script
            uncertain[script.line] = call  # until its reply is here, whatever comes in between
            scripts.append(script)
        if self._is_cluster:
            until = self._until([script.line for script in scripts], trade)
        for call, reply in zip(calls, call_together(self._caller, scripts, until), strict=True):
            line = call.script.line
            if isinstance(reply, BackendError):
                can_have_more[line] = False
                if not isinstance(reply, BackendUnavailable):
                    del uncertain[line]
                failures.append((line, reply))
                continue
            answers, found, more = self._hear(call, reply)
            trade.answers.update(zip(call.places, answers, strict=True))
            trade.leases += found
            if more == _FULL:
                trade.limit = len(trade.leases)
            del uncertain[line]
            trade.was_answered = True
            if self._resting.failures:
                self._resting.answered(line)
            can_have_more[line] = more == _UNFINISHED or call.share in {0, len(found)}
        for line, failure in failures:
            self._went_wrong(line, failure, trade)
        return can_have_more

    def _hear(self, call: _Call, reply: Any) -> tuple[list[LeaseLost | None], list[Lease], bytes]:
        """What a script answered: about the verdicts, the jobs, and why there are no more of them if it knows."""
        more, now, change_at, letters, told, *handed_out = reply
        line = call.script.line
        if call.share:  # else the script has not looked
            self._clocks = self.asked_at, int(now)
            self._note_change(line, now, change_at)
        if told:
            self._note_lines(line, told)
        answers = [
            None if letter == _DONE else LeaseLost(verdict.lease.queue, verdict.lease.id)
            for letter, verdict in zip(letters, call.verdicts, strict=True)
        ]
        return answers, leases(line, handed_out, int(now)), more

    def _note_change(self, line: str, now: bytes, change_at: bytes) -> None:
        # reckoned from when the reply came: never early, and late by half a round trip
        wait = (int(change_at) - int(now)) / MICROSECOND if change_at else _NEVER
        self._change_at[line] = time.monotonic() + wait

    def _note_lines(self, line: str, told: bytes) -> None:
        if told and self._lines.learn(line, told):
            self._has_new_lines = True

    # --- after a failure ---

    def _after_a_failure(self, trade: _Trade) -> None:
        """Before a trade makes any calls: what earlier ones left behind."""
        if self._generation != forks.generation:  # the parent finds out, and has the jobs
            self._generation = forks.generation
            self._uncertain.clear()
            self._gained.clear()
        self._leave_out(trade)
        self._make_sure(trade)
        if self._gained and trade.limit > 0:
            self._hand_out_gained(trade)
        self._use_what_is_known(trade)

    def _raise_if_in_vain(self, trade: _Trade, failure: BackendError) -> None:
        """Unless there is something that the caller can be told instead."""
        if trade.is_in_vain:
            self._keep(trade)
            failure.is_partial = trade.was_answered or bool(trade.leases)
            raise failure.with_traceback(None)  # it may have been raised before

    def _make_sure(self, trade: _Trade) -> None:
        """Find out what became of calls whose replies were lost, by making them again under their old numbers.

        A line whose last call is still uncertain takes no other.
        """
        for line, call in tuple(self._uncertain.items()):
            if line not in trade.out:
                try:
                    reply = self._caller.perform(call.script, self._until([line], trade))
                except BackendError as exc:
                    if not isinstance(exc, BackendUnavailable):
                        del self._uncertain[line]  # it was refused
                    self._went_wrong(line, exc, trade)
                    continue
                answers, found, _ = self._hear(call, reply)
                self._remember(zip(call.verdicts, answers, strict=True))
                self._gained += found
                del self._uncertain[line]
                self._went_well(line, trade)

    def _hand_out_gained(self, trade: _Trade) -> None:
        """The jobs that failed calls have got. They are touched first: some may be somebody else's by now."""
        by_line: dict[str, list[Lease]] = {}
        for lease in {(lease.queue, lease.id, lease.token): lease for lease in self._gained}.values():  # each once
            by_line.setdefault(line_of(lease), []).append(lease)
        kept: list[Lease] = []
        for line, gained in by_line.items():
            part, rest = gained[: min(trade.wanted, _SLICE)], gained[min(trade.wanted, _SLICE) :]
            kept += rest
            if not part:
                continue
            if line in trade.out or line in self._uncertain:
                kept += part
                continue
            call = self._new_call(line, range(len(part)), 0, _Trade([Touch(lease) for lease in part], 0))
            try:
                reply = self._caller.perform(call.script, self._until([line], trade))
            except BackendError as exc:
                self._went_wrong(line, exc, trade)
                kept += part
                continue
            answers, _, _ = self._hear(call, reply)
            self._went_well(line, trade)
            trade.leases += [lease for lease, lost in zip(part, answers, strict=True) if lost is None]
        self._gained = kept

    def _leave_out(self, trade: _Trade) -> None:
        """Lines whose servers did not answer lately are not asked, unless there are no others."""
        if not self._resting.failures:
            return
        lines = {line_of(verdict.lease) for verdict in trade.verdicts}
        if trade.limit > 0:
            lines.update(line for queue in self.queues for line in self._lines.of(queue))
        out = self._resting.of((*lines, *self._uncertain))
        if not lines <= out:
            trade.out |= out
            trade.failure = next((error for line in out if (error := self._resting.error_of(line))), None)
        for line in out:
            self._change_at.pop(line, None)

    def _went_well(self, line: str, trade: _Trade) -> None:
        trade.was_answered = True
        if self._resting.failures:
            self._resting.answered(line)

    def _went_wrong(self, line: str, failure: BackendError, trade: _Trade) -> None:
        """Go on without this line if its keys hold something else, or in a cluster if its server does not answer.

        Raises *failure* otherwise.
        """
        if isinstance(failure, BackendCorrupt):
            self._resting.cannot_be_read(line, failure)
            trade.failure = failure
            trade.out |= {line}
            self._change_at.pop(line, None)
            return
        if not self._is_cluster or not isinstance(failure, BackendUnavailable):
            raise failure
        self._resting.failed(line, failure)
        if trade.failure is None:
            trade.deadline = time.monotonic() + self._caller.servers.timeout / 2
        trade.failure = failure
        trade.out |= {line}
        self._change_at.pop(line, None)
        lines = (line for queue in self.queues for line in self._lines.of(queue))
        trade.out |= self._resting.of(lines)  # those of the same server

    def _until(self, lines: Sequence[str], trade: _Trade) -> float:
        """Until when to wait for these lines' servers: not for so long that the others have no time left."""
        now, timeout = time.monotonic(), self._caller.servers.timeout
        if not self._is_cluster or not (len(self.queues) > 1 or self._lines.are_several(self.queues[0])):
            return now + timeout
        left = timeout if trade.failure is None else max(trade.deadline - now, _LEAST)
        if self._resting.failures:
            left = min(left, max(map(self._resting.patience, lines)))
        return now + max(left / 2, _LEAST)

    def _use_what_is_known(self, trade: _Trade) -> None:
        used = set()
        for at, verdict in enumerate(trade.verdicts):
            if (key := _key(verdict)) in self._answered:
                lease = verdict.lease
                trade.answers[at] = LeaseLost(lease.queue, lease.id) if key in used else self._answered[key]
                used.add(key)

    def _keep(self, trade: _Trade) -> None:
        """What a failed exchange has come to, for the next one."""
        known = ((trade.verdicts[at], answer) for at, answer in trade.answers.items())
        self._remember(known)
        self._gained = trade.leases + self._gained

    def _forget(self, verdicts: Sequence[Verdict]) -> None:
        """Their callers have the answers now."""
        for verdict in verdicts:
            self._answered.pop(_key(verdict), None)

    def _remember(self, known: Iterable[tuple[Verdict, LeaseLost | None]]) -> None:
        """Answers that last until their callers ask again.

        A touch that went through says nothing about the next one of the same lease: it is simply made again.
        """
        for verdict, answer in known:
            if not isinstance(verdict, Touch):
                self._answered.setdefault(_key(verdict), answer)  # of one that is said twice, the first counts
        while len(self._answered) > _MOST_ANSWERS:  # callers that never came back
            del self._answered[next(iter(self._answered))]

    # --- waiting ---

    def _wait_for_nothing(self, give_up_at: float) -> list[Lease]:
        """No jobs are asked for: until the time is over, or an interrupt."""
        if not self._interrupted and time.monotonic() < give_up_at:
            self._sleeper.pause(give_up_at)
        return []

    def _wait(self, limit: int, give_up_at: float) -> list[Lease]:
        look_every = self._caller.servers.look_every
        while not self._interrupted:
            now = time.monotonic()
            if now >= give_up_at:
                break
            change_at = min(self._change_at.values(), default=_NEVER)
            look_at = min(change_at, self._looked_at + look_every, self._resting.next_end())
            wake_at = min(look_at if give_up_at - look_at > _LOOK_LATE else give_up_at, change_at, give_up_at)
            if self._resting.failures:
                wake_at = min(look_at, give_up_at)
            elif wake_at == give_up_at:  # who looks at the end of one wait need not wake up in the middle of the next
                look_at = min(look_at, self._looked_at + look_every - _LOOK_LATE)
            rang = False
            if wake_at > now:
                exact = change_at == wake_at or wake_at - now < _COARSE_FROM
                rang, taken = self._sleep(wake_at - now, limit, exact=exact)
                if taken:
                    return taken
                if taken is not None:
                    continue
            if rang or time.monotonic() >= look_at:
                self._called_to = next(iter(self._sleeper.rang), "")
                _, found = self._trade((), limit, is_look=not rang)
                self._pass_on_bells()
                if found:
                    return found
        self._hand_over_the_watch()
        return []

    def _sleep(self, seconds: float, limit: int, *, exact: bool) -> tuple[bool, list[Lease] | None]:
        """Sleep. Returns whether a bell rang, or nobody can tell, and what was there then; None: nobody has looked."""
        line = self.queues[0]
        if limit <= 0 or self._uncertain or not self._sleeper.can_call(line):
            lines = (line for queue in self.queues for line in self._lines.of(queue))
            without = self._resting.of(lines) if self._is_cluster else frozenset()
            rang = self._sleeper.sleep(seconds, exact=exact, without=without)
            self._is_on_watch = self._is_on_watch or rang
            return rang, None
        call = self._new_call(line, (), min(limit, _SLICE), _Trade((), limit))
        self._uncertain[line] = call  # until its reply is here
        asleep_at = time.monotonic()
        rang = self._sleeper.sleep(seconds, exact=exact, then=call.script)
        self._is_on_watch = self._is_on_watch or rang
        if self._sleeper.heard is None:
            return True, None
        self._looked_at, woke_at = -_NEVER, time.monotonic()
        # this process may have been stopped before it woke up: the server's clock tells when it reserved
        asked_at, then = self._clocks
        since = (int(self._sleeper.heard[1]) - then) / MICROSECOND
        self.asked_at = min(woke_at, max(asleep_at, asked_at + since))
        _, found, more = self._hear(call, self._sleeper.heard)
        self._uncertain.clear()
        if found:
            self._is_on_watch = False  # the script told somebody else
        elif more == _UNFINISHED or self._has_new_lines:
            return True, None
        else:
            self._looked_at = woke_at
        return rang, found

    def _knows_that_nothing_is_due(self) -> bool:
        """Whether the last look at the queues still holds: what has come since has left a marker at the bell."""
        if self._uncertain or self._gained or time.monotonic() >= self._resting.next_end():
            return False
        change_at = min(self._change_at.values(), default=_NEVER)
        return time.monotonic() < min(self._looked_at + self._caller.servers.look_every, change_at)

    def _pass_on_bells(self) -> None:
        """An earlier queue or another line gave all that we can take: somebody else has to hear of this one."""
        for line in self._sleeper.rang:
            if line not in self._asked:
                self._sleeper.ring(line)
        self._sleeper.rang.clear()

    def _hand_over_the_watch(self) -> None:
        """We were told of something that is due soon, and shall not be here. Lines that gave jobs have told others."""
        if not self._is_on_watch:
            return
        self._is_on_watch = False
        soon = time.monotonic() + _HORIZON
        for line, change_at in self._change_at.items():
            if change_at < soon:
                self._sleeper.ring(line)


def _key(verdict: Verdict) -> _Key:
    return type(verdict), verdict.lease.queue, verdict.lease.id, verdict.lease.token
