"""The SQL statements, read once from ``sql/<verb>.sql``. A comment at the head of a file explains its statement.

This module writes values into the statement's text itself. PyMySQL's escaping depends on the session's SQL modes, and
takes more time than the server needs for the row. Numbers are written as numbers, and bytes as ``x'..'``. Both mean the
same in every SQL mode and character set, and need no escaping.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, TypeAlias

from multiq.driverkit import sql

if TYPE_CHECKING:
    from collections.abc import Iterable


class Sql(str):
    """Text that is already SQL. ``render`` puts it into a statement unchanged."""

    __slots__ = ()


Value: TypeAlias = "int | bytes | Iterable[int] | Sql | None"

NOW = Sql("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))")
"""Microseconds since 1970 by the server's clock, in any time zone of the session. It is constant within a statement."""

TRUE_NOW = Sql(f"{NOW} + TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))")
"""The same for a session of the caller. ``SET timestamp`` may have stopped the session's clock, but it does not stop
the clock of SYSDATE."""


_TABLES = re.compile(r"multiq_(?:jobs|unique|lines)\b")  # The names of indexes continue with an underscore.
_IS_SQL = frozenset({int, Sql})


def render(verb: str, **values: Value) -> str:
    """Return ``sql/<verb>.sql`` with *values* inserted for ``{names}``."""
    return template(verb).format_map(
        {name: value if type(value) in _IS_SQL else literal(value) for name, value in values.items()}
    )


@functools.lru_cache(maxsize=256, typed=True)
def rendered(verb: str, **values: int | bytes | Sql) -> str:
    """Return the same as ``render``, from a cache. Use this for statements that a consumer sends again and again."""
    return render(verb, **values)


def qualified(text: str, database: str) -> str:
    """Return a statement about jobs and unique keys for a session whose default database may be another one."""
    prefix = f"`{database.replace('`', '``')}`."
    return _TABLES.sub(lambda found: prefix + found[0], text)


def literal(value: Value) -> str:
    """Return a value as SQL: a number, bytes in hex, or numbers separated by commas."""
    match value:
        case Sql():
            return value
        case int():
            return str(int(value))
        case bytes():
            return f"x'{value.hex()}'"
        case None:
            return "NULL"
        case str():
            raise TypeError(f"{value!r} is neither a number nor bytes: encode it")
        case _:
            return ",".join([str(int(number)) for number in value])


@functools.cache
def template(verb: str) -> str:
    """Return the text of one statement, without its comments."""
    return sql.statement(__package__, verb)
