"""The code blocks of the documentation, found and run.

A page runs from top to bottom in an empty folder: ``python`` blocks in one namespace, ``console`` blocks (``$ ``
begins a command) and ``sh`` or ``bash`` blocks by bash, one process a block. A block whose first line is a comment
with a file's name (``# shop.py``) is written to that file first. ``json`` and ``toml`` must parse, ``text`` is no code.

What a page can say in a comment right before a block:

``<!-- not run: REASON -->``    it cannot run here; the reasons that count are in ``REASONS``
``<!-- in the background -->``  its last command goes on running until the page ends
``<!-- exits with N -->``       its last command is shown to fail, with this code
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import multiq
from multiq.settings.loader import load_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])

PATIENCE = 60  # seconds for one block

#: why a block may be left out, and nothing else
REASONS = frozenset({
    "a sketch of an interface",
    "a unit of systemd",
    "installs packages",
    "needs a server",
    "needs a terminal",
    "needs Go",
    "needs PHP",
    "runs this suite",
    "takes minutes",
})  # fmt: skip

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
_NOTE = re.compile(r"<!--\s*(.*?)\s*-->\s*$")
_FILE = re.compile(r"^(?:#|//) ([\w./-]+\.\w+)\s*$")


class Block(NamedTuple):
    """One fenced block of a page. ``note`` is what the comment right before it says, or empty."""

    page: str
    line: int
    language: str
    code: str
    note: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason_not_to_run(self) -> str | None:
        return self.note.removeprefix("not run:").strip() if self.note.startswith("not run:") else None

    @property
    def file(self) -> str | None:
        """The file that the block is the content of."""
        match = _FILE.match(self.code.partition("\n")[0])
        return match[1] if match else None

    @property
    def commands(self) -> str:
        """The shell's lines of a console block: those after ``$ ``, with what a backslash continues."""
        if "$ " not in self.code:
            return self.code
        lines: list[str] = []
        continued = False
        for line in self.code.splitlines():
            if continued or line.startswith("$ "):
                lines.append(line.removeprefix("$ ").removeprefix("> "))
                continued = line.endswith("\\")
        return "\n".join(lines)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent = match["indent"]
        code = "".join(line.removeprefix(indent) for line in match["code"].splitlines(keepends=True))
        note = _NOTE.search(text[: match.start()].rstrip())
        found.append(
            Block(
                page=str(page.relative_to(ROOT)),
                line=text.count("\n", 0, match.start()) + 1,
                language=match["language"].strip(),
                code=code,
                note=note[1] if note else "",
            )
        )
    return found


class PageRun:
    """The state of a page that is being run: its folder, its namespace, its processes in the background."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._namespace: dict[str, Any] = {"__name__": "page"}
        self._groups: list[int] = []

    def run(self, block: Block) -> None:
        """Run one block. Raises ``AssertionError`` with the place and what it printed."""
        if block.file is not None:
            path = self._folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
            self._forget_stranger(block.file.partition("/")[0].removesuffix(".py"))
        match block.language:
            case "python":
                self._run_python(block)
            case "console" | "sh" | "bash":
                self._run_shell(block)
            case "json":
                _parse_json(block)
            case "toml":
                _parse_toml(block, self._folder)
            case "text":
                pass
            case other:
                raise AssertionError(f"{block}: nobody knows how to run a block of {other!r}; mark it, or call it text")

    def close(self) -> None:
        """End what the page left in the background, and forget the modules it made."""
        for group in self._groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for app in [*self._namespace.values(), *self._attributes_of_own_modules()]:
            if isinstance(app, multiq.App):
                app.close()
        for name in self._own_modules():
            del sys.modules[name]

    def _forget_stranger(self, name: str) -> None:
        """A module of that name which some other test has left."""
        if name in sys.modules and name not in self._own_modules():
            del sys.modules[name]
        importlib.invalidate_caches()

    def _own_modules(self) -> list[str]:
        """The modules that were imported from the page's folder."""
        place = str(self._folder)
        return [
            name
            for name, module in sys.modules.items()
            if str(getattr(module, "__file__", None) or "").startswith(place)
        ]

    def _attributes_of_own_modules(self) -> list[object]:
        return [value for name in self._own_modules() for value in vars(sys.modules[name]).values()]

    def _run_python(self, block: Block) -> None:
        padded = "\n" * block.line + block.code  # tracebacks show the page's own lines
        exec(compile(padded, str(ROOT / block.page), "exec"), self._namespace)  # noqa: S102

    def _run_shell(self, block: Block) -> None:
        script = block.commands.rstrip()
        if block.note == "in the background":
            script += " &"
        wanted = re.fullmatch(r"exits with (\d+)", block.note)
        code = int(wanted[1]) if wanted else 0
        options = [] if wanted else ["-e"]
        log = self._folder / ".output"
        with log.open("wb") as output:
            shell = subprocess.Popen(
                ["bash", *options, "-o", "pipefail", "-c", script],
                cwd=self._folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._groups.append(shell.pid)
            try:
                ended_with = shell.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"{block}: did not end within {PATIENCE} s:\n{script}\n{log.read_text()}"
                ) from None
        assert ended_with == code, f"{block}: exit code {ended_with}, not {code}:\n{script}\n{log.read_text()}"


def _environment() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("MULTIQ_")}
    return {**mine, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{mine['PATH']}", "NO_COLOR": "1"}


def _parse_json(block: Block) -> None:
    try:
        json.loads(block.code)
    except json.JSONDecodeError:
        for line in block.code.splitlines():  # then it shows lines of JSON
            json.loads(line)


def _parse_toml(block: Block, folder: Path) -> None:
    """A configuration of multiq must hold, too, with whatever it takes from the environment."""
    tomllib.loads(block.code)
    if block.file is not None:
        names = re.findall(r"\$\{(\w+)\}", block.code)
        load_settings(folder, dict.fromkeys(names, "secret"))
        (folder / block.file).unlink()
