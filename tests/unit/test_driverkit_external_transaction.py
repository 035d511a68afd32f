"""Errors of the application's connection become multiq's, whatever library wraps them."""

from __future__ import annotations

import sqlite3

import pytest

from multiq.driverkit.external_transaction import explained
from multiq.errors import BackendTimeout, JobNotFound, MultiqError, OptionInvalid


class _Wrapped(Exception):
    """An error like SQLAlchemy's, which has the driver's error as ``orig``."""

    def __init__(self, orig: Exception) -> None:
        super().__init__("wrapped")
        self.orig = orig


def _translate(exc: BaseException) -> MultiqError | None:
    return BackendTimeout(f"locked ({exc})") if isinstance(exc, sqlite3.OperationalError) else None


@pytest.mark.parametrize("wrap", [lambda exc: exc, _Wrapped])
def test_error_of_the_database_driver_is_translated(wrap: type[_Wrapped]) -> None:
    raised = wrap(sqlite3.OperationalError("busy"))
    with pytest.raises(BackendTimeout, match=r"locked \(busy\)") as found, explained(_translate):
        raise raised
    assert found.value.__cause__ is raised


def test_error_that_says_nothing_of_the_database_names_the_argument() -> None:
    with pytest.raises(OptionInvalid, match="connection= cannot be used: it is closed"), explained(_translate):
        raise sqlite3.ProgrammingError("it is closed")


def test_error_of_multiq_stays_as_it_is() -> None:
    with pytest.raises(JobNotFound), explained(_translate):
        raise JobNotFound("q", "1")
