"""Where settings come from: ``multiq.toml`` or ``pyproject.toml``, then the environment on top of it.

The file is the first found in the current folder and those above it: ``multiq.toml``, else a ``pyproject.toml`` with a
``[tool.multiq]`` table. ``MULTIQ_CONFIG`` names another one. Every mistake is reported at once, with its file and key.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import NameInvalid, SettingsInvalid
from .names import check_name
from .settings import KEYS, LogSettings, Settings, WorkerSettings
from .url import redact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECTIONS = ("worker", "log", "connections")


def load_settings(folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings that hold in *folder* (default: the current one) under *environment* (default: the process's).

    Raises ``SettingsInvalid`` with all problems.
    """
    env = os.environ if environment is None else environment
    problems: list[str] = []
    source = find_file(folder or Path.cwd(), env)
    table = _read(source, problems) if source is not None else {}
    values, connections = _from_table(table, str(source), env, problems)
    values.update(_from_environment(env, problems))
    if problems:
        raise SettingsInvalid(problems)
    return _build(values, connections)


def find_file(folder: Path, environment: Mapping[str, str]) -> Path | None:
    """The configuration file that holds in *folder*, or None."""
    named = environment.get("MULTIQ_CONFIG")
    if named:
        return Path(named)
    for place in (folder, *folder.parents):
        if (place / "multiq.toml").is_file():
            return place / "multiq.toml"
        project = place / "pyproject.toml"
        if project.is_file() and "tool.multiq" in project.read_text("utf-8", "replace"):
            return project
    return None


def _read(source: Path, problems: list[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(source.read_text("utf-8"))
    except OSError as exc:
        problems.append(f"{source}: cannot be read: {exc.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        problems.append(f"{source}: is not TOML: {exc}")
        return {}
    if source.name == "pyproject.toml":
        table = table.get("tool", {}).get("multiq", {})
    return table


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
            checked = _check(key, value, where, problems)
            values[key] = _expand(checked, where, env, problems) if key == "url" and checked else checked
    return values, connections


def _flatten(table: dict[str, Any], source: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if name not in _SECTIONS:
            yield name, value
        elif not isinstance(value, dict):
            problems.append(f"{source}: {name}: must be a table: [{name}]")
        else:
            yield from ((f"{name}.{inner}", content) for inner, content in value.items())


def _connection(name: str, value: Any, where: str, env: Mapping[str, str], problems: list[str]) -> str:
    try:
        check_name(name, "connection")
    except NameInvalid as exc:
        problems.append(f"{where}: {exc}")
    if not isinstance(value, str) or "://" not in value:
        problems.append(f"{where}: must be a URL, like 'redis://localhost'")
        return ""
    return _expand(value, where, env, problems)


def _expand(url: str, where: str, env: Mapping[str, str], problems: list[str]) -> str:
    """``${NAME}`` in a URL stands for the environment's NAME: passwords do not belong in files."""

    def value_of(match: re.Match[str]) -> str:
        value = env.get(match[1])
        if value is None:
            problems.append(f"{where}: {redact(url)!r} refers to ${{{match[1]}}}, which is not set in the environment")
            return ""
        return value

    return _REFERENCE.sub(value_of, url)


def _from_environment(env: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, rule in KEYS.items():
        variable = "MULTIQ_" + key.upper().replace(".", "_")
        text = env.get(variable)
        if text:
            values[key] = _check(key, rule.parse(text), f"environment: {variable}", problems)
    return values


def _check(key: str, value: Any, where: str, problems: list[str]) -> Any:
    try:
        return KEYS[key].check(value)
    except ValueError as exc:
        shown = redact(value) if isinstance(value, str) else repr(value)
        problems.append(f"{where}: {exc}, not {shown[:60]}")
        return None


def _hint(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (there are: {', '.join(KEYS)}, connections.NAME)"


def _build(values: dict[str, Any], connections: dict[str, str]) -> Settings:
    def section(name: str) -> dict[str, Any]:
        prefix = f"{name}."
        return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    top = {key: value for key, value in values.items() if "." not in key}
    return Settings(
        connections=connections, worker=WorkerSettings(**section("worker")), log=LogSettings(**section("log")), **top
    )
