"""The outbox's table, and its rows."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, String, Table, Text
from sqlalchemy.dialects.mysql import LONGTEXT

from multiq.backend import NewJob
from multiq.errors import OptionInvalid, PayloadInvalid
from multiq.uncertain_enqueue import later

if TYPE_CHECKING:
    from sqlalchemy import Row

_LONGEST_NAME = 54  # bytes; PostgreSQL allows 63, of which an index's name needs 9 more
_OURS = "multiq_outbox"  # in the table's info


def make_table(metadata: MetaData, name: str, schema: str | None) -> Table:
    """Return the table of this name in *metadata*. Raises ``OptionInvalid`` if another table has the name."""
    known = metadata.tables.get(name if schema is None else f"{schema}.{name}")
    if known is not None:
        if _OURS not in known.info:
            raise OptionInvalid(f"table must be a name that no other table has, got {name!r}")
        return known
    return Table(
        name,
        metadata,
        # SQLite increments only a column of exactly this type
        Column("position", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=True),
        Column("queue", String(128), nullable=False),
        Column("job_id", String(200), nullable=False),
        # the column is text, because aiomysql cannot write bytes; LONGTEXT, because MySQL's TEXT has only 64 KiB
        Column("job", Text().with_variant(LONGTEXT(), "mysql", "mariadb"), nullable=False, comment="JSON"),
        Column("created", BigInteger(), nullable=False, comment="milliseconds since 1970"),
        Column("due", BigInteger(), nullable=False, comment="milliseconds since 1970; a relay may take it from then"),
        Column("claim", String(36), comment="rows with the same value are enqueued together"),
        Column("attempts", Integer(), nullable=False),
        Column("error", Text()),
        Index(f"ix_{_short(name)}_due", "due", "position"),
        Index(f"ix_{_short(name)}_claim", "claim"),
        schema=schema,
        info={_OURS: True},
        comment="jobs that multiq enqueues soon",
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_engine="InnoDB",
        mariadb_charset="utf8mb4",
        sqlite_autoincrement=True,
    )


def _short(name: str) -> str:
    """Return a name for indexes, which is not longer than PostgreSQL and MySQL allow."""
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    return f"{name[:10]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def now() -> int:
    """Return milliseconds since 1970, by this machine's clock."""
    return time.time_ns() // 1_000_000


def row_of(queue: str, job: NewJob, created: int) -> dict[str, Any]:
    """Return the row of a new job."""
    return {
        "queue": queue,
        "job_id": job.id,
        "job": _encode(job),
        "created": created,
        "due": 0,
        "claim": None,
        "attempts": 0,
        "error": None,
    }


def job_of(row: Row[Any]) -> NewJob:
    """Return the job of a row, with the delay that is left. Raises ``PayloadInvalid``."""
    try:
        job = _decode(row.job)
    except (msgspec.MsgspecError, TypeError, AttributeError) as exc:
        raise PayloadInvalid(f"job {row.job_id} of the outbox cannot be read: {exc}") from exc
    return later(job, max(0.0, (now() - row.created) / 1000))


def _encode(job: NewJob) -> str:
    """Return a job as JSON. A body that is valid UTF-8 is stored as text. Any other body is stored in base64."""
    try:
        text = job.body.decode()
    except UnicodeDecodeError:
        return msgspec.json.encode(job).decode()
    fields = msgspec.to_builtins(msgspec.structs.replace(job, body=b""))
    return msgspec.json.encode(fields | {"text": text}).decode()


def _decode(stored: str) -> NewJob:
    fields = msgspec.json.decode(stored)
    text = fields.pop("text", None)
    job = msgspec.convert(fields, NewJob)
    return job if text is None else msgspec.structs.replace(job, body=text.encode())
