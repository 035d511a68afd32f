"""Loads the settings from a configuration file and from environment variables. A variable takes precedence over the
file.

A configuration file is ``multiq.toml``, or a ``pyproject.toml`` with a ``[tool.multiq]`` table. multiq searches the
current folder, and then the parent folders, and uses the first configuration file. If ``MULTIQ_CONFIG`` names a file,
multiq uses only the named file. All mistakes are reported together. Each mistake is reported with its file and key.

A file that ``MULTIQ_CONFIG`` does not name must belong to the user or to root. Other users must not be able to write
the file. URLs in the file may refer to secrets in environment variables and in other files. A user who can write the
file could cause multiq to send the secrets to any host.

Unknown variables that begin with ``MULTIQ_`` are ignored. Kubernetes sets variables like ``MULTIQ_PORT`` for a service
named ``multiq``.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiq.errors import NameInvalid, SettingsInvalid
from multiq.formatting import shown
from multiq.validation import check_name

from .file_ownership import distrust
from .model import (
    KEYS,
    SECRET_KEYS,
    LogSettings,
    PayloadSettings,
    Settings,
    WorkerSettings,
    check_setting,
    no_connection,
)
from .variables import expand_key, expand_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OUR_TABLE = re.compile(rb"""^[ \t]*\[[ \t]*["']?tool["']?[ \t]*\.[ \t]*["']?multiq\b""", re.MULTILINE)
_SECTIONS = ("worker", "payload", "log", "connections")
_FILE_ROOM = 1 << 20  # bytes


def load_settings(
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    table: dict[str, Any] | None = None,
    source: Path | str | None = None,
) -> Settings:
    """Return the settings for *folder* and *environment*. The defaults are the current folder and ``os.environ``.

    - *table*: settings that replace the content of the file. With None, the file's content is used, if a file exists.
    - *source*: the name of *table* in messages.

    Raises ``SettingsInvalid`` with all problems.
    """
    env = os.environ if environment is None else environment
    problems: list[str] = []
    if table is None:
        source = find_file(folder, env)
        is_named = bool(env.get("MULTIQ_CONFIG"))
        table = _read(source, problems, is_named=is_named) if source is not None else {}
    values, connections = _from_table(table, str(source), env, problems)
    values.update(_from_environment(env, problems))
    for key in ("url", "store"):
        url = values.get(key)
        if url is not None and "://" not in url and url not in connections:
            where = f"environment: {_variable(key)}" if env.get(_variable(key)) else f"{source}: {key}"
            problems.append(f"{where}: {no_connection(url, connections)}")
    if problems:
        raise SettingsInvalid(problems)
    return _build(values, connections)


def describe_sources() -> str:
    """Return one line that lists the sources of ``load_settings``."""
    source = find_file(None, os.environ)
    file = "no configuration file" if source is None else str(source)
    variables = [variable for key in KEYS if os.environ.get(variable := _variable(key))]
    return ", then ".join((file, *variables))


def find_file(folder: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the path of the configuration file, or None if there is no file. *folder* defaults to the current
    folder."""
    named = environment.get("MULTIQ_CONFIG")
    if named:
        return Path(named)
    for place in _places(folder):
        if _is_file(place / "multiq.toml"):
            return place / "multiq.toml"
        if _configures_multiq(place / "pyproject.toml"):
            return place / "pyproject.toml"
    return None


def _places(folder: Path | None) -> tuple[Path, ...]:
    """Return the folder and its parent folders. The result is empty if the current folder was deleted."""
    try:
        place = Path.cwd() if folder is None else folder.absolute()
    except OSError:
        return ()
    return (place, *place.parents)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder without read permission has no settings
        return False


def _configures_multiq(project: Path) -> bool:
    """Return whether a ``pyproject.toml`` has a table ``[tool.multiq]``. For a file that is not TOML, return False."""
    if not _is_file(project):
        return False
    try:
        text, reason = _content(project, is_named=False)
        # An untrusted file is only searched for the table's header. An untrusted file is not parsed, because parsing a
        # hostile file could take minutes, for example with a key of 20,000 parts.
        if reason is not None:
            return _OUR_TABLE.search(text) is not None
        tools = tomllib.loads(text.decode("utf-8", "replace")).get("tool") if b"multiq" in text else None
    except (OSError, ValueError, RecursionError):  # TOMLDecodeError is a ValueError
        return False
    return isinstance(tools, dict) and "multiq" in tools


def _read(source: Path, problems: list[str], *, is_named: bool) -> dict[str, Any]:
    try:
        content, reason = _content(source, is_named=is_named)
        if reason is not None:
            problems.append(f"{source}: is not used: {reason}")
            return {}
        table: Any = tomllib.loads(content.decode("utf-8"))
    except OSError as exc:
        problems.append(f"{source}: cannot be read: {exc.strerror}")
        return {}
    except (ValueError, RecursionError) as exc:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        problems.append(f"{source}: is not TOML: {'nested too deeply' if isinstance(exc, RecursionError) else exc}")
        return {}
    if source.name == "pyproject.toml":
        tools = table.get("tool", {})
        table = tools.get("multiq", {}) if isinstance(tools, dict) else {}
    if not isinstance(table, dict):
        problems.append(f"{source}: tool.multiq: must be a table: [tool.multiq]")
        return {}
    return table


def _content(path: Path, *, is_named: bool) -> tuple[bytes, str | None]:
    """Return a file's content, and the reason why the file must not be used. If the file may be used, the reason is
    None.

    The owner and the mode are checked after the file is opened. If the check came first, another user could replace the
    file between the check and the opening.
    """
    # With O_NONBLOCK, ``open`` does not block if another user has replaced the file by a pipe.
    flags = 0 if is_named else getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        reason = None if is_named else distrust(path.lstat(), os.fstat(file.fileno()))
        content = file.read(_FILE_ROOM + 1)
    if len(content) > _FILE_ROOM:
        return b"", f"it is longer than {_FILE_ROOM:,} bytes"
    if reason is not None:
        reason = f"{reason}. If you trust it, name it: MULTIQ_CONFIG={path}"
    return content, reason


def _from_table(
    table: dict[str, Any], source: str, env: Mapping[str, str], problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    connections: dict[str, str] = {}
    values: dict[str, Any] = {}
    for key, value in _flatten(table, source, problems):
        where = f"{source}: {key}"
        if key.startswith("connections."):
            name = key.removeprefix("connections.")
            connections[name] = _connection(name, value, where, env, problems)
        elif key not in KEYS:
            problems.append(f"{where}: unknown key{_hint(key)}")
        else:
            if key in SECRET_KEYS and isinstance(value, list):
                value = [expand_key(entry, where, env, problems) for entry in value]  # noqa: PLW2901
            checked = _check(key, value, where, problems)
            values[key] = expand_url(checked, where, env, problems) if key in {"url", "store"} and checked else checked
    return values, connections


def _flatten(table: dict[str, Any], source: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if not isinstance(name, str):
            problems.append(f"{source}: a key must be a text, like 'url', got {shown(name)}")
        elif name not in _SECTIONS:
            yield name, value
        elif not isinstance(value, dict):
            problems.append(f"{source}: {name}: must be a table: [{name}]")
        else:
            for inner, content in value.items():
                if isinstance(inner, str):
                    yield f"{name}.{inner}", content
                else:
                    like = next((key for key in KEYS if key.startswith(f"{name}.")), f"{name}.NAME")
                    problems.append(f"{source}: a key must be a text, like {like!r}, got {shown(inner)}")


def _connection(name: str, value: Any, where: str, env: Mapping[str, str], problems: list[str]) -> str:
    try:
        check_name(name, "connection")
    except NameInvalid as exc:
        problems.append(f"{where}: {exc}")
    found = len(problems)
    url = expand_url(value, where, env, problems) if isinstance(value, str) else ""
    if "://" not in url and len(problems) == found:
        problems.append(f"{where}: must be a URL, like 'redis://localhost'")
    return url


def _from_environment(env: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, rule in KEYS.items():
        variable = _variable(key)
        text = env.get(variable)
        if text:
            values[key] = _check(key, rule.parse(text), f"environment: {variable}", problems)
    return values


def _variable(key: str) -> str:
    return "MULTIQ_" + key.upper().replace(".", "_")


def _check(key: str, value: Any, where: str, problems: list[str]) -> Any:
    try:
        return check_setting(key, value)
    except ValueError as exc:
        problems.append(f"{where}: {exc}")
        return None


def _hint(key: str) -> str:
    close = difflib.get_close_matches(key, [*KEYS, *_SECTIONS], n=1)
    return f" (did you mean {close[0]}?)" if close else f" (there are: {', '.join(KEYS)}, connections.NAME)"


def _build(values: dict[str, Any], connections: dict[str, str]) -> Settings:
    def section(name: str) -> dict[str, Any]:
        prefix = f"{name}."
        return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    top = {key: value for key, value in values.items() if "." not in key}
    return Settings(
        connections=connections,
        worker=WorkerSettings(**section("worker")),
        payload=PayloadSettings(**section("payload")),
        log=LogSettings(**section("log")),
        **top,
    )
