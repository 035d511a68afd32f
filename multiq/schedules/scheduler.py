"""Makes the occurrences of schedules as delayed jobs, a minute ahead. Any number of processes may do this at the same
time.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
each occurrence is    its job and the note of its schedule change in one ``carry_out``, on    one call for all that is
made once             condition of the note's version; so one of several schedulers succeeds  due, and one for each
                                                                                              note to read it again
never early           the delay is counted from the server's own time, which was read         one call before jobs are
                      before; this process's clock has no part in it                          made
nothing if nothing    the notes are read again only if the note ``changes`` has another       one call per look
is due                version, and every half hour
====================  ======================================================================  =======================
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import random
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import Enqueue, NewJob, Put, Version
from multiq.errors import (
    BackendError,
    EnqueueRefused,
    MultiqError,
    OptionInvalid,
    PayloadInvalid,
    ScheduleInvalid,
    Unsupported,
)
from multiq.ids import new_id
from multiq.job import describe

from . import record as records
from .adding import alone
from .occurrence_job import encoded, envelope_of, job_of
from .overlap import DECIDE, NEVER, plan
from .record import AHEAD_MOST, BORN, HOME, MAX_JOBS, Record, occurrence_id, timestamp
from .removing import remove_copies
from .stored import carry_on, changes_of, homes, is_there, notes_of, store_all
from .timetable import SECOND
from .zone_database import zones_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from multiq.app import App
    from multiq.backend import Backend, Note, Step

    from .overlap import Plan
    from .record import Definition
    from .timetable import Milliseconds

_log = logging.getLogger("multiq.schedules")

EVERY = 20.0  # seconds between two looks
AHEAD = 60.0  # the longest time in seconds between making an occurrence and its due time
JITTER = 0.2  # the share of ``EVERY`` by which looks vary, so that many schedulers do not look at the same moment

_RELOAD_EVERY = 1800.0  # seconds
_BASE_FOR = 10.0  # seconds after which the time is read again: a clock may be set, or stop during a suspend
_FRESH = 0.02  # seconds for which the server's time is used before it is read again
_TRIES = 5  # attempts to change schedules that other processes change at the same time
_SINGLE = 20  # notes that are read one by one; more are read as pages
_AT_ONCE = 90  # schedules that change in one step: their notes and 900 jobs are fewer than a thousand steps
_RELOAD_LATER = 600 * SECOND
_MOST_BYTES = 1_000_000  # of the notes and jobs of one call
_WITH_ERRORS = 10.0  # seconds after which a look with an error ends, because each error may take a whole timeout
_SHORTEST = 0.25  # seconds between two looks


class _Entry:
    """A schedule, as this process knows it."""

    __slots__ = ("key", "record", "version", "wake")

    def __init__(self, key: str, record: Record, version: str) -> None:
        self.key = key
        self.record = record
        self.version: str | None = version
        """The version of the note. None: the note has changed since it was read."""
        self.wake: Milliseconds = 0

    @property
    def place(self) -> tuple[str, str]:
        return self.record.home, self.key


class ServerTime:
    """The time by the clock of a queue's server. The value may be a little earlier than the server's time."""

    def __init__(self, backend: Backend, home: str) -> None:
        self._backend = backend
        self._home = home
        self._now = 0.0
        self._read_at = float("-inf")

    def now(self) -> float:
        """Return the time in seconds, read within the last ``_FRESH`` seconds.

        The time since the reading is not added, because this process's clock may be faster than the server's.
        """
        return self.read() if time.monotonic() - self._read_at > _FRESH else self._now

    def read(self) -> float:
        self._now = self._backend.now(self._home)
        self._read_at = time.monotonic()
        return self._now


class _NotMadeError(MultiqError):
    """The error that middleware gets for jobs that were not made. *left*: the schedules that must be planned again."""

    def __init__(self, left: list[_Entry]) -> None:
        self.left = left
        super().__init__("the jobs of the schedule were not made now: this scheduler or another one makes them later")


class _MiddlewareError(MultiqError):
    """Middleware has raised an error, so jobs are made later."""


class Scheduler:
    """Looks for due occurrences of all schedules of an app's connection, and makes their jobs.

    - *app*: the first call of ``look`` stores the schedules of the app's code, if they are not stored yet.
    - *ahead*: the longest time, in seconds, between making an occurrence and its due time. At most ``AHEAD_MOST``,
      because later changes of a schedule cannot reach more jobs.

    Raises ``OptionInvalid`` for another *ahead*. Not thread-safe.
    """

    def __init__(self, app: App, *, ahead: float = AHEAD) -> None:
        if not 0 <= ahead <= AHEAD_MOST:
            raise OptionInvalid(f"ahead must be a number of seconds from 0 to {AHEAD_MOST:g}, got {ahead!r}")
        self._app = app
        self._backend = app.backend
        self._ahead: Milliseconds = int(ahead * SECOND)
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._queue: list[tuple[Milliseconds, int, _Entry]] = []  # a heap; an entry may be in it more than once
        self._urgent: list[Milliseconds] = []  # a heap of times at which a look must not be late
        self._numbers = itertools.count()
        self._changes: str | None = None
        self._loaded_at = float("-inf")
        self._is_synced = False
        self._gone: dict[str, str] = {}  # names of schedules in code whose notes are gone -> their queues
        self._born: bytes | None = None  # the value of the note ``BORN`` when the schedules in code were stored
        self._base = 0.0, 0.0  # the server's time, and the monotonic time after it was read
        self._complaints: set[str] = set()
        self.made = 0
        """The number of jobs that this scheduler has made."""
        if not self._backend.declared.notes:
            raise self._backend.unsupported("notes")

    def look(self) -> float:
        """Make the jobs that are due soon. Returns the seconds until the next look. Raises ``MultiqError``."""
        error: BackendError | None = None
        try:
            self._look_for_changes()
        except BackendError as exc:
            if not self._entries:
                raise
            error = exc  # the queues of the known schedules may be on other servers
        due = self._due()
        try:
            self._make_all(due, error)
        except BaseException:
            for entry in due:  # the next look plans them again, whether this call succeeds or fails
                self._wake_at(entry, 0)
            raise
        return self._pause()

    # --- what is stored ---

    def _look_for_changes(self) -> None:
        self._load_if_changed()
        if not self._is_synced:
            if self._app.code_schedules:
                self._sync()
                self._load_if_changed()
            self._is_synced = True
        if self._gone:
            self._store_lost()
        if self._entries and time.monotonic() > self._base[1] + _BASE_FOR:
            self._read_time()

    def _load_if_changed(self) -> None:
        version = changes_of(self._backend)
        if version == self._changes and time.monotonic() < self._loaded_at + _RELOAD_EVERY:
            return
        self._read_time()
        self._loaded_at = time.monotonic()
        self._changes = None  # if the listing fails, the next look repeats it
        if self._is_synced and self._born is not None:  # a server may have been restarted without its data
            born = self._backend.note(HOME, BORN)
            self._is_synced = born is not None and bytes(born.value) == self._born
            if not self._is_synced:  # the notes of schedules may be on other servers, which have kept them
                self._announce({home for home, _ in self._entries})
        entries, error = self._listed()
        for place in self._entries.keys() - entries.keys():
            self._note_gone(self._entries[place])
        self._entries = entries
        self._queue, self._urgent = [], []
        for entry in entries.values():
            self._wake_at(entry, 0)
        if error is not None:
            raise error
        self._changes = version

    def _listed(self) -> tuple[dict[tuple[str, str], _Entry], BackendError | None]:
        """Return all schedules as they are stored now. If a server does not answer, its schedules are returned as they
        were before, with the error: other queues may be on other servers."""
        entries: dict[tuple[str, str], _Entry] = {}
        error: BackendError | None = None
        began = time.monotonic()
        for home in homes(self._backend):
            try:
                if error is None or time.monotonic() < began + _WITH_ERRORS:
                    for note in notes_of(self._backend, home):
                        if (entry := self._read(note)) is not None:
                            entries[home, note.key] = entry
                    continue
            except BackendError as exc:
                error = error or exc
            entries |= {place: entry for place, entry in self._entries.items() if place[0] == home}
        return entries, error

    def _read(self, note: Note) -> _Entry | None:
        try:
            return _Entry(note.key, records.decode(note), note.version)
        except MultiqError as exc:
            self._complain(str(exc))
            return None

    def _note_gone(self, entry: _Entry) -> None:
        name = entry.record.definition.name
        if name in self._app.code_schedules:
            self._gone[name] = entry.record.home

    def _refresh(self, home: str, entries: Iterable[_Entry]) -> None:
        """Read the notes that have changed since this process last read them."""
        stale = [entry for entry in entries if entry.version is None]
        if len(stale) > _SINGLE:
            found = {note.key: note for note in notes_of(self._backend, home)}
        else:
            found = {entry.key: note for entry in stale if (note := self._backend.note(home, entry.key)) is not None}
        for entry in stale:
            fresh = self._read(found[entry.key]) if entry.key in found else None
            if fresh is None:
                carry_on(self._backend, [home])  # changes ``CHANGES`` if a process has died while it moved the schedule
                self._entries.pop(entry.place, None)
                self._note_gone(entry)
            else:
                self._compare_zones(entry.record, fresh.record)
                entry.record, entry.version = fresh.record, fresh.version

    def _compare_zones(self, before: Record, found: Record) -> None:
        """Log a warning if another process makes occurrences with a different version of the time zones."""
        if before.zones == zones_version() and found.has_other_zones:
            self._complain(
                f"other workers have the time zones {found.zones}, and this one has {zones_version()}: where they "
                "disagree about a time, an occurrence may run twice; install the same version on all hosts"
            )

    # --- when ---

    def _read_time(self) -> None:
        self._base = self._backend.now(HOME), time.monotonic()

    def _estimated_now(self) -> Milliseconds:
        """The approximate time of the server. It decides which schedules are examined. It does not decide when a job is
        due."""
        server, at = self._base
        return int((server + time.monotonic() - at) * SECOND)

    def _due(self) -> list[_Entry]:
        """Take the entries whose occurrences may have to be made now."""
        now, found = self._estimated_now(), {}
        while self._queue and self._queue[0][0] <= now:
            _, _, entry = heapq.heappop(self._queue)
            if self._entries.get(entry.place) is entry and entry.wake <= now:
                found[entry.place] = entry
        return list(found.values())

    def _wake_at(self, entry: _Entry, wake: Milliseconds) -> None:
        entry.wake = wake
        if wake < NEVER:
            heapq.heappush(self._queue, (wake, next(self._numbers), entry))
            # Jobs that are made in advance can wait for the next regular look. An occurrence that waits for the
            # previous job cannot.
            definition = entry.record.definition
            if definition.overlap != "allow" or definition.unique is not None:
                heapq.heappush(self._urgent, wake)

    def _pause(self) -> float:
        pause = EVERY * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - not a secret
        now = self._estimated_now()
        while self._urgent and self._urgent[0] <= now:
            heapq.heappop(self._urgent)
        if self._urgent:
            pause = min(pause, (self._urgent[0] - now) / SECOND)
        return max(_SHORTEST, pause)

    # --- making ---

    def _make_all(self, due: list[_Entry], error: BackendError | None) -> None:
        """Make the jobs of all homes. If a server does not answer, its homes delay the other homes only for a short
        time.

        *error*: an error of the look. It is raised at the end.
        """
        began = time.monotonic()
        by_home = list(_by_home(due).items())
        random.shuffle(by_home)
        for home, entries in by_home:
            if error is not None and time.monotonic() > began + _WITH_ERRORS:
                break
            try:
                self._make(home, entries)
            except BackendError as exc:
                error = error or exc
        if error is not None:
            raise error

    def _make(self, home: str, entries: list[_Entry]) -> None:
        clock = ServerTime(self._backend, home)
        left = entries
        for attempt in range(_TRIES):
            self._refresh(home, left)
            there, left = [entry for entry in left if entry.place in self._entries], []
            at_once = _AT_ONCE if attempt < _TRIES // 2 else 1
            for start in range(0, len(there), at_once):
                planned = [
                    (entry, found)
                    for entry in there[start : start + at_once]
                    if (found := self._plan(entry, clock)) is not None
                ]
                for group in _groups(planned):
                    left += self._carry_out(home, group, clock)
            if not left:
                return
        for entry in left:  # other processes have changed the entry at each attempt, so they make its occurrences
            self._wake_at(entry, self._estimated_now() + SECOND)

    def _plan(self, entry: _Entry, clock: ServerTime) -> Plan | None:
        """Return None if no job must be made and no note must be stored now."""
        record = entry.record
        name = record.definition.name
        try:
            now = int(clock.now() * SECOND)
            if record.is_beyond(now) and not record.is_paused:
                self._complain(
                    f"schedule {name} makes no jobs until {timestamp(record.through)}: its jobs until then were made "
                    "before the clock of the store's server was set back; pause and resume the schedule to get jobs now"
                )
            found = plan(
                record,
                now,
                self._ahead if record.definition.unique is None else min(self._ahead, DECIDE),
                lambda at: is_there(self._backend, record.queue_of(at), occurrence_id(name, at)),
            )
        except ScheduleInvalid as exc:
            self._put_off(entry, exc)
            return None
        if found.record is record:
            self._wake_at(entry, found.wake)
            return None
        return found

    def _carry_out(self, home: str, group: list[tuple[_Entry, Plan]], clock: ServerTime) -> list[_Entry]:
        """Store the plans of some schedules in one step. Returns the entries that other processes have changed."""
        try:
            with contextlib.ExitStack() as around:
                return self._carry_out_within(around, home, group, clock)
        except _NotMadeError as exc:
            return exc.left

    def _carry_out_within(
        self, around: contextlib.ExitStack, home: str, group: list[tuple[_Entry, Plan]], clock: ServerTime
    ) -> list[_Entry]:
        """Like ``_carry_out``. *around*: the stack that enters the middleware, and leaves it later."""
        steps: list[Step] = []
        sent: list[tuple[_Entry, Plan]] = []
        # the clock is read just before the call, because each moment between the reading and the call makes the jobs
        # late
        now = clock.read() if any(found.made for _, found in group) else clock.now()
        for entry, found in group:
            definition = entry.record.definition
            try:
                self._refuse_terms(definition)
                jobs = self._jobs_of(around, definition, found.made, now)
            except (
                PayloadInvalid,
                Unsupported,
                _MiddlewareError,
            ) as exc:  # a newer multiq wrote the note, or the note is too large for this program
                self._put_off(entry, exc)
                continue
            steps.append(records.put(msgspec.structs.replace(found.record, zones=zones_version())))
            steps += [Enqueue(home, job) for job in jobs]
            sent.append((entry, found))
        if not sent:
            return []
        conditions = [Version(home, entry.key, entry.version or "") for entry, _ in sent]
        for entry, _ in sent:
            entry.version = None
        try:
            is_done = self._backend.carry_out(steps, when=conditions)
        except BackendError:
            raise
        except MultiqError as exc:  # the backend refuses a job, for example because it is too large
            if len(sent) > 1:
                # the last attempts take one schedule at a time
                raise _NotMadeError([entry for entry, _ in sent]) from exc
            self._put_off(sent[0][0], exc)
            raise _NotMadeError([]) from exc
        if not is_done:
            raise _NotMadeError([entry for entry, _ in sent])
        for entry, found in sent:
            self.made += len(found.made)
            entry.record = msgspec.structs.replace(found.record, zones=zones_version())
            self._wake_at(entry, found.wake)
        return []

    def _refuse_terms(self, definition: Definition) -> None:
        """Raise ``Unsupported`` if the backend does not support the terms of the jobs."""
        if definition.unique is not None and not self._backend.declared.unique:
            raise self._backend.unsupported("unique")
        if definition.gates and self._backend.declared.limits_kept_by == "nothing":
            raise self._backend.unsupported("limits")

    def _jobs_of(
        self, around: contextlib.ExitStack, definition: Definition, made: list[Milliseconds], now: float
    ) -> list[NewJob]:
        """Return the jobs of occurrences. The list is empty if middleware refuses. Raises ``PayloadInvalid``."""
        jobs = self._plain_jobs_of(around, definition, made, now)
        if not definition.gates:
            return jobs
        from multiq.permit_notes import by_permits

        return [by_permits(self._backend, job, self._app.settings.max_body) for job in jobs]

    def _plain_jobs_of(
        self, around: contextlib.ExitStack, definition: Definition, made: list[Milliseconds], now: float
    ) -> list[NewJob]:
        """Return the jobs. They have gates even if the backend enforces limits by permits."""
        max_body = self._app.settings.max_body
        if not self._app.intercepts:
            return [job_of(definition, occurrence, now, max_body) for occurrence in made]
        from multiq.call_options import CallOptions
        from multiq.enqueue_with_middleware import around_occurrences

        envelopes = [envelope_of(definition, occurrence, now, max_body) for occurrence in made]
        calls = [
            (
                envelope,
                CallOptions(
                    queue=definition.queue,
                    priority=definition.priority,
                    ttr=definition.ttr,
                    headers=envelope.headers,
                    id=occurrence_id(definition.name, occurrence),
                ),
            )
            for envelope, occurrence in zip(envelopes, made, strict=True)
        ]
        if calls:
            try:
                around.enter_context(around_occurrences(self._app, calls))
            except EnqueueRefused as exc:
                _log.warning("middleware refuses %d jobs of schedule %s: %s", len(made), definition.name, exc)
                return []
            except Exception as exc:
                raise _MiddlewareError(f"middleware failed: {describe(exc)}") from exc
        return [
            encoded(definition, occurrence, now, envelope, max_body)
            for envelope, occurrence in zip(envelopes, made, strict=True)
        ]

    def _put_off(self, entry: _Entry, exc: MultiqError) -> None:
        """Try a schedule again later, without delaying other schedules."""
        self._complain(f"schedule {entry.record.definition.name} does not run from here: {exc}")
        self._wake_at(entry, self._estimated_now() + _RELOAD_LATER)

    # --- schedules in code ---

    def _store_lost(self) -> None:
        """Store schedules of the app's code again if a server has lost their notes, for example in a failover. If a
        process has removed a schedule or moved it to another queue, another note says so, and the schedule is not
        stored again."""
        lost = {
            name
            for name, home in self._gone.items()
            if not any(self._backend.note(home, key) for key in (records.key_of(name), records.removed_key(name)))
        }
        if lost:
            self._sync(lost)
            self._reload()
        self._gone.clear()

    def _sync(self, lost: AbstractSet[str] | None = None) -> None:
        """Store the schedules of the app's code that are not stored yet, or that differ from their notes.

        *lost*: the names of schedules. If *lost* is given, only these schedules are stored, unless they are stored
        already.
        """
        self._born = self._first_value()
        self._load_if_changed()
        with alone(self._backend, self._has_new) as is_alone:
            self._has_new()  # loads the schedules that other processes have added before this process got its turn
            self._settle()
            for attempt in range(_TRIES):
                at_once = _AT_ONCE if attempt < _TRIES // 2 else 1
                groups = [group for some in self._not_stored(lost) for group in _batches(some, at_once)]
                refused = [group for group in groups if not self._store(group)]
                if not refused:
                    break
                self._reload()
                self._settle()
            else:
                raise OptionInvalid(
                    "other processes have changed the schedules of the app's code in each of "
                    f"{_TRIES} attempts to store them: try again"
                )
            is_sure = is_alone()
        if not is_sure:  # this process stood still, and another one may have added the same names meanwhile
            self._remove_copies()

    def _remove_copies(self) -> None:
        with alone(self._backend):
            self._reload()
            names = collections.Counter(entry.record.definition.name for entry in self._entries.values())
            for name, definition in self._app.code_schedules.items():
                if names[name] > 1:
                    remove_copies(self._backend, name, definition.queue, keeps_own=True)

    def _has_new(self) -> bool:
        """Return whether the code has a schedule whose name is not stored. Loads the stored schedules unless this
        process knows all of these names."""
        names = {entry.record.definition.name for entry in self._entries.values()}
        if names >= self._app.code_schedules.keys():
            return False
        self._reload()
        names = {entry.record.definition.name for entry in self._entries.values()}
        return not names >= self._app.code_schedules.keys()

    def _reload(self) -> None:
        self._changes = None
        self._load_if_changed()

    def _settle(self) -> None:
        """Load the schedules until none of them changes meanwhile. Otherwise a schedule that another process moves from
        one queue to another could be in neither of the two listings, and would be stored a second time."""
        for _ in range(_TRIES):
            if changes_of(self._backend) == self._changes:
                return
            self._reload()

    def _not_stored(self, lost: AbstractSet[str] | None) -> Iterable[list[tuple[Definition, _Entry | None]]]:
        """Return the schedules of the code that are not stored, or that differ from their notes, grouped by queue."""
        known = {entry.record.definition.name: entry for entry in self._entries.values()}
        left: dict[tuple[str, str], list[tuple[Definition, _Entry | None]]] = {}
        for definition in self._app.code_schedules.values():
            found = known.get(definition.name)
            if lost is not None and (found is not None or definition.name not in lost):
                continue
            if found is None or not found.record.definition.is_like(definition):
                place = definition.queue, definition.queue if found is None else found.record.home
                left.setdefault(place, []).append((definition, found))
        return left.values()

    def _store(self, group: list[tuple[Definition, _Entry | None]]) -> bool:
        """Store schedules of the app's code. Returns False if another process has changed one of them meanwhile."""
        stored = [(new, None if known is None else (known.record, known.version or "")) for new, known in group]
        try:
            is_done = store_all(self._backend, stored)
        except BackendError:
            raise
        except MultiqError as exc:
            if len(group) > 1:
                return False
            self._complain(f"schedule {group[0][0].name} cannot be stored: {exc}")
            return True
        for new, known in group if is_done else ():
            if known is not None:
                before = known.record.definition
                _log.info(
                    "changed schedule %s to that of this program's code: task %s, queue %s, %s; it was: task %s, queue "
                    "%s, %s", new.name, new.task, new.queue, new.when, before.task, before.queue, before.when,
                )  # fmt: skip
        return is_done

    def _first_value(self) -> bytes:
        """Return the value of the note ``BORN``, which is written once in the life of a store."""
        for _ in range(_TRIES):
            note = self._backend.note(HOME, BORN)
            if note is not None:
                return bytes(note.value)
            # if the store is not new, but has lost its list of homes, schedules are found again by their queues
            self._announce({definition.queue for definition in self._app.code_schedules.values()})
            self._backend.carry_out([Put(HOME, BORN, new_id().encode())], when=[Version(HOME, BORN, "")])
        return b""

    def _announce(self, queues: AbstractSet[str]) -> None:
        """Have all schedulers look for schedules in these queues."""
        for start in range(0, len(queues), _AT_ONCE):
            some = sorted(queues)[start : start + _AT_ONCE]
            self._backend.carry_out([step for home in some for step in records.announce(home)])

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.add(text)
            _log.warning("%s", text)


def _batches(
    schedules: Iterable[tuple[Definition, _Entry | None]], most: int
) -> Iterator[list[tuple[Definition, _Entry | None]]]:
    """Yield groups of schedules, each of which is stored in one call."""
    group: list[tuple[Definition, _Entry | None]] = []
    size = 0
    for one in schedules:
        own = len(one[0].body)
        if group and (len(group) >= most or size + own > _MOST_BYTES):
            yield group
            group, size = [], 0
        group.append(one)
        size += own
    if group:
        yield group


def _by_home(entries: Iterable[_Entry]) -> dict[str, list[_Entry]]:
    found: dict[str, list[_Entry]] = {}
    for entry in entries:
        found.setdefault(entry.record.home, []).append(entry)
    return found


def _groups(planned: Iterable[tuple[_Entry, Plan]]) -> Iterator[list[tuple[_Entry, Plan]]]:
    """Yield plans that fit into one call."""
    group: list[tuple[_Entry, Plan]] = []
    jobs = size = 0
    for entry, found in planned:
        own = len(entry.record.definition.body) * (len(found.made) + 1)
        if group and (jobs + len(found.made) > MAX_JOBS or size + own > _MOST_BYTES):
            yield group
            group, jobs, size = [], 0, 0
        group.append((entry, found))
        jobs, size = jobs + len(found.made), size + own
    if group:
        yield group
