"""Fixtures: a file per test, and processes that end with it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PRELUDE = """
import os, signal, sqlite3, sys, threading, time
from multiq.backend import Ack, Bury, NewJob, Release, State
from multiq_sqlite.backend import SqliteBackend

def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def backend(path: Path) -> Iterator[SqliteBackend]:
    with SqliteBackend(str(path)) as backend:
        yield backend


@pytest.fixture
def connect(path: Path) -> Iterator[Callable[..., sqlite3.Connection]]:
    """Opens connections as applications do, to the backend's file by default."""
    opened: list[sqlite3.Connection] = []

    def connect(to: object = path, **options: Any) -> sqlite3.Connection:
        opened.append(sqlite3.connect(str(to), **options))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python process from source, with arguments in ``sys.argv``; reads and writes it line by line."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(source), *map(str, arguments)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def line() -> Callable[[subprocess.Popen[str]], str]:
    """The next line that a process says."""

    def read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    return read
