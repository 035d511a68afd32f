"""The undocumented names of PyMySQL that the driver uses exist in the installed version, and do what the driver needs.

``multiq_mysql.pymysql_private`` lists them. test_hostile_server.py also tests the names of the login.
"""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pymysql
import pytest
from pymysql.constants import CLIENT
from servers.certificate import Certificate
from servers.mysql import MysqlServer

import multiq_mysql
from multiq.backend.registry import open_backend
from multiq.driverkit.timed_socket import TimedSocket, TimedTlsSocket
from multiq_mysql import pymysql_private
from multiq_mysql.opening import open_connection
from multiq_mysql.tls import GuardedConnection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq_mysql.backend import MysqlBackend

_PACKAGE = Path(str(multiq_mysql.__file__)).parent


@pytest.fixture
def opened(backend: MysqlBackend) -> Iterator[Any]:
    """A connection of PyMySQL's as the driver opens it."""
    connection = open_connection(backend.dsn, 30.0, autocommit=True, client_flag=CLIENT.MULTI_STATEMENTS)
    yield connection
    if connection.open:
        connection.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The packets that the driver sends to the server."""
    packets: list[bytes] = []
    original = TimedSocket.sendall

    def noted(self: TimedSocket, data: bytes) -> None:
        packets.append(bytes(data))
        original(self, data)

    monkeypatch.setattr(TimedSocket, "sendall", noted)
    return packets


def test_table_lists_every_private_name_that_the_driver_uses() -> None:
    used = set()
    for path in _PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.fullmatch("_[a-z].*", node.attr):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if owner in {"opened", "inside", "connection"}:
                    used.add(node.attr)
                else:  # others are the driver's own, or a named tuple's documented method
                    assert owner in {"self", "cls"} or node.attr == "_replace", (path.name, ast.unparse(node))
    theirs = pymysql.connections.Connection(defer_connect=True)
    used |= {
        name for name in vars(GuardedConnection) if hasattr(theirs, name) and not name.startswith("__")
    }  # overridden
    assert used >= {"_sock", "_rfile", "_result", "_force_close", "_secure", "_auth_plugin_name", "server_public_key"}
    listed = re.findall(r"\w+", " ".join(re.findall(r"^(``.*?)  ", str(pymysql_private.__doc__), re.MULTILINE)))
    assert used <= set(listed)
    assert all(hasattr(theirs, name) for name in used), "PyMySQL has not all of them"


def test_connection_speaks_over_the_socket_that_it_was_given(opened: Any) -> None:
    assert type(opened._sock) is TimedSocket
    assert pymysql_private.socket_of(opened) is opened._sock
    assert opened._rfile.raw._sock is opened._sock  # ``_rfile`` is the return value of socket.makefile


def test_result_has_rows_and_says_whether_more_follow(opened: Any) -> None:
    opened.query("SELECT 1, 'a' UNION SELECT 2, 'b'; SELECT 3")
    result = opened._result
    assert (result.rows, result.affected_rows, bool(result.has_next)) == (((1, "a"), (2, "b")), 2, True)
    opened.next_result()
    assert opened._result is not result
    assert (opened._result.rows, bool(opened._result.has_next)) == (((3,),), False)


def test_result_of_a_change_has_the_number_of_rows(opened: Any) -> None:
    opened.query("CREATE TABLE counted (n INT); INSERT INTO counted VALUES (1), (2); DELETE FROM counted WHERE n > 1")
    replies = [opened._result]
    while opened._result.has_next:
        opened.next_result()
        replies.append(opened._result)
    assert [(reply.rows, reply.affected_rows) for reply in replies] == [(None, 0), (None, 2), (None, 1)]


def test_forced_close_sends_nothing(opened: Any, sent: list[bytes]) -> None:
    sock = opened._sock
    pymysql_private.drop(opened)
    assert (sent, sock.fileno(), opened._sock, opened._rfile, opened.open) == ([], -1, None, None, False)


def test_documented_close_sends_a_packet(backend: MysqlBackend, sent: list[bytes]) -> None:
    """This is why the driver does not call ``close``: the server may hang, or the session may be a parent process's."""
    opened = open_connection(backend.dsn, 30.0)
    sent.clear()
    opened.close()
    assert [packet[4:] for packet in sent] == [b"\x01"]  # COM_QUIT


def test_socket_and_reader_are_all_that_has_to_be_left_to_a_parent(opened: Any, sent: list[bytes]) -> None:
    reader = opened._rfile
    pymysql_private.leave_to_parent(opened)
    assert (sent, opened.open, reader.closed) == ([], False, False)
    pymysql_private.drop(opened)  # like the garbage collector: ``drop`` finds nothing to close
    assert not reader.closed


def test_plugin_of_the_greeting_and_the_security_of_the_connection_are_assigned(opened: Any) -> None:
    assert opened._greeted_with  # ``_auth_plugin_name`` was
    assert opened._is_encrypted is (opened.unix_socket is not None)  # ``_secure``: by the driver itself, without TLS


def test_tls_is_begun_by_the_context_and_replaces_the_socket(tmp_path: Path) -> None:
    certificate = Certificate.make(tmp_path, "good")
    with (
        MysqlServer(certificate=certificate) as server,
        server.database(options=f"ssl_ca={certificate.authority}") as place,
        open_backend(place.url) as backend,
    ):
        opened: Any = open_connection(cast("MysqlBackend", backend).dsn, 30.0)
        with contextlib.closing(opened):
            assert type(opened._sock) is TimedTlsSocket
            assert opened._is_encrypted  # ``_secure`` is assigned when TLS has begun
            opened.query("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
            assert opened._result.rows[0][1]
