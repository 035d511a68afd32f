"""The code blocks of the documentation, found and run.

A page runs from top to bottom in an empty folder: ``python`` blocks in one namespace, ``console`` blocks (``$ ``
begins a command) and ``sh`` or ``bash`` blocks by bash, one process a block. A block whose first line is a comment
with a file's name (``# shop.py``) is written to that file first. ``json``, ``toml`` and ``yaml`` must parse. ``text``
is no code.

What a page can say in a comment right before a block:

``<!-- not run: REASON -->`` the block cannot run here; ``REASONS`` has the reasons that are allowed
``<!-- only a file -->``        it is written to its file, and a later block runs that
``<!-- in the background -->``  its last command goes on running until the page ends
``<!-- exits with N -->``       its last command is shown to fail, with this code
``<!-- prints this -->``        each line that it shows is a line of what it prints, or begins one
``<!-- exits with N and prints this -->``    both
``<!-- with SERVER -->``        the page has a private server, which replaces the usual URL (``SERVERS``)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

import multiq
from multiq.settings.loader import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])

PATIENCE = 60  # seconds for one block

#: the only reasons for which a block may be left out
REASONS = frozenset({
    "a sketch of an interface",
    "a unit of systemd",
    "code of another library",
    "installs packages",
    "needs a server",
    "needs a container engine",
    "needs a terminal",
    "needs Go",
    "needs PHP",
    "runs this suite",
    "takes minutes",
})  # fmt: skip

#: servers that a page can have, and the URL by which the page names each
SERVERS = {
    "beanstalkd": "beanstalk://localhost",
    "mysql": "mysql://shop:secret@localhost/shop",
    "redis": "redis://localhost",
}

#: the value of variables whose names end with _KEY: a key of sealed payloads
_A_KEY = f"a:{'A' * 43}="

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
_NOTE = re.compile(r"<!--\s*(.*?)\s*-->\s*$")
_FILE = re.compile(r"^(?:#|//) ([\w./-]+\.\w+)\s*$")


class Block(NamedTuple):
    """One fenced block of a page. ``note`` is the text of the comment right before the block, or empty."""

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
        """The file that gets the content of the block."""
        match = _FILE.match(self.code.partition("\n")[0])
        return match[1] if match else None

    @property
    def commands(self) -> str:
        """The shell's lines of a console block: those after ``$ ``, with their continuations after a backslash."""
        return "\n".join(line for is_command, line in self._console() if is_command)

    @property
    def printed(self) -> list[str]:
        """The output of its commands that a console block shows, without empty lines."""
        return [line for is_command, line in self._console() if not is_command and line]

    def _console(self) -> Iterator[tuple[bool, str]]:
        """Each line, and whether it belongs to a command."""
        has_prompts = "$ " in self.code
        continued = False
        for line in self.code.splitlines():
            is_command = not has_prompts or continued or line.startswith("$ ")
            yield is_command, line.removeprefix("$ ").removeprefix("> ") if is_command and has_prompts else line
            continued = is_command and line.endswith("\\")


@contextlib.contextmanager
def _redis() -> Iterator[str]:
    from servers.redis import RedisServer

    with RedisServer() as server:
        yield server.url


@contextlib.contextmanager
def _mysql() -> Iterator[str]:
    from servers.mysql import MysqlServer

    with MysqlServer() as server, server.database() as place:
        yield place.url


@contextlib.contextmanager
def _beanstalkd() -> Iterator[str]:
    from servers.beanstalk import BeanstalkServer

    with BeanstalkServer() as server:
        yield server.url


_SERVED = {"beanstalkd": _beanstalkd, "mysql": _mysql, "redis": _redis}


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
        self._urls: dict[str, str] = {}
        self._servers = contextlib.ExitStack()

    def run(self, block: Block) -> None:
        """Run one block. Raises ``AssertionError`` with the place and what it printed."""
        server = block.note.removeprefix("with ")
        if server in SERVERS:
            block = block._replace(code=block.code.replace(SERVERS[server], self._url_of(server)))
        if block.file is not None:
            path = self._folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
            self._forget_stranger(block.file.partition("/")[0].removesuffix(".py"))
        if block.note == "only a file":
            assert block.file is not None, f"{block}: only a file, and its first line names none"
            return
        match block.language:
            case "python":
                self._run_python(block)
            case "console" | "sh" | "bash":
                self._run_shell(block)
            case "json":
                _parse_json(block)
            case "toml":
                _parse_toml(block, self._folder)
            case "yaml":
                _parse_yaml(block)
            case "text":
                pass
            case other:
                raise AssertionError(f"{block}: a block of {other!r} cannot be run; mark it, or call it text")

    def close(self) -> None:
        """End the page's background processes and servers, and forget the modules that it has made."""
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
        self._servers.close()

    def _url_of(self, server: str) -> str:
        """The URL of a private server, started at its first use."""
        if server not in self._urls:
            self._urls[server] = self._servers.enter_context(_SERVED[server]())
        return self._urls[server]

    def _forget_stranger(self, name: str) -> None:
        """Remove a module of this name that another test has imported."""
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
        wanted = re.fullmatch(r"exits with (\d+)( and prints this)?", block.note)
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
        text = log.read_text()
        assert ended_with == code, f"{block}: exit code {ended_with}, not {code}:\n{script}\n{text}"
        if block.note.endswith("prints this") or block.note.startswith("with "):
            lines = text.splitlines()
            missing = [shown for shown in block.printed if not any(line.startswith(shown) for line in lines)]
            assert missing == [], f"{block}: is not printed:\n{missing}\n{script}\n{text}"


def _environment() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("MULTIQ_")}
    return {**mine, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{mine['PATH']}", "NO_COLOR": "1"}


def _parse_json(block: Block) -> None:
    try:
        json.loads(block.code)
    except json.JSONDecodeError:
        for line in block.code.splitlines():  # then the page shows lines of JSON
            json.loads(line)


def _parse_yaml(block: Block) -> None:
    try:
        assert list(yaml.safe_load_all(block.code)), f"{block}: there is nothing in it"
    except yaml.YAMLError as exc:
        raise AssertionError(f"{block}: not YAML: {exc}") from None


def _parse_toml(block: Block, folder: Path) -> None:
    """A configuration of multiq in the environment must hold in the page, too."""
    tomllib.loads(block.code)
    if block.file is not None:
        names = re.findall(r"\$\{(\w+)\}", block.code)
        load_settings(folder, {name: _A_KEY if name.endswith("_KEY") else "secret" for name in names})
        (folder / block.file).unlink()
