"""The settings with their defaults and rules. The module ``loader`` reads the settings' values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from multiq.envelope import MAX_BODY_DEFAULT
from multiq.errors import MultiqError, SettingsInvalid
from multiq.outcome import MAX_RESULT_DEFAULT

from .process_range import MOST_PROCESSES, read_process_range
from .queue_order import POLICIES, read_queues
from .url import has_store, redact, with_store, without_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DEFAULT_URL = "sqlite:///multiq.db"


class Key(NamedTuple):
    """A setting's check and its parser. The check raises ``ValueError``."""

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


def _processes(value: Any) -> int | str | None:
    if isinstance(value, str):
        read_process_range(value)
        return value
    return _whole_or_none(0, MOST_PROCESSES)(value)


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 86400:
        raise ValueError("must be a number of seconds from 0 to 86400")
    return float(value)


def _scale_seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.1 <= value <= 86400:
        raise ValueError("must be a number of seconds from 0.1 to 86400")
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


def _modules(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a list of modules, like ['shop.mail', 'shop.orders']")
    for name in value:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} must be a module like 'shop.mail'")
    return tuple(value)


def _number(text: str) -> Any:
    """Return the number in *text*. Text that is not a number is returned unchanged, and the setting's check rejects the
    text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _truth(text: str) -> Any:
    """Return True or False for *text*. Text that is neither is returned unchanged, and the setting's check rejects the
    text."""
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower(), text)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _keys(value: Any) -> Any:
    if isinstance(value, list | tuple) and not value:
        return ()  # imported late, because most programs have no keys
    from multiq.payloads.keys import read_keys

    return read_keys(value)


#: All settings except connections. The environment variable of ``worker.grace`` is MULTIQ_WORKER_GRACE.
KEYS: dict[str, Key] = {
    "url": Key(_text, str),
    "store": Key(_text_or_none, str),
    "app": Key(_text_or_none, str),
    "include": Key(_modules, _list),
    "max_body": Key(_whole(1, 2**31), _number),
    "max_result": Key(_whole(1, 2**31), _number),
    "worker.queues": Key(_queues, _list),
    "worker.policy": Key(_word_or_none(*POLICIES), str),
    "worker.processes": Key(_processes, _number),
    "worker.scale_up_after": Key(_scale_seconds, _number),
    "worker.scale_down_after": Key(_scale_seconds, _number),
    "worker.threads": Key(_whole(1, 1024), _number),
    "worker.concurrency": Key(_whole(0, 100_000), _number),
    "worker.prefetch": Key(_whole(1, 10_000), _number),
    "worker.grace": Key(_seconds, _number),
    "worker.kill_after": Key(_seconds, _number),
    "worker.health_file": Key(_text_or_none, str),
    "worker.http": Key(_text_or_none, str),
    "payload.sign": Key(_keys, _list),
    "payload.encrypt": Key(_keys, _list),
    "payload.compress": Key(_whole_or_none(0, 2**31), _number),
    "payload.accept_unsigned": Key(_flag, _truth),
    "log.level": Key(_word("debug", "info", "warning", "error"), str),
    "log.format": Key(_word("text", "json"), str),
    "log.jobs": Key(_flag, _truth),
    "log.slow_job": Key(_seconds, _number),
    "log.summary": Key(_seconds, _number),
}


SECRET_KEYS = tuple(key for key in KEYS if key.startswith("payload."))
"""The settings whose values must not appear in messages. A key may have been given to any setting of payloads."""


def check_setting(key: str, value: Any) -> Any:
    """Check *value*, and return its normal form.

    Raises ``ValueError``. The error's message has the rule and the value, with passwords masked.
    """
    try:
        return KEYS[key].check(value)
    except ValueError as exc:
        if key in SECRET_KEYS:
            raise
        shown = redact(value if isinstance(value, str) else repr(value))
        raise ValueError(f"{exc}, got {shown if len(shown) <= 60 else shown[:57] + '...'}") from exc


def _check_fields(settings: msgspec.Struct, prefix: str) -> None:
    """Check all fields, and store the normal form of each value."""
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
    """Settings of workers. Options of the command line and of the class ``Worker`` override the settings of workers."""

    queues: tuple[str, ...] | dict[str, int] | None = None
    """The queues' names in order of urgency, or a mapping of names to weights. None means the queues of the app's
    tasks."""
    policy: str | None = None
    """``strict``: while an earlier queue has a due job, no job of a later queue is taken. ``weighted`` takes jobs by
    the weights of the queues. ``round-robin`` takes the same number of jobs from each queue.

    None means ``strict`` if queues are named, and ``round-robin`` if no queues are named.
    """
    processes: int | str | None = None
    """The number of worker processes under a supervisor. With 0, there is no supervisor, and jobs run in the worker's
    only process. With ``MIN:MAX``, like ``1:8``, the worker scales between the two numbers.

    None means 1 on the command line, and 0 for a ``Worker`` that a program creates.
    """
    scale_up_after: float = 1.0
    """Seconds for which jobs wait before a worker that scales starts more processes."""
    scale_down_after: float = 30.0
    """Seconds for which a worker that scales keeps unneeded processes."""
    threads: int = 1
    concurrency: int = 0
    """The largest number of coroutine jobs that run at the same time. With 0, jobs run on threads."""
    prefetch: int = 100
    """The largest number of jobs that a process reserves in addition to its running jobs. A process reserves additional
    jobs only while jobs are short."""
    grace: float = 25.0
    """Seconds that running jobs get to finish after SIGTERM. Kubernetes kills a container after 30 seconds."""
    kill_after: float = 2.0
    """Seconds from a job's ``timeout`` until the job's process is ended."""
    health_file: str | None = None
    """The file to which a worker writes its status every few seconds. Needs a supervisor."""
    http: str | None = None
    """The address ``HOST:PORT`` or ``:PORT`` of a worker's pages for probes and Prometheus. Needs a supervisor."""

    def __post_init__(self) -> None:
        _check_fields(self, "worker.")


class PayloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``multiq.Payloads``, for apps that are constructed without ``payloads``."""

    sign: tuple[Any, ...] = ()
    encrypt: tuple[Any, ...] = ()
    compress: int | None = None
    accept_unsigned: bool = False

    def __post_init__(self) -> None:
        _check_fields(self, "payload.")


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of logging. ``slow_job`` and ``summary`` also apply to workers that a program creates."""

    level: str = "info"
    format: str = "text"
    jobs: bool = False
    """Whether each finished job is logged at level info instead of debug. Writing a log line takes as long as running a
    short job."""
    slow_job: float = 10.0
    """The number of seconds after which a job is logged as slow, as a warning. With 0, no job is logged as slow."""
    summary: float = 60.0
    """The longest time in seconds between two summaries of the jobs that a process has finished. With 0, no summaries
    are logged."""

    def __post_init__(self) -> None:
        _check_fields(self, "log.")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. ``connections`` maps names to URLs. Raises ``SettingsInvalid`` if a value breaks its rule."""

    url: str = DEFAULT_URL
    store: str | None = None
    """The store that keeps outcomes and held jobs for ``url``, as a URL or a connection's name. Only a backend that
    stores only jobs needs ``store``."""
    app: str | None = None
    """The default app of ``multiq worker``, in the form ``module:attribute``."""
    include: tuple[str, ...] = ()
    """Modules with tasks, like ``shop.mail``. Every app imports the modules in ``include`` when the app's tasks are
    first needed."""
    connections: dict[str, str] = {}
    max_body: int = MAX_BODY_DEFAULT
    max_result: int = MAX_RESULT_DEFAULT
    """The largest size, in bytes, of the JSON value that is kept with a job's outcome. A value that is larger is left
    out of the outcome."""
    worker: WorkerSettings = WorkerSettings()
    payload: PayloadSettings = PayloadSettings()
    log: LogSettings = LogSettings()

    def __post_init__(self) -> None:
        _check_fields(self, "")

    def __repr__(self) -> str:
        """Return the settings as text, with the passwords in URLs masked."""
        connections = {name: redact(url) for name, url in self.connections.items()}
        return (
            f"Settings(url={redact(self.url)!r}, store={None if self.store is None else redact(self.store)!r}, "
            f"include={self.include!r}, connections={connections!r}, max_body={self.max_body!r}, "
            f"max_result={self.max_result!r}, worker={self.worker!r}, payload={self.payload!r}, log={self.log!r})"
        )

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Mask the passwords in URLs, which ``rich`` would show without this method."""
        return [
            ("url", redact(self.url)),
            ("store", None if self.store is None else redact(self.store)),
            ("include", self.include),
            ("connections", {name: redact(url) for name, url in self.connections.items()}),
            ("max_body", self.max_body),
            ("max_result", self.max_result),
            ("worker", self.worker),
            ("payload", self.payload),
            ("log", self.log),
        ]

    def resolve(self, connection: str | None) -> str:
        """Return the URL of a connection.

        *connection* is a URL, the name of a configured connection, or None for the default. Raises ``SettingsInvalid``
        for an unknown name.
        """
        if connection is None:
            url = self._follow(self.url, "url")
            return self._with_store(url if self.store is None or has_store(url) else with_store(url, self.store))
        if not isinstance(connection, str):
            raise SettingsInvalid(
                [f"connection {connection!r} is not text: pass a URL like 'sqlite:///jobs.db', or a connection's name"]
            )
        return self._with_store(connection if "://" in connection else self._follow(connection, "connection"))

    def _with_store(self, url: str) -> str:
        """If the option ``store`` of the URL names a connection, replace the name by the connection's URL."""
        if not has_store(url):
            return url
        store = without_store(url)[1]
        return url if "://" in store else with_store(url, self._follow(store, "store"))

    def _follow(self, text: str, what: str) -> str:
        if "://" in text:
            return text
        if text in self.connections:
            return self.connections[text]
        raise SettingsInvalid([f"{what}: {no_connection(text, self.connections)}"])


def no_connection(text: str, connections: Iterable[str]) -> str:
    known = ", ".join(sorted(connections)) or "none"
    return (
        f"{redact(text)!r} is neither a URL (like 'sqlite:///jobs.db') nor a configured connection (there are: {known})"
    )
