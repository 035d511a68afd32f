"""Opening connections: the commands that redis-py sends at the login, the deadline, the errors, and what stays open.

Also the guard of the one private name of redis-py that is used, ``_sock``: `tox -m redis-py` runs this folder on the
oldest redis-py that multiq takes and on the newest of each major version since.
"""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import redis
from proxy import MOST, CutReply, Proxy, Slice, some
from servers.certificate import Certificate
from servers.process import HOST, until

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.conformance.forks import ended_well, fork
from multiq.errors import BackendTimeout, BackendUnavailable, EnqueueUncertain, UrlInvalid
from multiq.ids import new_id
from multiq_redis.backend import RedisBackend
from multiq_redis.connection_settings import ConnectionSettings
from multiq_redis.opening import open_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.redis import RedisServer

CANARY = "S3CR3T"
QUEUE = "mail"


def new() -> NewJob:
    return NewJob(b"x", new_id())


@pytest.fixture
def guarded_server(new_redis: Callable[..., RedisServer]) -> RedisServer:
    """A server with a password, and with the user ann, who may use all commands."""
    server = new_redis(requirepass=CANARY)
    server.ask("ACL", "SETUSER", "ann", "on", f">{CANARY}", "~*", "+@all")
    return server


def url(port: int, **options: object) -> str:
    """A URL whose connections log in, have a name and select a database."""
    query = "&".join(f"{name}={value}" for name, value in {"client_name": "shop", **options}.items())
    return f"redis://ann:{CANARY}@{HOST}:{port}/3?{query}"


def sent_since_reset(server: RedisServer) -> dict[str, int]:
    stats = server.ask("INFO", "commandstats")
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}


# --- what is sent ----------------------------------------------------------------------------------------


def test_login_sends_one_command_for_each_setting(guarded_server: RedisServer) -> None:
    with guarded_server.client() as observer, open_backend(url(guarded_server.port)) as backend:
        observer.config_resetstat()
        before = observer.info("stats")["total_connections_received"]
        backend.enqueue(QUEUE, [new()])
        assert observer.info("stats")["total_connections_received"] == before + 1, "redis-py connected by itself"
        sent = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in observer.info("commandstats").items()}
        assert {name: sent[name] for name in ("auth", "client|setname", "select", "hello")} == {
            "auth": 1,
            "client|setname": 1,
            "select": 1,
            "hello": 1,
        }
        (ours,) = [client for client in observer.client_list() if client["name"] == "shop"]
        assert (ours["db"], ours["user"]) == ("3", "ann")
        assert ours["resp"] == "2"


@pytest.mark.parametrize(
    ("settings", "round_trips"),
    [
        (ConnectionSettings("ann", CANARY, 3, client_name="shop"), 4),
        (ConnectionSettings("ann", CANARY), 2),
        (ConnectionSettings(None, CANARY), 2),
    ],
    ids=["all", "user", "password"],
)
def test_login_takes_one_round_trip_for_each_setting_and_one_more(
    guarded_server: RedisServer, settings: ConnectionSettings, round_trips: int
) -> None:
    with Proxy((HOST, guarded_server.port)) as proxy:
        open_connection((HOST, proxy.port), settings, time.monotonic() + 60).close()
        assert proxy.requests == round_trips


def test_socket_stays_open_after_redis_py_is_collected(guarded_server: RedisServer) -> None:
    settings = ConnectionSettings("ann", CANARY, 3, client_name="shop")
    deadline = time.monotonic() + 60
    connection = open_connection((HOST, guarded_server.port), settings, deadline)
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, redis.Connection) and one.client_name == "shop"]
    assert connection.ask(b"*1\r\n$4\r\nPING\r\n", deadline) == b"PONG"
    connection.close()


def test_version_and_role_are_those_of_the_server(guarded_server: RedisServer) -> None:
    settings = ConnectionSettings("ann", CANARY)
    connection = open_connection((HOST, guarded_server.port), settings, time.monotonic() + 60)
    connection.close()
    text = guarded_server.ask("INFO", "server")["redis_version"]
    assert connection.version == tuple(int(part) for part in text.split("."))
    assert not connection.is_replica


def test_redis_py_is_imported_at_the_first_connect(redis_server: RedisServer) -> None:
    code = (
        "import sys, multiq_redis, multiq_redis.backend, multiq_redis.redis_py_client\n"
        "from multiq.backend.registry import open_backend\n"
        f"backend = open_backend({redis_server.url!r})\n"
        "assert 'redis' not in sys.modules\n"
        "backend.stats('q')\n"
        "assert 'redis' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_import_of_redis_py_takes_nothing_of_the_first_call_s_time(redis_server: RedisServer, tmp_path: Path) -> None:
    # Given a redis-py whose import takes longer than the timeout of a call
    slow_redis_py(tmp_path, 1.0)
    code = (
        "from multiq.backend.registry import open_backend\n"
        f"with open_backend('{redis_server.url}?timeout=0.8') as backend: backend.stats('q')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def slow_redis_py(folder: Path, seconds: float) -> None:
    """Make a package ``redis`` in *folder* that sleeps, and then becomes the real one."""
    real = Path(redis.__file__).parent
    (folder / "redis").mkdir()
    (folder / "redis" / "__init__.py").write_text(
        f"import time; time.sleep({seconds})\n"
        f"__path__ = [{str(real)!r}]; __file__ = {str(real / '__init__.py')!r}\n"
        "exec(compile(open(__file__).read(), __file__, 'exec'))\n"
    )


def test_fork_during_the_import_of_redis_py_leaves_a_child_that_can_connect(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    slow_redis_py(tmp_path, 0.5)
    code = (
        "import os, signal, threading, time, warnings\n"
        "from multiq_redis.redis_py_import import redis_py\n"
        "warnings.simplefilter('ignore')\n"
        "thread = threading.Thread(target=redis_py)\n"
        "thread.start()\n"
        "time.sleep(0.2)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    redis_py().Redis\n"
        "    os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "thread.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_forked_child_logs_in_by_itself(guarded_server: RedisServer) -> None:
    with open_backend(url(guarded_server.port)) as backend:
        backend.enqueue(QUEUE, [new()])
        assert ended_well(fork(lambda: backend.enqueue(QUEUE, [new()])))
        assert backend.stats(QUEUE).ready == 2


# --- faults during the login -----------------------------------------------------------------------------


@pytest.mark.parametrize("most", MOST)
def test_login_reply_cut_at_any_byte_leaves_exactly_one_effect(guarded_server: RedisServer, most: int | None) -> None:
    with Proxy((HOST, guarded_server.port)) as proxy:
        with open_backend(url(proxy.port)) as backend:
            backend.queues()
        for at in some(range(proxy.replied), most):
            with open_backend(url(proxy.port)) as backend:
                proxy.arm(CutReply(at=at))
                job = new()
                try:
                    backend.enqueue(QUEUE, [job])
                except EnqueueUncertain:
                    raise AssertionError("nothing was sent") from None
                except BackendUnavailable:
                    backend.enqueue(QUEUE, [job])
                proxy.disarm()
                assert backend.stats(QUEUE).ready == 1
                backend.delete(QUEUE, job.id)


def test_login_replies_in_pieces_of_one_byte_are_parsed_the_same(guarded_server: RedisServer) -> None:
    with Proxy((HOST, guarded_server.port)) as proxy:
        proxy.mode = Slice(1)
        with open_backend(url(proxy.port)) as backend:
            backend.enqueue(QUEUE, [new()])
            assert backend.stats(QUEUE).ready == 1


class Replier:
    """A server that answers each command with the next of *replies*. *every*: seconds between two bytes."""

    def __init__(self, *replies: bytes, every: float = 0.0) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._replies, self._every = replies, every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        try:
            while True:
                client, _ = self._listener.accept()
                with client:
                    client.settimeout(60)
                    self._answer(client)
        except OSError:
            return

    def _answer(self, client: Any) -> None:
        try:
            for reply in self._replies:
                if not client.recv(65536):
                    return
                for at in range(len(reply)) if self._every else ():
                    client.sendall(reply[at : at + 1])
                    if self._ended.wait(self._every):
                        return
                if not self._every:
                    client.sendall(reply)
            client.recv(65536)
        except OSError:
            return


@pytest.mark.parametrize(
    "reply", [b"+OK\r\n" * 40, b"-ERR " + b"x" * 100, b"$500000000\r\n" + b"x" * 100], ids=["ok", "error", "bulk"]
)
def test_login_that_dribbles_ends_at_the_deadline(reply: bytes) -> None:
    with Replier(reply, every=0.2) as server, open_backend(url(server.port, timeout=0.7)) as backend:
        started = time.monotonic()
        with pytest.raises(BackendUnavailable):
            backend.enqueue(QUEUE, [new()])
        assert time.monotonic() - started < 10  # more than 20 s if the timeout applied to each byte


def test_silent_login_is_a_timeout() -> None:
    with (
        Replier(b"") as server,
        open_backend(url(server.port, timeout=0.3)) as backend,
        pytest.raises(BackendTimeout, match=str(server.port)),
    ):
        backend.enqueue(QUEUE, [new()])


def test_reply_beyond_those_of_the_login_is_not_taken_for_a_later_one() -> None:
    hello = b"*2\r\n$7\r\nversion\r\n$5\r\n7.2.0\r\n"
    with (
        Replier(b"+OK\r\n", b"+OK\r\n", b"+OK\r\n+BOGUS\r\n", hello, b"$-1\r\n") as server,
        open_backend(url(server.port, timeout=0.5)) as backend,
        pytest.raises(BackendUnavailable),
    ):
        backend.enqueue(QUEUE, [new()])


@pytest.mark.parametrize("reply", [b":1\r\n", b"$-1\r\n", b"*2\r\n:1\r\n:2\r\n", b"?\r\n", b"-\xff\xfe\r\n", b"-\r\n"])
def test_login_with_a_malformed_reply_is_a_typed_error(reply: bytes) -> None:
    with Replier(reply) as server, open_backend(url(server.port, timeout=2)) as backend:
        with pytest.raises(BackendUnavailable) as caught:
            backend.enqueue(QUEUE, [new()])
        assert CANARY not in everything_said(caught.value)


# --- refusals, and that no password is shown ----------------------------------------------------------------


def everything_said(error: BaseException) -> str:
    """The texts of an error, of its causes and contexts, and of the variables in the driver's frames.

    Tools that collect errors show the variables of each frame.
    """
    texts = [*traceback.format_exception_only(error), repr(error)]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals["__name__"].startswith("multiq_redis."):
            texts += [f"{frame.f_code.co_name}: {name} = {value!r}" for name, value in frame.f_locals.items()]
    texts += [everything_said(other) for other in (error.__cause__, error.__context__) if other is not None]
    return "\n".join(texts)


def refused(url: str) -> str:
    with open_backend(url) as backend, pytest.raises(BackendUnavailable) as caught:
        backend.enqueue(QUEUE, [new()])
    assert CANARY not in everything_said(caught.value)
    return str(caught.value)


def test_wrong_password_is_reported_without_showing_it(guarded_server: RedisServer) -> None:
    assert "does not accept this user and password" in refused(f"redis://ann:{CANARY}-2@{HOST}:{guarded_server.port}")


def test_missing_password_is_reported(guarded_server: RedisServer) -> None:
    for options in ("", "/3", "?client_name=shop"):
        assert "requires a password" in refused(f"redis://{HOST}:{guarded_server.port}{options}")


def test_server_that_does_not_know_auth_does_not_make_the_password_public(
    new_redis: Callable[..., RedisServer],
) -> None:
    server = new_redis(rename_command='AUTH ""')
    assert "unknown command" in refused(f"redis://ann:{CANARY}@{HOST}:{server.port}").lower()


def test_account_that_may_not_name_its_connections_is_reported(guarded_server: RedisServer) -> None:
    guarded_server.ask("ACL", "SETUSER", "ann", "-client|setname")
    assert "docs/redis.md" in refused(url(guarded_server.port))


def test_database_that_is_not_there_is_reported(guarded_server: RedisServer) -> None:
    assert "DB index" in refused(f"redis://ann:{CANARY}@{HOST}:{guarded_server.port}/99")


def test_hello_that_is_forbidden_is_left_out(guarded_server: RedisServer) -> None:
    guarded_server.ask("ACL", "SETUSER", "ann", "-hello")
    with open_backend(url(guarded_server.port)) as backend:
        backend.enqueue(QUEUE, [new()])
        assert backend.stats(QUEUE).ready == 1


# --- credential providers ------------------------------------------------------------------------------------


class Rotating(redis.CredentialProvider):
    """Returns the user's current password, like a provider of cloud tokens, and counts its calls."""

    def __init__(self, password: str) -> None:
        self.password = password
        self.asked = 0

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        return "ann", self.password


@pytest.fixture
def rotating(guarded_server: RedisServer) -> Iterator[tuple[Rotating, RedisBackend]]:
    provider = Rotating(CANARY)
    client = redis.Redis(HOST, guarded_server.port, credential_provider=provider)
    with client, RedisBackend(client=client) as backend:
        yield provider, backend


def test_credential_provider_is_asked_again_at_each_reconnect(
    guarded_server: RedisServer, rotating: tuple[Rotating, RedisBackend]
) -> None:
    provider, backend = rotating
    backend.enqueue(QUEUE, [new()])
    backend.enqueue(QUEUE, [new()])
    assert provider.asked == 1
    for number in range(2, 5):
        # When the password changes, and the server closes the connections that used the old one
        provider.password = f"{CANARY}-{number}"
        guarded_server.ask("ACL", "SETUSER", "ann", "resetpass", f">{provider.password}")
        assert guarded_server.ask("CLIENT", "KILL", "USER", "ann") == 1
        guarded_server.ask("CONFIG", "RESETSTAT")
        # Then the next call fails, asks the provider for the new password, and is repeated once
        backend.enqueue(QUEUE, [new()])
        assert provider.asked == number
        sent = sent_since_reset(guarded_server)
        assert (sent["hello"], sent["evalsha"]) == (1, 1)
    assert backend.stats(QUEUE).ready == 5


def test_reply_lost_while_the_password_changes_costs_one_repetition_and_has_one_effect(
    guarded_server: RedisServer,
) -> None:
    provider = Rotating(CANARY)
    with (
        Proxy((HOST, guarded_server.port)) as proxy,
        redis.Redis(HOST, proxy.port, credential_provider=provider) as client,
        RedisBackend(client=client) as backend,
    ):
        backend.enqueue(QUEUE, [new()])
        provider.password = f"{CANARY}-2"
        guarded_server.ask("ACL", "SETUSER", "ann", "resetpass", f">{provider.password}")
        proxy.arm(CutReply())
        backend.enqueue(QUEUE, [new()])
        assert proxy.happened == 1
        assert provider.asked == 2
        assert backend.stats(QUEUE).ready == 2


def test_old_password_is_refused_without_showing_it(
    guarded_server: RedisServer, rotating: tuple[Rotating, RedisBackend]
) -> None:
    _, backend = rotating
    guarded_server.ask("ACL", "SETUSER", "ann", "resetpass", ">another")
    with pytest.raises(BackendUnavailable, match="does not accept") as caught:
        backend.enqueue(QUEUE, [new()])
    assert CANARY not in everything_said(caught.value)


@pytest.mark.parametrize("given", [None, (), "ann", ("a", "b", "c"), ["ann", CANARY]])
def test_provider_that_returns_something_else_is_named(
    rotating: tuple[Rotating, RedisBackend], monkeypatch: pytest.MonkeyPatch, given: object
) -> None:
    _, backend = rotating
    monkeypatch.setattr(Rotating, "get_credentials", lambda _self: given)
    with pytest.raises(BackendUnavailable, match=r"credential provider Rotating must return") as caught:
        backend.enqueue(QUEUE, [new()])
    assert CANARY not in everything_said(caught.value)


@pytest.mark.parametrize("given", [("ann", [CANARY]), ("ann", f"{CANARY}\ud800")])
def test_password_that_cannot_be_sent_is_reported_as_that(
    rotating: tuple[Rotating, RedisBackend], monkeypatch: pytest.MonkeyPatch, given: object
) -> None:
    _, backend = rotating
    monkeypatch.setattr(Rotating, "get_credentials", lambda _self: given)
    with pytest.raises(BackendUnavailable, match=r"cannot be logged in to: .*the password") as caught:
        backend.enqueue(QUEUE, [new()])
    assert CANARY not in everything_said(caught.value)


def test_provider_that_fails_is_named_and_its_error_is_the_cause(
    rotating: tuple[Rotating, RedisBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, backend = rotating

    def fail(_self: Rotating) -> tuple[str, str]:
        raise RuntimeError(f"token {CANARY} has expired")

    monkeypatch.setattr(Rotating, "get_credentials", fail)
    with pytest.raises(BackendUnavailable, match=r"credential provider Rotating raised RuntimeError") as caught:
        backend.enqueue(QUEUE, [new()])
    assert CANARY not in str(caught.value)
    cause = caught.value.__cause__
    assert cause is not None
    assert isinstance(cause.__cause__, RuntimeError)
    monkeypatch.undo()
    backend.enqueue(QUEUE, [new()])
    assert provider.asked == 1


def test_provider_that_takes_too_long_is_a_timeout(
    rotating: tuple[Rotating, RedisBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, _ = rotating

    def dawdle(_self: Rotating) -> tuple[str, str]:
        time.sleep(0.2)
        return "ann", CANARY

    monkeypatch.setattr(Rotating, "get_credentials", dawdle)
    client = redis.Redis(HOST, 1, credential_provider=provider)
    with Replier(b"") as server:
        client.connection_pool.connection_kwargs["port"] = server.port
        with client, RedisBackend(client=client, timeout=0.1) as backend, pytest.raises(BackendTimeout):
            backend.enqueue(QUEUE, [new()])


def test_provider_that_takes_a_while_is_asked_once_for_each_connection(
    rotating: tuple[Rotating, RedisBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a provider that needs longer than the driver allows for the marker that ends a wait
    provider, backend = rotating

    def take_a_while(self: Rotating) -> tuple[str, str]:
        time.sleep(0.7)
        self.asked += 1
        return "ann", self.password

    monkeypatch.setattr(Rotating, "get_credentials", take_a_while)
    # When a consumer waits several times
    with backend.consumer([QUEUE]) as consumer:
        for _ in range(3):
            assert consumer.reserve(1, 0.1) == []
    # Then its connection stays open, and so does the connection that adds the marker
    assert provider.asked == 2


def test_backend_shows_no_password(rotating: tuple[Rotating, RedisBackend]) -> None:
    _, backend = rotating
    settings = ConnectionSettings(credential_provider=Rotating(CANARY))
    for one in (settings, backend, backend._servers):
        assert CANARY not in repr(one)
    assert "Rotating" in repr(settings)
    assert "ann" in repr(ConnectionSettings("ann", CANARY))


# --- options of URLs -----------------------------------------------------------------------------------


def test_tls_options_of_redis_py_are_taken(redis_tls: RedisServer) -> None:
    assert redis_tls.certificate is not None
    authority = redis_tls.certificate.authority
    for more in ("", "&ssl_cert_reqs=required&ssl_min_version=TLSv1.2", "&ssl_check_hostname=true&ssl_min_version=772"):
        with open_backend(f"rediss://{HOST}:{redis_tls.port}?ssl_ca_certs={authority}{more}") as backend:
            assert backend.stats("never used").ready == 0
    with (
        pytest.warns(match="dangerously_skip"),
        open_backend(f"rediss://{HOST}:{redis_tls.port}?ssl_cert_reqs=none") as backend,
    ):
        assert backend.stats("never used").ready == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("rediss://h?ca=a&ssl_ca_certs=b", "same option"),
        ("rediss://h?ssl_min_version=SSLv3", "TLSv1.2 or TLSv1.3"),
        ("rediss://h?ssl_ciphers=NONE_SUCH", "ssl_ciphers=NONE_SUCH"),
        ("rediss://h?ssl_cert_reqs=maybe", "required"),
        ("redis://h?ssl_check_hostname=no", "ssl_check_hostname would be ignored"),
        ("redis://h?ssl_cert_reqs=none", "ssl_cert_reqs would be ignored"),
    ],
)
def test_tls_options_that_cannot_be_used_are_refused(options: str, named: str) -> None:
    with pytest.raises(UrlInvalid, match=named):
        open_backend(options)


def test_host_name_is_checked_unless_switched_off(tmp_path: Path, new_redis: Callable[..., RedisServer]) -> None:
    certificate = Certificate.make(tmp_path, "theirs", host="elsewhere.example")
    server = new_redis(certificate=certificate)
    where = f"rediss://{HOST}:{server.port}?ssl_ca_certs={certificate.authority}"
    assert "cannot be trusted" in refused(where)
    with pytest.warns(match="ssl_check_hostname"), open_backend(f"{where}&ssl_check_hostname=no") as backend:
        backend.enqueue(QUEUE, [new()])


def test_client_name_is_that_of_all_connections(guarded_server: RedisServer) -> None:
    with (
        open_backend(url(guarded_server.port, client_name="billing")) as backend,
        backend.consumer([QUEUE]) as consumer,
    ):
        thread = threading.Thread(target=consumer.reserve, args=(1, 5))
        thread.start()
        with guarded_server.client() as observer:
            until(lambda: any(client["cmd"] == "bzpopmin" for client in observer.client_list()), "it waits")
            backend.enqueue(QUEUE, [new()])
            named = [client["name"] for client in observer.client_list() if client["user"] == "ann"]
        thread.join()
    assert named == ["billing"] * len(named)
    assert len(named) >= 2
