"""Stores the outcomes of acked jobs, and the memos and details of other verdicts.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
kept with the ack,    the transaction that deletes the job stores the outcome; a lone ack     two statements, and no
or not at all         sends both in one packet                                                round trip
expired outcomes do   for each outcome that a transaction stores, it deletes up to two        one of these two
not add up            expired ones; it skips those that another transaction is deleting       statements
no slow claims        outcomes have a table of their own                                      none
====================  ======================================================================  =======================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Ack, Bury, Outcome, Release
from multiq.driverkit.paging import foreign_cursor
from multiq.errors import PayloadTooLarge

from .records import SECOND, body_limit, chunked, microseconds, pack_id, unpack_id
from .statements import Sql, literal, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from multiq.backend import After, OutcomeKind, Verdict

    from .connection import Reply
    from .pool import Pool
    from .scan_window import ExpiredScan

KINDS: tuple[OutcomeKind, ...] = ("done", "cancelled")
"""The kinds in the order of their numbers in the column ``kind``."""

FIRST_PAGE = (2**63 - 1, b"")
"""The place before all outcomes of a history."""

_DROPPED_PER_KEEP = 2
_LONGEST_ID = 255  # bytes that the column takes
_MOST_ATTEMPTS = 2**32 - 1  # the largest number that the column takes
_SEQS_PER_STATEMENT = 50  # with more, a statement with the largest memo may not fit into a packet
_CHUNK = 1_000_000  # bytes


# --- keeping ---------------------------------------------------------------------------------------------


class Keeping:
    """The statements that store the outcomes of some acks, and delete expired outcomes of the same queues."""

    def __init__(self, statements: list[str], drops: list[tuple[ExpiredScan, int]], server_time: int) -> None:
        """The last *statements* delete expired outcomes. *drops* has the scan and the limit of each such statement."""
        self.statements = statements
        self._drops = drops
        self._server_time = server_time

    @classmethod
    def of(cls, pool: Pool, verdicts: Iterable[Verdict], *, is_guarded: bool = False) -> Keeping:
        """Return the statements for these verdicts.

        *is_guarded*: the only verdict is an ack. The ack's own statement is sent directly before these statements, in
        the same packet.
        """
        kept = [verdict for verdict in verdicts if isinstance(verdict, Ack) and is_kept(verdict.after)]
        if not kept:
            return NOTHING_KEPT
        statements = [_keep_if_acked(pool, kept[0])] if is_guarded else _keep(pool, kept)
        drops = []
        for queue, count in Counter(ack.lease.queue for ack in kept).items():
            scan, most = pool.poller.scan_windows.of(queue).expired, _DROPPED_PER_KEEP * count
            statements.append(drop_expired(pool, queue, most, floor=scan.floor()))
            drops.append((scan, most))
        return cls(statements, drops, pool.server_time)

    def read(self, replies: Sequence[Reply]) -> None:
        """Read the replies to the statements. Later scans for expired outcomes can start behind the deleted ones."""
        first = len(self.statements) - len(self._drops)
        for (scan, most), dropped in zip(self._drops, replies[first:], strict=False):
            if dropped.affected < most:
                scan.found_all(self._server_time)


NOTHING_KEPT = Keeping([], [], 0)


def is_kept(after: After | None) -> bool:
    return after is not None and after.keep > 0


def drop_expired(pool: Pool, queue: str, limit: int, *, floor: int = 0) -> str:
    return render("drop_expired", queue=queue.encode(), now=pool.now, limit=limit, floor=floor)


def _keep_if_acked(pool: Pool, ack: Ack) -> str:
    return render("keep_if_acked", now=pool.now, **_values(ack))


def _keep(pool: Pool, acks: list[Ack]) -> list[str]:
    """Return the statements that store these outcomes."""
    found = [_values(ack) for ack in acks]
    found.sort(key=lambda values: (values["queue"], values["id"]))  # Transactions lock rows in one order.
    now, preface = pool.now, []
    if len(found) > 1:  # One computation of the time is faster than one per row.
        now, preface = Sql("@multiq_now"), [f"SET @multiq_now = {now}"]
    rows = [
        _ROW.format_map({name: literal(value) for name, value in values.items()} | {"now": now}) for values in found
    ]
    chunk = min(_CHUNK, (pool.max_packet or 0) // 2)
    return [*preface, *(render("keep", row=Sql("),(".join(some))) for some in chunked(rows, chunk))]


def keep_deleted(pool: Pool, queue: str, jobs: Sequence[tuple[bytes, int]], after: After) -> list[str]:
    """Return the statements that keep the same outcome for each of these jobs. Each job is given by its stored id and
    its attempt."""
    rows = [
        _ROW.format(
            queue=literal(queue.encode()),
            id=literal(own_id[:_LONGEST_ID]),
            kind=KINDS.index(after.kind),
            now="@multiq_now",
            keep=microseconds(after.keep),
            attempt=attempt,
            outcome=literal(after.outcome),
        )
        for own_id, attempt in sorted(jobs)
    ]
    chunk = min(_CHUNK, (pool.max_packet or 0) // 2)
    keeps = [render("keep", row=Sql("),(".join(some))) for some in chunked(rows, chunk)]
    drop = drop_expired(pool, queue, _DROPPED_PER_KEEP * len(jobs))
    return [f"SET @multiq_now = {pool.now}", *keeps, drop]


_ROW = "{queue},{id},{kind},{now},kept_at+{keep},{attempt},{outcome}"


def _values(ack: Ack) -> dict[str, int | bytes]:
    lease, after = ack.lease, ack.after
    assert after is not None  # noqa: S101 - for the type checker
    return {
        "queue": lease.queue.encode(),
        "id": _key(lease.id),
        "kind": KINDS.index(after.kind),
        "keep": microseconds(after.keep),
        "attempt": min(lease.attempt, _MOST_ATTEMPTS),
        "outcome": after.outcome,
    }


def _key(job_id: str) -> bytes:
    """Return the id as the column stores it. A long id is cut to the column's length, because another program's id can
    be longer than the column."""
    return pack_id(job_id)[:_LONGEST_ID]


# --- memos and details -----------------------------------------------------------------------------------


class Notes:
    """The memos and details of accepted verdicts."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, int], bytes] = {}
        """The stored values. The keys are the statement's name and the job's seq. A later memo of a job replaces an
        earlier one."""

    def add(self, seq: int, verdict: Verdict) -> None:
        after: After | None = getattr(verdict, "after", None)  # An Abandon has no memo and no detail.
        if after is None or isinstance(verdict, Ack):
            return
        if after.memo is not None:
            self._bytes["memo", seq] = after.memo
        if after.detail is not None and isinstance(verdict, Release | Bury):
            self._bytes["detail", seq] = after.detail

    def statements(self) -> list[str]:
        """Return the statements. They are sent after the statements of the verdicts. Jobs with the same bytes share a
        statement."""
        seqs: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
        for (verb, seq), stored in self._bytes.items():
            seqs[verb, stored].append(seq)
        return [
            render(verb, seqs=some, **{verb: stored})
            for (verb, stored), found in seqs.items()
            for some in _slices(sorted(found))
        ]


def _slices(seqs: list[int]) -> Iterator[list[int]]:
    return (seqs[at : at + _SEQS_PER_STATEMENT] for at in range(0, len(seqs), _SEQS_PER_STATEMENT))


def largest(verdicts: Iterable[Verdict]) -> int:
    """Return the size in bytes of the largest outcome, memo or detail that the verdicts store."""
    return max((len(stored) for verdict in verdicts for stored in _stored(verdict)), default=0)


def _stored(verdict: Verdict) -> tuple[bytes, ...]:
    after: After | None = getattr(verdict, "after", None)
    if after is None:
        return ()
    if isinstance(verdict, Ack):
        return (after.outcome,) if is_kept(after) else ()
    detail = after.detail if isinstance(verdict, Release | Bury) else None
    return after.memo or b"", detail or b""


def refuse_too_large(size: int, packet: int) -> None:
    """Raises ``PayloadTooLarge`` if a stored value of *size* bytes does not fit into a packet."""
    limit = body_limit(packet)
    if size > limit:
        raise PayloadTooLarge(
            size,
            limit,
            "it is an outcome, a memo, a detail, a note or the body of a step's job; store it elsewhere and keep its "
            "address, or raise the server's max_allowed_packet",
        )


# --- reading ---------------------------------------------------------------------------------------------


class OutcomeRow(NamedTuple):
    """An outcome as ``outcomes`` and ``history`` read it. Times are in microseconds."""

    id: bytes
    kind: int
    attempt: int
    age: int
    left: int
    expires_at: int
    body: bytes

    @property
    def place(self) -> tuple[int, bytes]:
        """The sort key within a history."""
        return self.expires_at, self.id

    def outcome(self, queue: str) -> Outcome:
        return Outcome(
            queue=queue,
            id=unpack_id(self.id),
            kind=KINDS[min(self.kind, len(KINDS) - 1)],
            body=self.body,
            attempt=self.attempt,
            age=self.age / SECOND,
            expires_in=self.left / SECOND,
        )


def key_list(ids: Iterable[str]) -> Sql:
    """Return the ids as a list in SQL."""
    return Sql(",".join(literal(_key(job_id)) for job_id in ids))


def key_of(job_id: str) -> bytes:
    return _key(job_id)


def cursor_of(row: OutcomeRow) -> str:
    """Return the cursor of a page whose last outcome is *row*."""
    return f"{row.expires_at}.{row.id.hex()}"


def read_cursor(after: str) -> tuple[int, bytes]:
    """Return the place that a cursor names. Raises ``OptionInvalid`` for a text that is not a cursor."""
    expires_at, _, key = after.partition(".")
    try:
        place = int(expires_at), bytes.fromhex(key)
    except ValueError:
        raise foreign_cursor(after) from None
    if abs(place[0]) >= 2**63:
        raise foreign_cursor(after)
    return place
