"""Cursors of pages: read back exactly, and refused if they are anything else."""

from __future__ import annotations

import pytest

from multiq.driverkit.paging import cursor_of, read_cursor
from multiq.errors import OptionInvalid


@pytest.mark.parametrize("place", [(0, 0), (4294967295, 1), (-5, 7), (2**63 - 1, 1 - 2**63)])
def test_cursor_names_its_place(place: tuple[int, int]) -> None:
    assert read_cursor(cursor_of(place)) == place


@pytest.mark.parametrize("after", ["", "1", "1.", ".1", "a.b", "1.2.3", f"{2**63}.0", f"0.{-(2**63)}", "9" * 5000])
def test_any_other_text_is_refused(after: str) -> None:
    with pytest.raises(OptionInvalid, match="must be the cursor that the previous page returned"):
        read_cursor(after)
