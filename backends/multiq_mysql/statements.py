"""The SQL of each verb, read once from ``sql/<verb>.sql``. Each file begins with a comment that explains its form.

This module writes values into the statement's text itself. PyMySQL's escaping depends on the session's SQL modes, and
takes more time than the server needs for the row. Numbers are written as numbers, and bytes as ``x'..'``: both mean the
same in every SQL mode and character set, and need no escaping.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from multiq.driverkit import sql

if TYPE_CHECKING:
    from collections.abc import Iterable


class Sql(str):
    """Text that is SQL already: ``render`` puts it into a statement as it is."""

    __slots__ = ()


Value: TypeAlias = "int | bytes | Iterable[int] | Sql | None"

NOW = Sql("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))")
"""Microseconds since 1970 by the server's clock, whatever the session's time zone; one moment within a statement."""

TRUE_NOW = Sql(f"{NOW} + TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))")
"""The same in a session of the caller's, whose clock may be stopped (SET timestamp): SYSDATE ignores that."""


_IS_SQL = frozenset({int, Sql})


def render(verb: str, **values: Value) -> str:
    """``sql/<verb>.sql`` with *values* in the place of ``{names}``."""
    return template(verb).format_map(
        {name: value if type(value) in _IS_SQL else literal(value) for name, value in values.items()}
    )


@functools.lru_cache(maxsize=256, typed=True)
def rendered(verb: str, **values: int | bytes | Sql) -> str:
    """The same as ``render``, cached: for statements that a consumer sends again and again."""
    return render(verb, **values)


def literal(value: Value) -> str:
    """A value as SQL: a number, bytes in hex, or numbers with commas between."""
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
    """The text of one statement, without its comments."""
    return sql.statement(__package__, verb)
