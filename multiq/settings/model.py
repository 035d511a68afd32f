"""Settings: what can be configured, with its default and its rule. ``loader`` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from multiq.envelope import MAX_BODY_DEFAULT
from multiq.errors import MultiqError, SettingsInvalid

from .queue_order import POLICIES, read_queues
from .url import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DEFAULT_URL = "sqlite:///multiq.db"


class Key(NamedTuple):
    """One setting: how its value is checked (raises ``ValueError``), and how its text in the environment is read."""

    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


# --- rules -----------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be text")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return value

    return check


def _whole_or_none(least: int, most: int) -> Callable[[Any], int | None]:
    check = _whole(least, most)
    return lambda value: None if value is None else check(value)


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 86400:
        raise ValueError("must be a number of seconds from 0 to 86400")
    return float(value)


def _word_or_none(*words: str) -> Callable[[Any], str | None]:
    check = _word(*words)
    return lambda value: None if value is None else check(value)


def _flag(value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    raise ValueError("must be true or false")


def _word(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value.lower()

    return check


def _queues(value: Any) -> tuple[str, ...] | dict[str, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple | dict) or not value:
        raise ValueError("must be a list of queue names, the most urgent first, or a table of names and weights")
    try:
        weights = read_queues(value)
    except MultiqError as exc:
        raise ValueError(str(exc)) from exc
    return tuple(weights) if all(weight == 1 for weight in weights.values()) else weights


def _number(text: str) -> Any:
    """Text of the environment as a number. Other text is returned as it is, and the check refuses it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _truth(text: str) -> Any:
    """Text of the environment as true or false. Other text is returned as it is, and the check refuses it."""
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower(), text)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


#: every setting except connections, by its dotted name; the environment variable for worker.grace is
#: MULTIQ_WORKER_GRACE
KEYS: dict[str, Key] = {
    "url": Key(_text, str),
    "app": Key(_text_or_none, str),
    "max_body": Key(_whole(1, 2**31), _number),
    "worker.queues": Key(_queues, _list),
    "worker.policy": Key(_word_or_none(*POLICIES), str),
    "worker.processes": Key(_whole_or_none(0, 1024), _number),
    "worker.threads": Key(_whole(1, 1024), _number),
    "worker.concurrency": Key(_whole(0, 100_000), _number),
    "worker.prefetch": Key(_whole(1, 10_000), _number),
    "worker.grace": Key(_seconds, _number),
    "worker.kill_after": Key(_seconds, _number),
    "worker.health_file": Key(_text_or_none, str),
    "worker.http": Key(_text_or_none, str),
    "log.level": Key(_word("debug", "info", "warning", "error"), str),
    "log.format": Key(_word("text", "json"), str),
    "log.jobs": Key(_flag, _truth),
    "log.slow_job": Key(_seconds, _number),
    "log.summary": Key(_seconds, _number),
}


def check_setting(key: str, value: Any) -> Any:
    """The value as multiq uses it. Raises ``ValueError``, which names the rule and the value, with passwords masked."""
    try:
        return KEYS[key].check(value)
    except ValueError as exc:
        shown = redact(value if isinstance(value, str) else repr(value))
        raise ValueError(f"{exc}, got {shown if len(shown) <= 60 else shown[:57] + '...'}") from exc


def _check_fields(settings: msgspec.Struct, prefix: str) -> None:
    """Check each field of a struct by its rule, and replace its value with the one that the rule returns."""
    problems = []
    for field in settings.__struct_fields__:
        key = prefix + field
        if key in KEYS:
            try:
                msgspec.structs.force_setattr(settings, field, check_setting(key, getattr(settings, field)))
            except ValueError as exc:
                problems.append(f"{key}: {exc}")
    if problems:
        raise SettingsInvalid(problems)


# --- the settings themselves -----------------------------------------------------------------------------


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker runs, unless its command line or constructor says otherwise."""

    queues: tuple[str, ...] | dict[str, int] | None = None
    """Names in their order, or each with its weight. None: the queues of the app's tasks."""
    policy: str | None = None
    """``strict``: in their order; ``weighted``: in proportion to their weights; ``round-robin``: all alike.

    None: ``strict`` where queues are named, else ``round-robin``.
    """
    processes: int | None = None
    """Worker processes under a supervisor; 0: jobs run in this process, without one. None: 1 on the command line, 0 for
    a ``Worker`` that a program constructs."""
    threads: int = 1
    concurrency: int = 0
    """Coroutines at a time; 0: jobs run on threads."""
    prefetch: int = 100
    """Jobs held beyond those that run, at most: reached only while jobs are far shorter than a round trip."""
    grace: float = 25.0
    """Seconds that running jobs get to finish after SIGTERM. Kubernetes kills after 30."""
    kill_after: float = 2.0
    """Seconds that a job gets to end after its ``timeout`` before its process is ended."""
    health_file: str | None = None
    """The file to which a worker writes its status every few seconds; it needs a supervisor."""
    http: str | None = None
    """The address at which a worker serves probes and Prometheus: ``HOST:PORT`` or ``:PORT``; it needs a supervisor."""

    def __post_init__(self) -> None:
        _check_fields(self, "worker.")


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the command line logs, and after how many seconds any worker logs a job as slow."""

    level: str = "info"
    format: str = "text"
    jobs: bool = False
    """Whether the log line for each job that is done has the level info; else debug. A line costs as much as a short
    job.
    """
    slow_job: float = 10.0
    """Seconds: a job that takes longer is logged as a warning. 0: no job is slow."""
    summary: float = 60.0
    """Seconds, at least, between two log lines of a process on how many jobs it has run. 0: no such lines."""

    def __post_init__(self) -> None:
        _check_fields(self, "log.")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. ``connections`` maps names to URLs. Raises ``SettingsInvalid`` when a value breaks its rule."""

    url: str = DEFAULT_URL
    app: str | None = None
    """The app that ``multiq worker`` runs if it is given none, as ``module:attribute``."""
    connections: dict[str, str] = {}
    max_body: int = MAX_BODY_DEFAULT
    worker: WorkerSettings = WorkerSettings()
    log: LogSettings = LogSettings()

    def __post_init__(self) -> None:
        _check_fields(self, "")

    def __repr__(self) -> str:
        """Passwords in URLs are masked."""
        connections = {name: redact(url) for name, url in self.connections.items()}
        return (
            f"Settings(url={redact(self.url)!r}, connections={connections!r}, max_body={self.max_body!r}, "
            f"worker={self.worker!r}, log={self.log!r})"
        )

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """``rich`` calls this; without it, ``rich`` would show the URLs with their passwords."""
        return [
            ("url", redact(self.url)),
            ("connections", {name: redact(url) for name, url in self.connections.items()}),
            ("max_body", self.max_body),
            ("worker", self.worker),
            ("log", self.log),
        ]

    def resolve(self, connection: str | None) -> str:
        """The URL of a connection: a URL itself, the name of a configured one, or None for the default.

        Raises ``SettingsInvalid`` for a name that is not configured.
        """
        if connection is None:
            return self._follow(self.url, "url")
        if not isinstance(connection, str):
            raise SettingsInvalid(
                [f"connection {connection!r} is not text: pass a URL like 'sqlite:///jobs.db', or a connection's name"]
            )
        return connection if "://" in connection else self._follow(connection, "connection")

    def _follow(self, text: str, what: str) -> str:
        if "://" in text:
            return text
        if text in self.connections:
            return self.connections[text]
        raise SettingsInvalid([f"{what}: {no_connection(text, self.connections)}"])


def no_connection(text: str, connections: Iterable[str]) -> str:
    """The message for a text that names no backend."""
    known = ", ".join(sorted(connections)) or "none"
    return (
        f"{redact(text)!r} is neither a URL (like 'sqlite:///jobs.db') nor a configured connection (there are: {known})"
    )
