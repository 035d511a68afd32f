"""Permits enforce a limit on a backend that cannot enforce the limit within the reserve.

A worker asks for a job's permits after the reserve and before the task starts. One note has the permits of one limit
and key. The note lists the jobs that hold a permit. If the limit has a rate, the note also has the time of the next
start at the steady rate. Every change is a compare-and-set of the notes of all limits of the job. With compare-and-set,
a job gets either all of its permits or no permit. The clock of the store decides when a permit ends.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from .backend import Drop, Put, Quota, Version
from .backend.limits import limit_states
from .envelope import PermitGate, decode_envelope, encode_envelope
from .errors import BackendCorrupt, BackendError, OptionInvalid, Unsupported
from .validation import APP_SCOPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .backend import Backend, Gate, Lease, LimitState, NewJob, Note, Step

HOME = "multiq.limits"
"""The home of all notes with quotas and permits. All notes have the same home, so all permits of a job change in one
step."""

MAX_SLOTS = 500
"""The largest number of slots of a limit that is enforced by permits. The number is limited, because the note of a key
must fit into any store."""

_SECOND = 1_000_000  # microseconds: all times in notes are in microseconds since 1970, by the clock of the store
_QUOTAS, _PERMITS = "q/", "p/"  # the first characters of the notes' keys
# The most seconds from the reading of the clock to the reply that gives permits to a job with a rate. If more time has
# passed, the permits are freed, and the job is refused.
_LATEST = 1.0
_TRIES = 30  # the most attempts to change notes that other workers change at the same time
_PAUSE = 0.002  # seconds before the second attempt; the pause grows with each attempt
_QUOTA_KEPT = 1.0  # seconds: a process reads an older quota again before it refuses a job
_JOB_MAX = 60  # the most characters of a job's queue and id in a note
_TTL_MARGIN = 1.0  # seconds for which a note is kept after its content has ended
_PAGE = 500


class Holder(msgspec.Struct, array_like=True, frozen=True):
    """A job that holds a permit."""

    job: str
    """The queue and the id of the job."""
    token: bytes
    """A token that distinguishes the leases of the job."""
    ends_at: int


class _State(msgspec.Struct, array_like=True, frozen=True):
    """The permits of one limit and key."""

    place: str
    """The queue of the limit, or ``APP_SCOPE``."""
    limit: str
    key: str
    holders: tuple[Holder, ...] = ()
    due: int = 0
    """The time at which the next job would be due at the steady rate (GCRA's theoretical arrival time)."""


class _StoredQuota(msgspec.Struct, array_like=True, frozen=True):
    place: str
    limit: str
    slots: int | None
    rate: float | None
    per: float
    burst: int
    is_pinned: bool = False

    @property
    def quota(self) -> Quota:
        return Quota(self.slots, self.rate, self.per, self.burst)


class _KnownQuota(msgspec.Struct, frozen=True):
    """A quota that this process has read. If ``stored`` is None, the store does not have the limit, so the limit is
    open."""

    stored: _StoredQuota | None
    version: str
    read_at: float  # monotonic


class Granted(msgspec.Struct, frozen=True):
    """The permits that a job has received."""

    held: tuple[PermitPlace, ...]
    """The limits for which the job holds a permit. A limit without slots needs no permit."""
    holder: Holder
    asked: tuple[PermitPlace, ...] = ()
    """All limits of the job that are in the store."""


class Refused(msgspec.Struct, frozen=True):
    """A job may not start now, because one of its limits is closed."""

    gate: PermitPlace
    """The limit that is closed."""
    opens_in: float | None
    """Seconds until the rate allows the next start. If all slots are in use, ``opens_in`` is the seconds until the
    first permit expires. A verdict may free a permit earlier. None means that the limit never opens without a
    change."""
    interval: float
    """Seconds between two starts at the rate, or 0 if the slots are in use."""


class _Plan(msgspec.Struct):
    """The steps by which a job gets its permits."""

    granted: Granted
    asked_at: float  # monotonic
    steps: list[Step] = []
    when: list[Version] = []
    has_rate: bool = False


class PermitPlace(msgspec.Struct, frozen=True, order=True):
    """A limit of a queue or of the whole app, and a key."""

    place: str
    limit: str
    key: str

    def __str__(self) -> str:
        return f"limit {self.limit}/{self.key}" if self.key else f"limit {self.limit}"

    @property
    def note(self) -> str:
        return f"{_PERMITS}{_digest(self.place, self.limit)}/{_digest(self.key)}"

    @property
    def quota_note(self) -> str:
        return _quota_key(self.place, self.limit)


# --- which limits are kept by permits --------------------------------------------------------------------


def are_possible(backend: Backend) -> bool:
    return bool(backend.declared.notes) and bool(backend.declared.holds)


def check_possible(backend: Backend) -> None:
    """Raise ``Unsupported`` if the backend cannot keep permits."""
    if not are_possible(backend):
        raise backend.unsupported("limits")


def check_quota_of_permits(backend: Backend, name: str, quota: Quota) -> None:
    """Raise an error if permits cannot enforce a quota."""
    if quota.fair:
        raise Unsupported(
            "fair",
            backend.declared.backend,
            f"limit {name} is kept by permits, which are asked for after the reserve: give it slots or a rate instead",
        )
    if quota.slots is not None and quota.slots > MAX_SLOTS:
        raise OptionInvalid(
            f"slots of limit {name} must be at most {MAX_SLOTS}, got {quota.slots}: the limit is kept by permits"
        )


def add_permits(body: bytes, gates: Sequence[PermitGate], max_body: int) -> bytes:
    """Return the body of a job that needs permits. Raises ``PayloadTooLarge``."""
    if not gates:
        return body
    envelope = decode_envelope(body, max_body=max_body)
    envelope.permits = sorted([*envelope.permits, *gates])
    return encode_envelope(envelope, max_body)


def by_permits(backend: Backend, job: NewJob, max_body: int) -> NewJob:
    """If the backend has no gates, return the job with permits instead of gates. If the backend has gates, return the
    job unchanged. Raises ``PayloadTooLarge``."""
    terms = job.terms
    if terms is None or not terms.gates or backend.declared.limits:
        return job
    body = add_permits(job.body, [PermitGate(gate.limit, gate.key) for gate in terms.gates], max_body)
    rest = msgspec.structs.replace(terms, gates=())
    return msgspec.structs.replace(job, body=body, terms=rest if rest.awaits or rest.unique is not None else None)


def app_gates(gates: Sequence[Gate]) -> list[PermitGate]:
    return [PermitGate(gate.limit, gate.key, "app") for gate in gates]


def places(gates: Sequence[PermitGate], queue: str) -> list[PermitPlace]:
    """Return the permits that a job of *queue* needs."""
    return sorted({PermitPlace(APP_SCOPE if gate.scope == "app" else queue, gate.limit, gate.key) for gate in gates})


# --- quotas ----------------------------------------------------------------------------------------------


def change_quotas(backend: Backend, place: str, change: Mapping[str, Quota | None], *, pinned: bool) -> None:
    """Store or remove quotas.

    With *pinned*, the limits are pinned. Without *pinned*, limits that are already pinned do not change. Raises
    ``BackendError``.
    """
    for name, quota in change.items():
        if quota is not None:
            check_quota_of_permits(backend, name, quota)
    for name, quota in change.items():
        if _change_quota(backend, place, name, quota, pinned=pinned) and quota is not None:
            _forget_slower_rate(backend, place, name, quota)


def _change_quota(backend: Backend, place: str, name: str, quota: Quota | None, *, pinned: bool) -> bool:
    """Store or remove a quota. Returns whether it has changed.

    A program that starts often changes nothing. Then the waits of the keys must stay, because they may come from a
    pinned, slower rate.
    """
    key = _quota_key(place, name)
    step: Step | None = None

    def changed(note: Note | None) -> Step | None:
        nonlocal step
        step = None
        if pinned or note is None or not _quota(note).is_pinned:
            if quota is None:
                step = None if note is None else Drop(HOME, key)
            else:
                wanted = _StoredQuota(place, name, quota.slots, quota.rate, quota.per, quota.burst, pinned)
                step = None if note is not None and _quota(note) == wanted else Put(HOME, key, _encode(wanted))
        return step

    _change(backend, key, changed)
    return step is not None


def _forget_slower_rate(backend: Backend, place: str, name: str, quota: Quota) -> None:
    """Shorten the wait of each key that waits longer than the new rate requires."""
    for found in _pages(backend, f"{_PERMITS}{_digest(place, name)}/"):
        key = _state(found).key

        def sooner(note: Note | None, key: str = key) -> Step | None:
            now = _now(backend)
            latest = now + quota.burst * quota.interval(_SECOND)
            # a second more, because the process that gave the last permit may have read a later time
            if note is None or (state := _state(note)).due <= latest + _SECOND:
                return None
            return _put(PermitPlace(place, name, key), msgspec.structs.replace(state, due=latest), now)

        _change(backend, found.key, sooner)


def states(backend: Backend, place: str) -> list[LimitState]:
    """Return the limits of a queue, or of ``APP_SCOPE``, that are enforced by permits. ``parked`` is 0, because refused
    jobs are delayed and not parked."""
    stored = [quota for note in _pages(backend, _QUOTAS) if (quota := _quota(note)).place == place]
    if not stored:
        return []
    now = _now(backend)
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    for quota in stored:
        for note in _pages(backend, f"{_PERMITS}{_digest(place, quota.limit)}/"):
            state = _state(note)
            counts.setdefault(state.limit, {})[state.key] = len(_live(state, now)), 0
    return limit_states([(one.limit, one.quota, one.is_pinned) for one in stored], counts)


def limited_places(backend: Backend) -> set[str]:
    """Return the queues that have limits enforced by permits. The set has ``APP_SCOPE`` if limits of the whole app
    exist."""
    return {_quota(note).place for note in _pages(backend, _QUOTAS)}


# --- permits ---------------------------------------------------------------------------------------------


class PermitBook:
    """Asks the store for the permits of one process. Thread-safe. Every method may raise ``BackendError``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._quotas: dict[tuple[str, str], _KnownQuota] = {}
        # Without this lock, threads of this process could change a note at the same time, and most threads would have
        # to try again.
        self._asking = threading.Lock()

    def ask(self, lease: Lease, wanted: Sequence[PermitPlace]) -> Granted | Refused:
        """Ask for all permits of a reserved job. The permits last for the ttr of the lease."""
        with self._asking:
            return self._ask(lease, wanted)

    def extend(self, grants: Sequence[tuple[Granted, float]]) -> list[Granted]:
        """Extend each permit until a time of ``time.monotonic``. Returns the permits that have ended. Other jobs may
        have the slots of ended permits."""
        lost: list[Granted] = []
        for place in sorted({place for granted, _ in grants for place in granted.held}):
            mine = [(granted, until) for granted, until in grants if place in granted.held]
            for granted in self._extend(place, mine):
                if not any(granted is one for one in lost):
                    lost.append(granted)
        return lost

    def free(self, grants: Sequence[Granted]) -> None:
        """Free permits. A permit that has ended does not change. A permit that another lease of the job has taken over
        does not change."""
        for place in sorted({place for granted in grants for place in granted.held}):
            ended = {granted.holder.token for granted in grants if place in granted.held}

            def without(note: Note | None, ended: set[bytes] = ended, place: PermitPlace = place) -> Step | None:
                state = None if note is None else _state(note)
                if state is None or not any(holder.token in ended for holder in state.holders):
                    return None
                left = tuple(holder for holder in state.holders if holder.token not in ended)
                return _put(place, msgspec.structs.replace(state, holders=left), _now(self._backend))

            _change(self._backend, place.note, without)

    def _ask(self, lease: Lease, wanted: Sequence[PermitPlace]) -> Granted | Refused:
        holder = Holder(job_name(lease.queue, lease.id), _token(lease), 0)
        is_fresh = False  # whether the quotas must be read again
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(random.random() * _PAUSE * attempt)  # noqa: S311 - not for security
            quotas = {place: self._known(place, is_fresh=is_fresh) for place in wanted}
            plan = self._plan(quotas, holder, lease.ttr)
            if isinstance(plan, Refused):
                if is_fresh or all(time.monotonic() - known.read_at <= _QUOTA_KEPT for known in quotas.values()):
                    return plan
                is_fresh = True  # read the quotas again, because the limit may have changed
                continue
            is_fresh = True
            if not plan.steps:
                return plan.granted
            if self._backend.carry_out(plan.steps, when=plan.when):
                if plan.has_rate and time.monotonic() - plan.asked_at > _LATEST:
                    self.free([plan.granted])  # a late start would be too near to the next start
                    return Refused(plan.granted.asked[0], 0.0, 0.0)
                return plan.granted
        return Refused(wanted[0], 0.0, 0.0)

    def _plan(self, quotas: Mapping[PermitPlace, _KnownQuota], holder: Holder, ttr: float) -> _Plan | Refused:
        """Return the steps by which the job gets all permits. If limits are closed, return the limit that stays closed
        for the longest time."""
        limited = {place: known for place, known in quotas.items() if known.stored is not None}
        plan = _Plan(Granted((), holder, tuple(limited)), time.monotonic())
        closed: list[Refused] = []
        # the clock is read before the notes, so that no permit seems to end too early
        now = _now(self._backend) if limited else 0
        holder = msgspec.structs.replace(holder, ends_at=now + int(ttr * _SECOND))
        for place, known in limited.items():
            if known.stored is None:
                continue
            quota = known.stored.quota
            note = self._backend.note(HOME, place.note)
            state = _State(place.place, place.limit, place.key) if note is None else _state(note)
            # without the job's earlier leases, which are over
            live = tuple(one for one in _live(state, now) if one.job != holder.job)
            due, clock = state.due, now
            if quota.rate is not None and quota.possible_due(due, now, _SECOND) != due:
                # This process may have stood still since it read the clock, and others have used turns meanwhile.
                clock = _now(self._backend)
                due = quota.possible_due(due, clock, _SECOND)
            refused = _refusal(place, quota, live, due, clock)
            if refused is not None:
                closed.append(refused)
                continue
            if quota.slots is not None:
                live = (*live, holder)
                plan.granted = msgspec.structs.replace(plan.granted, held=(*plan.granted.held, place))
            if quota.rate is not None:
                due = max(due, clock) + quota.interval(_SECOND)
                plan.has_rate = True
            plan.steps.append(_put(place, msgspec.structs.replace(state, holders=live, due=due), now))
            plan.when.append(Version(HOME, place.note, "" if note is None else note.version))
            plan.when.append(Version(HOME, place.quota_note, known.version))
        if closed:
            return max(closed, key=lambda one: float("inf") if one.opens_in is None else one.opens_in)
        return plan

    def _known(self, place: PermitPlace, *, is_fresh: bool) -> _KnownQuota:
        """Return a quota that this process has read. Permits are given only if the stored quota has not changed since
        it was read."""
        name = place.place, place.limit
        known = self._quotas.get(name)
        if known is None or known.stored is None or is_fresh:
            note = self._backend.note(HOME, place.quota_note)
            stored, version = (None, "") if note is None else (_quota(note), note.version)
            known = self._quotas[name] = _KnownQuota(stored, version, time.monotonic())
        return known

    def _extend(self, place: PermitPlace, grants: Sequence[tuple[Granted, float]]) -> list[Granted]:
        lost: list[Granted] = []

        def extended(note: Note | None) -> Step | None:
            lost.clear()
            now = _now(self._backend)
            # Read after the store's clock. If the process is stopped between the two readings, the permits are extended
            # for a shorter time, and never for a longer time.
            passed = time.monotonic()
            state = _State(place.place, place.limit, place.key) if note is None else _state(note)
            live = {holder.token: holder for holder in _live(state, now)}
            slots: int | None = None
            has_quota = False
            is_changed = False
            for granted, until in grants:
                token = granted.holder.token
                if until <= passed:
                    continue  # the lease is over
                if token not in live:
                    if not has_quota:
                        stored = self._known(place, is_fresh=True).stored
                        slots, has_quota = None if stored is None else stored.slots, True
                    taken_over = any(holder.job == granted.holder.job for holder in live.values())
                    if taken_over or (slots is not None and len(live) >= slots):
                        lost.append(granted)
                        continue
                ends_at = max(now + int((until - passed) * _SECOND), live[token].ends_at if token in live else 0)
                live[token] = Holder(granted.holder.job, token, ends_at)
                is_changed = True
            if not is_changed:
                return None
            return _put(place, msgspec.structs.replace(state, holders=tuple(live.values())), now)

        _change(self._backend, place.note, extended)
        return lost


def job_name(queue: str, job_id: str) -> str:
    name = f"{queue}/{job_id}"
    return name if len(name) <= _JOB_MAX else f"{name[: _JOB_MAX - 33]}~{_digest(name)}"


def _refusal(place: PermitPlace, quota: Quota, live: Sequence[Holder], due: int, now: int) -> Refused | None:
    if quota.slots is not None and len(live) >= quota.slots:
        ends = [holder.ends_at for holder in live]
        return Refused(place, (min(ends) - now) / _SECOND if ends else None, 0.0)
    if quota.rate is not None:
        interval = quota.interval(_SECOND)
        opens_at = due - (quota.burst - 1) * interval
        if opens_at > now:
            return Refused(place, (opens_at - now) / _SECOND, interval / _SECOND)
    return None


def _live(state: _State, now: int) -> tuple[Holder, ...]:
    return tuple(holder for holder in state.holders if holder.ends_at > now)


def _put(place: PermitPlace, state: _State, now: int) -> Step:
    """Return the step that stores a state. A state without a live permit, and whose rate delays no job, is deleted."""
    ends_at = max([state.due, *(holder.ends_at for holder in state.holders)])
    if ends_at <= now:
        return Drop(HOME, place.note)
    return Put(HOME, place.note, _encode(state), (ends_at - now) / _SECOND + _TTL_MARGIN)


def _change(backend: Backend, key: str, changed: Callable[[Note | None], Step | None]) -> None:
    """Change a note by compare-and-set. *changed* returns the step that changes the note, or None if nothing
    changes."""
    for attempt in range(10 * _TRIES):
        if attempt:
            time.sleep(random.random() * _PAUSE * min(attempt, _TRIES))  # noqa: S311 - a random pause spreads the load
        note = backend.note(HOME, key)
        step = changed(note)
        if step is None or backend.carry_out([step], when=[Version(HOME, key, "" if note is None else note.version)]):
            return
    raise BackendError(f"the note {key!r} of a limit was changed by other processes {10 * _TRIES} times")


def _pages(backend: Backend, prefix: str) -> Iterator[Note]:
    after: str | None = None
    while True:
        page = backend.notes(HOME, prefix, limit=_PAGE, after=after)
        yield from page.notes
        if page.after is None:
            return
        after = page.after


def _now(backend: Backend) -> int:
    return int(backend.now(HOME) * _SECOND)


def _quota_key(place: str, limit: str) -> str:
    return _QUOTAS + _digest(place, limit)


def _token(lease: Lease) -> bytes:
    return bytes.fromhex(_digest(lease.queue, lease.id, lease.token))[:8]


def _digest(*parts: str) -> str:
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _state(note: Note) -> _State:
    try:
        return _states.decode(note.value)
    except msgspec.MsgspecError as exc:
        raise _corrupt(note, exc) from exc


def _quota(note: Note) -> _StoredQuota:
    try:
        return _stored_quotas.decode(note.value)
    except msgspec.MsgspecError as exc:
        raise _corrupt(note, exc) from exc


def _corrupt(note: Note, exc: Exception) -> BackendCorrupt:
    return BackendCorrupt(
        f"the note {note.key!r} of {HOME} was not written by multiq, or was written by a newer multiq: {exc}"
    )


_encode = msgspec.msgpack.Encoder().encode
_states = msgspec.msgpack.Decoder(_State)
_stored_quotas = msgspec.msgpack.Decoder(_StoredQuota)
