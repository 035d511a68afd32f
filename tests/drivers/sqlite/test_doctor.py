"""``multiq doctor`` on a file: its disk, its permissions, its settings."""

from __future__ import annotations

import ast
import os
import sqlite3
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from multiq_sqlite import doctor, schema
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multiq.backend import Finding, NewJob


THE_MACHINES = {"file system", "free space", "SQLite"}  # findings that depend on the machine


def found(backend: SqliteBackend) -> dict[str, Finding]:
    return {finding.what: finding for finding in backend.doctor()}


def test_doctor_accepts_a_file_of_multiqs_and_leaves_it_unchanged(
    path: Path, backend: SqliteBackend, jobs: Callable[..., list[NewJob]]
) -> None:
    backend.enqueue("mail", jobs())
    backend.close()
    before = path.read_bytes()
    findings = found(backend)
    assert {name: finding.level for name, finding in findings.items() if name not in THE_MACHINES} == {
        "folder": "ok",
        "permissions": "ok",
        "journal_mode": "ok",
        "tables": "ok",
        "synchronous": "ok",
    }
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ((3, 35, 0), "warn"),
        ((3, 44, 5), "warn"),
        ((3, 44, 6), "ok"),
        ((3, 45, 0), "warn"),
        ((3, 50, 6), "warn"),
        ((3, 50, 7), "ok"),
        ((3, 51, 2), "warn"),
        ((3, 51, 3), "ok"),
        ((3, 53, 0), "ok"),
    ],
)
def test_doctor_warns_of_sqlite_versions_that_may_damage_the_file(
    backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], level: str
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    assert found(backend)["SQLite"].level == level


def test_doctor_does_not_create_a_missing_file(path: Path, backend: SqliteBackend) -> None:
    assert found(backend)["file"].level == "unknown"
    assert not path.exists()


def test_doctor_reports_missing_folder(tmp_path: Path) -> None:
    with SqliteBackend(str(tmp_path / "nowhere" / "jobs.db")) as backend:
        assert found(backend)["folder"].level == "bad"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")
def test_doctor_reports_forbidden_folder_and_checks_the_rest() -> None:
    # the import runs as root, because other users may be unable to read this checkout
    source = """
import codecs, os, sys
from multiq_sqlite.backend import SqliteBackend
codecs.lookup("unicode_escape")
os.setgid(65534); os.setuid(65534)
print({finding.what: finding.level for finding in SqliteBackend(sys.argv[1]).doctor()})
"""
    with tempfile.TemporaryDirectory() as folder:  # no other user may enter this folder
        command = [sys.executable, "-c", source, f"{folder}/jobs.db"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    levels = ast.literal_eval(done.stdout)
    assert (levels["folder"], levels["file"], levels["synchronous"]) == ("bad", "bad", "ok")


def test_doctor_warns_of_synchronous_normal(path: Path) -> None:
    with SqliteBackend(str(path), synchronous="normal") as backend:
        finding = found(backend)["synchronous"]
    assert finding.level == "warn"
    assert "power failure" in finding.why
    assert "since the last checkpoint" in finding.why  # This may be long ago: see test_power_loss.py.


def test_doctor_warns_of_a_file_that_other_users_can_read(
    path: Path, backend: SqliteBackend, jobs: Callable[..., list[NewJob]]
) -> None:
    backend.enqueue("mail", jobs())
    path.chmod(0o644)
    assert found(backend)["permissions"].level == "warn"


def test_doctor_reports_a_file_that_is_not_a_database(path: Path, backend: SqliteBackend) -> None:
    path.write_bytes(b"not a database at all" * 300)
    assert found(backend)["file"].level == "bad"


def test_doctor_reports_tables_of_a_newer_multiq(
    path: Path, backend: SqliteBackend, jobs: Callable[..., list[NewJob]]
) -> None:
    backend.enqueue("mail", jobs())
    with sqlite3.connect(path) as other:
        other.execute("UPDATE multiq_schema SET version = ?", (schema.VERSION + 1,))
    other.close()
    finding = found(backend)["tables"]
    assert finding.level == "bad"
    assert "newer" in finding.why


def test_doctor_reports_a_foreign_database_without_tables(path: Path, backend: SqliteBackend) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE customers (id)")
    other.close()
    findings = found(backend)
    assert findings["tables"].level == "unknown"
    assert findings["journal_mode"].level == "warn"


@pytest.mark.parametrize(
    ("kind", "level"),
    [("ext4", "ok"), ("nfs4", "bad"), ("cifs", "bad"), ("9p", "bad"), ("tmpfs", "warn"), ("overlay", "warn")],
)
def test_doctor_judges_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, level: str) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    point = str(folder).replace(" ", r"\040")
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/a / ext3 rw 0 0\nx {point} iso9660 rw 0 0\nx {point} {kind} rw 0 0\n/dev/b /opt xfs rw 0 0\n"
    )
    monkeypatch.setattr(doctor, "MOUNTS", mounts)
    with SqliteBackend(str(folder / "jobs.db")) as backend:
        finding = found(backend)["file system"]
    assert finding.level == level
    assert kind in finding.why


def test_doctor_reports_unknown_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: SqliteBackend
) -> None:
    monkeypatch.setattr(doctor, "MOUNTS", tmp_path / "none")
    assert found(backend)["file system"].level == "unknown"
