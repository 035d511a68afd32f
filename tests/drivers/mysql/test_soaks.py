"""The soaks of ``tests/soak`` in a short form, as tests of the driver."""

from __future__ import annotations

import pytest
from soak import mysql_due, mysql_stale

FOREVER = 10.0  # seconds, generous because the machine may be busy


@pytest.mark.long
def test_no_stale_verdict_is_accepted_and_none_that_counted_is_refused_around_a_lease_s_end() -> None:
    assert mysql_stale.run(64, 8, seed=7) == 0


@pytest.mark.long
def test_a_stream_of_due_jobs_beside_a_locked_one_keeps_no_other_queue_waiting() -> None:
    waits, taken = mysql_due.run(5)
    assert len(waits) > 1
    assert max(waits) < FOREVER
    assert taken
