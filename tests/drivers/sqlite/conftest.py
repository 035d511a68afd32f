"""Fixtures: a file per test, and processes that end with it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from multiq_sqlite.backend import SqliteBackend
from multiq_sqlite.connection import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from multiq.backend import Consumer

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
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the statements that transactions run from now on."""
    ran: list[str] = []
    execute, execute_text = Transaction.execute, Transaction.execute_text

    def noted(transaction: Transaction, name: str, parameters: Any = ()) -> sqlite3.Cursor:
        ran.append(name)
        return execute(transaction, name, parameters)

    def noted_text(transaction: Transaction, text: str, parameters: Any = ()) -> sqlite3.Cursor:
        ran.append(" ".join(text.split()[:5]))
        return execute_text(transaction, text, parameters)

    monkeypatch.setattr(Transaction, "execute", noted)
    monkeypatch.setattr(Transaction, "execute_text", noted_text)
    return ran


@pytest.fixture
def machine_steps() -> Callable[[Consumer], AbstractContextManager[list[int]]]:
    """Counts the steps of SQLite's virtual machine on a consumer's connection. The list gets the number of steps at the
    end."""

    @contextlib.contextmanager
    def count(consumer: Consumer) -> Iterator[list[int]]:
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        counted: list[int] = []
        sqlite = consumer._connection._open(1.0)  # type: ignore[attr-defined]
        sqlite.set_progress_handler(step, 1)
        yield counted
        sqlite.set_progress_handler(None, 1)
        counted.append(steps)

    return count


@pytest.fixture
def sqlite_texts() -> Callable[[Consumer], AbstractContextManager[list[str]]]:
    """Notes the texts of all statements that SQLite runs on a consumer's connection, without their parameters."""

    @contextlib.contextmanager
    def note(consumer: Consumer) -> Iterator[list[str]]:
        ran: list[str] = []
        sqlite = consumer._connection._open(1.0)  # type: ignore[attr-defined]
        sqlite.set_trace_callback(lambda text: ran.append(re.sub(r"\[[^\]]*\]|\d+", "?", text)))
        yield ran
        sqlite.set_trace_callback(None)

    return note


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
    """Reads the next line that a process prints."""

    def read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    return read
