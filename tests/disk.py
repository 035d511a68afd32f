"""A model of a disk that loses power. A trace of writes and syncs shows which data had reached the disk.

``kill -9`` proves nothing about disks, because the kernel still writes its buffers. The model follows the calls in the
order of the trace. Written data is in memory until a later sync of its file has completed. The creation or removal of a
file is in memory until the folder is synced. After a power failure, the disk has the synced data (``strict``). It may
also have any part of the rest, in sectors of 512 bytes, in any order (``torn``). A real power failure can do more harm:
the model's disk completes each sync that it reports, and writes a sector whole or not at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CALLS = "openat,unlink,unlinkat,rename,write,pwrite64,ftruncate,fsync,fdatasync"
"""The system calls that the trace must record, with their data."""

SECTOR = 512

_TEXT = r"((?:\\x[0-9a-f]{2})*)"
_START = re.compile(rf"(?P<who>\d+) +(?P<call>\w+)\((?:\d+<{_TEXT}>)?(?P<rest>.*)")
_RESUMED = re.compile(r"(?P<who>\d+) +<\.\.\. (?P<call>\w+) resumed>(?P<rest>.*)")
_QUOTED = re.compile(rf'"{_TEXT}"')
_RESULT = re.compile(r"\) += (-?\d+)")


@dataclass
class Call:
    """A system call's beginning, or its end, or both in one."""

    who: str
    name: str
    path: str
    rest: str
    begins: bool
    result: int | None
    """None: the call has not ended."""


@dataclass
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes that are only in memory, each with its offset. An offset *n* below 0 truncates to ``-n - 1`` bytes."""


class Disk:
    """A folder's files. ``follow`` takes each call; ``strict`` and ``torn`` return what a failure now would leave."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self._there: dict[str, _File] = {}
        """The folder as programs see it."""
        self._durable: dict[str, _File] = {}
        """The folder as it is on the disk."""
        self._syncing: dict[str, tuple[str, int]] = {}

    def follow(self, call: Call) -> None:
        if call.name in {"fsync", "fdatasync"}:
            self._sync(call)
        elif call.name in {"openat", "unlink", "unlinkat", "rename"}:
            if call.result is not None and call.result >= 0:
                self._move(call)
        elif call.begins and call.path.startswith(self._folder):
            self._write(call)

    def strict(self) -> dict[str, bytes]:
        """The content of each file that has certainly reached the disk, by its name."""
        return {name: bytes(file.durable) for name, file in self._durable.items()}

    def torn(self, luck: random.Random) -> dict[str, bytes]:
        """The same, with a random part of what had not been synced."""
        names = luck.choice([self._durable, self._there])
        share = luck.choice([0.1, 0.5, 0.9, 1.0])
        return {name: self._with_some(file, luck, share) for name, file in names.items()}

    def _with_some(self, file: _File, luck: random.Random, share: float) -> bytes:
        content = bytearray(file.durable)
        for at, data in file.pending:
            if at < 0:
                if luck.random() < share:
                    _carry_out(content, at, data)
                continue
            while data:
                size = SECTOR - at % SECTOR
                if luck.random() < share:
                    _carry_out(content, at, data[:size])
                at, data = at + size, data[size:]  # noqa: PLW2901 - sector by sector
        return bytes(content)

    def _sync(self, call: Call) -> None:
        if call.begins:
            file = self._there.get(call.path.removeprefix(self._folder))
            self._syncing[call.who] = call.path, len(file.pending) if file else 0
        if call.result is None:
            return
        path, count = self._syncing.pop(call.who)
        assert call.result == 0, f"a sync of {path} failed"
        if f"{path}/" == self._folder:
            self._durable = dict(self._there)
        elif file := self._there.get(path.removeprefix(self._folder)):
            for at, data in file.pending[:count]:
                _carry_out(file.durable, at, data)
            del file.pending[:count]

    def _move(self, call: Call) -> None:
        names = texts(call)
        if not names or not names[0].startswith(self._folder):
            return
        assert call.name != "rename", f"renaming is not followed: {names}"
        name = names[0].removeprefix(self._folder)
        if call.name != "openat":
            self._there.pop(name, None)
        elif "O_CREAT" in call.rest and name not in self._there:
            self._there[name] = _File()
        assert "O_TRUNC" not in call.rest, f"opening with O_TRUNC is not followed: {name}"

    def _write(self, call: Call) -> None:
        name = call.path.removeprefix(self._folder)
        file = self._there[name]
        numbers = _QUOTED.sub("", call.rest).strip(", ").split(")")[0].split(" <")[0].split(", ")
        if call.name == "ftruncate":
            file.pending.append((-int(numbers[0]) - 1, b""))
        elif call.name == "pwrite64":
            (text,) = _QUOTED.findall(call.rest)
            data = _decoded(text)
            assert len(data) == int(numbers[0]), f"a write of {numbers[0]} bytes was noted with {len(data)}"
            file.pending.append((int(numbers[1]), data))
        else:
            raise AssertionError(f"{call.name} is not followed: {call.path}")


def calls(lines: Iterable[str]) -> Iterator[Call]:
    """The calls of a trace, in its order. A call that is interleaved with another process's call comes twice."""
    unfinished: dict[str, Call] = {}
    for line in lines:
        if started := _START.match(line):
            rest = started["rest"]
            result = _RESULT.search(rest)
            call = Call(
                started["who"], started["call"], _decoded(started[3] or "").decode(errors="replace"), rest, True,
                int(result[1]) if result else None,
            )  # fmt: skip
            if call.result is None:
                unfinished[call.who] = call
            yield call
        elif (resumed := _RESUMED.match(line)) and resumed["who"] in unfinished:
            begun = unfinished.pop(resumed["who"])
            result = _RESULT.search(resumed["rest"])
            if result:
                yield Call(begun.who, begun.name, begun.path, begun.rest, False, int(result[1]))


def written(call: Call) -> bytes:
    """The data that the call writes."""
    return b"".join(_decoded(text) for text in _QUOTED.findall(call.rest))


def texts(call: Call) -> list[str]:
    """The paths among a call's arguments."""
    return [_decoded(text).decode(errors="replace") for text in _QUOTED.findall(call.rest)]


def _carry_out(content: bytearray, at: int, data: bytes) -> None:
    if at < 0:
        size = -at - 1
        del content[size:]
        content.extend(bytes(size - len(content)))
        return
    content.extend(bytes(max(0, at - len(content))))
    content[at : at + len(data)] = data


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
