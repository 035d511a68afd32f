"""Describes a store that the user has set up as the ``Site`` of a soak.

A soak uses only its own queues. No other program uses the names of these queues. At the end, the soak purges the jobs
of its queues, and removes the data that the driver stores for an empty queue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import psutil

from multiq.backend import Ack, State
from multiq.backend.registry import ALIASES, installed, load, load_driver, open_backend
from multiq.errors import BackendError, MultiqError, OptionInvalid, UrlInvalid
from multiq.fault_proxy import Proxy
from multiq.settings.url import parse_url, redact, split

from .load import TTR
from .site import Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import Backend

    from .site import Held

_PORTS = {"redis": 6379, "beanstalk": 11300, "mysql": 3306}
"""The default ports of the stores that can be reached through a proxy: a single address, and no TLS."""
_TLS = frozenset({"ca", "tls", "ssl", "ssl_ca", "cert"})
_STATES = (State.RESERVED, State.DELAYED, State.READY, State.BURIED)
"""The order in which the states are listed. If a job becomes ready during the listing, this order may list the job
twice, but does not miss it."""
_PURGED = (State.READY, State.DELAYED, State.BURIED)
_BENCH = "multiq.bench"
_MOST_AT_ONCE = 100
_PATIENCE = 60.0  # seconds until a restarted server must take connections again


class QueueLeftBehind(MultiqError):
    """A soak's queue could not be emptied."""


class RestartFailed(MultiqError):
    """The restart command did not restart the server."""


class Harm(NamedTuple):
    """The faults that a soak may make on the server itself. By default, no fault is made on the server."""

    freeze_pid: int | None = None
    """The pid of the server's process on this machine. The soak stops the server's process for some seconds."""
    restart_command: str = ""
    """A shell command that kills the server and starts it again."""
    flush_scripts: bool = False
    """Redis: flush all scripts of the server, including scripts of other programs."""


@contextlib.contextmanager
def site_at(url: str, queues: Sequence[str], timeout: float, harm: Harm) -> Iterator[Site]:
    """Yield the site for the store at *url*, and remove the *queues* at the end.

    Raises ``UrlInvalid``, ``OptionInvalid``, ``BackendNotInstalled``, ``BackendError``, and ``QueueLeftBehind``.
    """
    scheme = split(url).scheme
    name = ALIASES.get(scheme.partition("+")[0], scheme.partition("+")[0])
    driver = load_driver(name)
    if not driver.declared.claim("shared"):
        raise UrlInvalid(f"a soak needs a store that several processes can share, got {redact(url)}")
    for power in ("management", "purging", "exact_counts"):
        if not driver.declared.claim(power):
            raise open_backend(url).unsupported(power)
    direct = _with_timeout(url, timeout) if "timeout" in driver.options else url
    with contextlib.ExitStack() as stack:
        made = _file_to_be(direct)
        stack.callback(lambda: _remove_file(None if others else made))
        others: list[str] = []
        backend = stack.enter_context(open_backend(direct))
        for queue in queues:
            backend.stats(queue)  # a wrong URL raises an error here, before the soak begins
        # if other queues have appeared, the file is not removed
        stack.callback(lambda: others.extend(set(backend.queues()) - set(queues)))
        stack.callback(_clean, backend, name, direct, queues)
        proxy = None
        through = direct
        address = _address(direct)
        if address is not None:
            proxy = stack.enter_context(Proxy(address))
            through = _through(direct, proxy.port)
        site = Site(name, through, lambda: _held(backend, queues), lambda: _is_left(backend, queues), proxy)
        if harm.freeze_pid is not None or harm.restart_command:
            site.server = _Server(backend, queues[0], harm, name, direct, address)
        if harm.flush_scripts:
            if name != "redis" or address is None:
                raise OptionInvalid(
                    f"{redact(url)} has no scripts that can be flushed: this fault needs a URL like redis://host:port"
                )
            site.own_faults["flush scripts"] = lambda: _redis_says(direct, address, "SCRIPT", "FLUSH") == "OK"
        yield site


# --- the way there -----------------------------------------------------------------------------------------


def _with_timeout(url: str, timeout: float) -> str:
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name != "timeout"]
    query = urlencode([*options, ("timeout", f"{timeout:g}")], safe="/:")
    # urlunsplit would remove one of the slashes of sqlite:////tmp/jobs.db
    return f"{url.partition('?')[0]}?{query}"


def _address(url: str) -> tuple[str, int] | None:
    """The address that a proxy would forward to. The address is None if the store cannot be reached through a proxy."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or "," in parts.netloc or not parts.hostname:
        return None
    if any(name in _TLS for name, _ in parse_qsl(parts.query)):
        return None
    return parts.hostname, parts.port or _PORTS[parts.scheme]


def _through(url: str, port: int) -> str:
    scheme, _, rest = url.partition("://")
    cut = min((at for at in map(rest.find, "/?") if at >= 0), default=len(rest))
    who, at, _ = rest[:cut].rpartition("@")
    return f"{scheme}://{who}{at}127.0.0.1:{port}{rest[cut:]}"


def _file_to_be(url: str) -> Path | None:
    """The file that a soak on SQLite would create. The result is None if the file already exists, or if the URL does
    not name a file."""
    if not url.startswith("sqlite:///"):
        return None
    path = Path(unquote(url.removeprefix("sqlite:///").partition("?")[0]))
    return None if path.exists() else path


def _remove_file(path: Path | None) -> None:
    if path is not None:
        for ending in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + ending).unlink(missing_ok=True)


# --- what it holds -----------------------------------------------------------------------------------------


def _held(backend: Backend, queues: Sequence[str]) -> Held:
    """All jobs of the queues.

    If the backend cannot list jobs, the ready jobs are reserved and acked. Then the buried jobs are kicked, reserved
    and acked.
    """
    found: Held = []
    for queue in queues:
        if backend.capabilities.lists_jobs:
            found += dict(job for state in _STATES for job in _listed(backend, queue, state)).values()
        else:
            found += _taken(backend, queue)
    return found


def _listed(backend: Backend, queue: str, state: State) -> Iterator[tuple[str, tuple[int, str]]]:
    """The id of each job in the given state, with the job's number and state."""
    after: str | None = None
    while True:
        page = backend.jobs(queue, state, after=after)
        yield from ((job.id, (_number(job.body), str(job.state))) for job in page.jobs)
        after = page.after
        if after is None:
            return


def _taken(backend: Backend, queue: str) -> Iterator[tuple[int, str]]:
    with backend.consumer([queue]) as consumer:
        for state in (State.READY, State.BURIED):
            while leases := consumer.reserve(_MOST_AT_ONCE, 0):
                yield from ((_number(lease.body), str(state)) for lease in leases)
                consumer.settle([Ack(lease) for lease in leases])
            if state is State.READY:
                while backend.kick(queue, _MOST_AT_ONCE):
                    pass


def _number(body: bytes) -> int:
    _, _, rest = body.partition(b"soak#")
    number, mark, _ = rest.partition(b"#")
    return int(number) if mark and number.isdigit() else -1


def _is_left(backend: Backend, queues: Sequence[str]) -> bool:
    try:
        stats = [backend.stats(queue) for queue in queues]
    except BackendError:
        return True  # the server may be back soon, with jobs
    return any((one.ready or 0) + (one.delayed or 0) + (one.reserved or 0) for one in stats)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore SIGINT during the ``with`` block, because a second Ctrl-C during the cleanup would leave jobs behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@_uninterrupted()
def _clean(backend: Backend, name: str, url: str, queues: Sequence[str]) -> None:
    """Purge the queues. The reserved jobs of killed processes become ready when their leases end."""
    give_up_at = time.monotonic() + 3 * TTR
    while True:
        for queue in queues:
            backend.purge(queue, _PURGED)
        if not any(backend.stats(queue).reserved for queue in queues):
            break
        if time.monotonic() > give_up_at:
            raise QueueLeftBehind(f"the queues {', '.join(queues)} of {redact(url)} still have reserved jobs")
        time.sleep(0.2)
    for queue in queues:
        backend.purge(queue, _PURGED)
    if name in installed(_BENCH):
        with load(_BENCH, name).at(url) as place:
            for queue in queues:
                place.sweep(queue)


# --- faults ------------------------------------------------------------------------------------------------


class _Server:
    """A server that the user has set up, and on which the user allows faults."""

    def __init__(  # noqa: PLR0917 - facts about a server
        self, backend: Backend, queue: str, harm: Harm, driver: str, url: str, address: tuple[str, int] | None
    ) -> None:
        self._backend = backend
        self._queue = queue
        self._restart_command = harm.restart_command
        self._driver = driver
        self._url = url
        self._address = address
        self._restarts = 0
        self._process = None if harm.freeze_pid is None else _process(harm.freeze_pid)
        self.can_pause = self._process is not None
        self.can_restart = bool(harm.restart_command)

    @property
    def pid(self) -> int:
        assert self._process is not None  # noqa: S101 - without a pid this fault is not available
        return self._process.pid

    def pause(self) -> None:
        """Stop the process.

        Raises ``psutil.NoSuchProcess`` if the process has ended, even if another process has its pid now.
        """
        assert self._process is not None  # noqa: S101
        self._process.suspend()

    def go_on(self) -> None:
        assert self._process is not None  # noqa: S101
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.resume()

    def run_id(self) -> object:
        """The run id that the server reports.

        If the server has no run id, the number of restart commands is used instead. The number differs after each
        restart command.
        """
        told = None
        if self._address is not None:
            with contextlib.suppress(OSError, ValueError):
                told = _told_run_id(self._driver, self._url, self._address)
        return self._restarts if told is None else told

    def restart(self) -> None:
        """Run the restart command, and wait until the server serves.

        Raises ``RestartFailed`` if the command fails, or if the server does not serve within a minute.
        """
        with tempfile.TemporaryFile() as output:  # a file, because the started server would hold a pipe open
            done = subprocess.run(  # noqa: S602 - the user's own
                self._restart_command, shell=True, check=False, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            output.seek(0)
            said = output.read().decode(errors="replace").strip()[-300:]
        if done.returncode:
            raise RestartFailed(f"{self._restart_command!r} ended with {done.returncode}{': ' if said else ''}{said}")
        self._restarts += 1
        give_up_at = time.monotonic() + _PATIENCE
        while True:
            try:
                self._backend.stats(self._queue)
            except MultiqError as exc:
                if time.monotonic() > give_up_at:
                    raise RestartFailed(
                        f"{_PATIENCE:g} s after {self._restart_command!r} the server does not serve: {exc}"
                    ) from exc
                time.sleep(0.05)
            else:
                return


def _process(pid: int) -> psutil.Process:
    """A handle of a process that may be stopped. A pid alone could later belong to another process."""
    try:
        process = psutil.Process(pid)
        os.kill(pid, 0)
    except (psutil.NoSuchProcess, ProcessLookupError):
        raise OptionInvalid(f"there is no process {pid} that could be frozen on this machine") from None
    except (psutil.AccessDenied, PermissionError):
        raise OptionInvalid(f"process {pid} belongs to another user, so this user cannot freeze it") from None
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    if pid in own:
        raise OptionInvalid(f"process {pid} is this program or a parent of it: give the server's own process")
    return process


def _told_run_id(driver: str, url: str, address: tuple[str, int]) -> str | None:
    """The run id that a server reports. The run id is None for drivers whose servers have no run id."""
    if driver == "redis":
        info = _redis_says(url, address, "INFO", "server")
        return next((line for line in info.splitlines() if line.startswith("run_id:")), None)
    if driver == "beanstalk":
        with socket.create_connection(address, timeout=_PATIENCE) as connection, connection.makefile("rb") as replies:
            connection.sendall(b"stats\r\n")
            text = replies.read(int(replies.readline().split()[1])).decode()
        return next((line for line in text.splitlines() if line.startswith("id:")), None)
    return None


def _redis_says(url: str, address: tuple[str, int], *command: str) -> str:
    """The reply to one command, on a new connection.

    Raises ``OSError``. Raises ``ValueError`` for an error reply.
    """
    parsed = parse_url(url, load_driver("redis").options)
    words: list[Sequence[str]] = [command]
    if parsed.password is not None:
        words.insert(0, ("AUTH", *([parsed.username] if parsed.username else []), parsed.password))
    reply = ""
    with socket.create_connection(address, timeout=_PATIENCE) as connection, connection.makefile("rb") as replies:
        for each in words:
            encoded = [word.encode() for word in each]
            connection.sendall(
                b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
            )
            line = replies.readline().decode().strip()
            if line[:1] not in {"+", "$"}:
                raise ValueError(f"{each[0]}: {line or 'the server hung up'}")
            reply = replies.read(int(line[1:])).decode() if line[0] == "$" else line[1:]
    return reply
