"""Statement files: comments are left out, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from multiq.driverkit.sql import code_lines, file_lines, statement

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "a_driver_with_statements"
    (folder / "sql").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "sql" / "find.sql").write_text(
        "-- Finds a job.\n  -- By its id.\n\nSELECT id -- not a line of its own\n  FROM job\n \nWHERE id = 'ä;';\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


def test_statement_has_neither_comments_nor_a_semicolon(package: str) -> None:
    assert statement(package, "find") == "SELECT id -- not a line of its own\n  FROM job\nWHERE id = 'ä;'"


def test_lines_of_a_script_keep_their_semicolons(package: str) -> None:
    assert file_lines(package, "find")[-1] == "WHERE id = 'ä;';"


def test_missing_file_is_an_error(package: str) -> None:
    with pytest.raises(FileNotFoundError):
        statement(package, "lose")


def test_comment_at_the_end_of_a_line_is_kept() -> None:
    assert code_lines("a -- b\n--c\n\t\nd") == ["a -- b", "d"]
