"""A call whose reply comes a byte at a time ends at its deadline, like a call without a reply."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from attacker import Attacker
from servers.certificate import Certificate
from servers.mysql import MysqlServer

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendTimeout

if TYPE_CHECKING:
    from pathlib import Path

    from servers.mysql import MysqlDatabases, Place

_TIMEOUT = 0.7
_FAR_LATER = 5.0  # seconds: a reply of a hundred bytes takes 10 at this pace
_PACE = 0.1


def _lasts(url: str, attacker: Attacker) -> None:
    """A call on an open connection and a call that opens one both time out. Then the server replies fast again."""
    with open_backend(f"{url}timeout={_TIMEOUT}") as backend:
        backend.enqueue("q", [NewJob(b"x" * 500, "one")])
        attacker.dribble(_PACE)
        for _ in range(2):  # the second call must log in
            start = time.monotonic()
            with pytest.raises(BackendTimeout):
                backend.peek("q", "one")
            assert time.monotonic() - start < _FAR_LATER
        attacker.relent()
        assert backend.peek("q", "one").body == b"x" * 500


def test_over_tcp(mysql_server: MysqlDatabases, place: Place) -> None:
    with open_backend(place.url) as backend:
        backend.stats("q")
    with Attacker((mysql_server.host, mysql_server.port)) as attacker:
        _lasts(mysql_server.url(place.name, port=attacker.port) + "?", attacker)


def test_over_a_unix_socket(mysql_server: MysqlDatabases, place: Place, tmp_path: Path) -> None:
    if mysql_server.socket is None:
        pytest.skip("the server has no UNIX socket here")
    with open_backend(place.url) as backend:
        backend.stats("q")
    with Attacker(str(mysql_server.socket), path=tmp_path / "s") as attacker:
        _lasts(f"mysql://{mysql_server.user}@/{place.name}?unix_socket={tmp_path / 's'}&", attacker)


def test_over_tls(tmp_path: Path) -> None:
    certificate = Certificate.make(tmp_path, "good")
    with (
        MysqlServer(certificate=certificate) as server,
        server.database() as place,
        Attacker((server.host, server.port)) as attacker,
    ):
        with open_backend(place.url) as backend:
            backend.stats("q")
        _lasts(server.url(place.name, f"ssl_ca={certificate.authority}", port=attacker.port) + "&", attacker)


@pytest.mark.one_row
@pytest.mark.parametrize("since", [0, 1, 2, 4])
def test_the_doctor_and_the_schema_end_as_well(mysql_server: MysqlDatabases, place: Place, since: int) -> None:
    with open_backend(place.url) as backend:
        backend.stats("q")
    with Attacker((mysql_server.host, mysql_server.port)) as attacker:
        url = mysql_server.url(place.name, f"timeout={_TIMEOUT}", port=attacker.port)
        with open_backend(url) as backend:
            for call in (backend.doctor, backend.schema().check):
                attacker.dribble(_PACE, since=since)
                start = time.monotonic()
                with pytest.raises(BackendTimeout):
                    call()
                assert time.monotonic() - start < _FAR_LATER
