"""Servers that ask for the password in plain text do not get it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from servers.certificate import Certificate

from multiq.backend.registry import open_backend
from multiq.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CANARY = "S3CR3T-canary"
PROTOCOL_41 = 0x0200 | 0x8000 | 0x80000 | 0x8  # capability flags: plugins, secure connections, a database
TLS = 0x0800


def packet(number: int, payload: bytes) -> bytes:
    return struct.pack("<I", len(payload))[:3] + bytes([number]) + payload


def greeting(flags: int, plugin: bytes = b"mysql_native_password") -> bytes:
    return packet(
        0,
        b"\x0a8.0.40\0" + struct.pack("<I", 7) + b"12345678\0" + struct.pack("<H", flags & 0xFFFF) + b"\x2d\x02\0"
        + struct.pack("<H", flags >> 16) + b"\x15" + bytes(10) + b"123456789012\0" + plugin + b"\0",
    )  # fmt: skip


class Impostor:
    """Poses as a server that asks for another authentication plugin, and records what the client sends."""

    def __init__(self, plugin: bytes, flags: int = PROTOCOL_41) -> None:
        self.received = b""
        self._asks = packet(2, b"\xfe" + plugin + b"\0" + (b"\x04Password: " if plugin == b"dialog" else b""))
        self._flags = flags
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                connection.sendall(greeting(self._flags))
                self.received += connection.recv(65536)
                connection.sendall(self._asks)
                self.received += connection.recv(65536)


@pytest.fixture(params=[b"mysql_clear_password", b"dialog", b"mysql_old_password"], ids=bytes.decode)
def impostor(request: pytest.FixtureRequest) -> Iterator[Impostor]:
    with contextlib.closing(Impostor(request.param)) as impostor:
        yield impostor


def test_the_password_itself_is_not_sent_in_the_clear(impostor: Impostor) -> None:
    url = f"mysql://ann:{CANARY}@127.0.0.1:{impostor.port}/jobs?timeout=1"
    with open_backend(url) as backend, pytest.raises(BackendError) as caught:
        backend.stats("q")
    assert CANARY.encode() not in impostor.received
    assert impostor.received
    assert CANARY not in str(caught.value)
    assert "must be TLS with a checked certificate" in str(caught.value)


def test_with_tls_nothing_is_sent_to_a_server_that_offers_none(impostor: Impostor) -> None:
    url = f"mysql://ann:{CANARY}@127.0.0.1:{impostor.port}/jobs?timeout=1&tls=yes"
    with open_backend(url) as backend, pytest.raises(BackendError, match=r"SSL|TLS"):
        backend.stats("q")
    assert impostor.received == b""


@pytest.mark.one_row
@pytest.mark.parametrize("plugin", ["caching_sha2_password", "sha256_password"])
@pytest.mark.parametrize("known", [False, True])
def test_the_password_is_not_encrypted_with_a_strangers_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugin: str, *, known: bool
) -> None:
    """An attacker on the network sends its own public key, so that it could decrypt the password."""
    monkeypatch.setattr("multiq_mysql.tls._is_loopback", lambda _host: False)
    strangers, servers = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
    (tmp_path / "key.pem").write_bytes(_pem(servers))
    listener = socket.create_server(("127.0.0.1", 0))
    received: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(2)
            connection.sendall(greeting(PROTOCOL_41, plugin.encode()))
            data = connection.recv(65536)
            if plugin == "caching_sha2_password":
                connection.sendall(packet(data[3] + 1, b"\x01\x04"))  # demands a full authentication
                received.append(data := connection.recv(65536))
            if len(data) > 200:  # the client has encrypted the password with the server's known key
                return
            connection.sendall(packet(data[3] + 1, b"\x01" + _pem(strangers)))
            received.append(connection.recv(65536))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"mysql://ann:{CANARY}@127.0.0.1:{listener.getsockname()[1]}/jobs?timeout=1"
    url += f"&server_public_key={tmp_path / 'key.pem'}" if known and plugin == "caching_sha2_password" else ""
    with open_backend(url) as backend, pytest.raises(BackendError) as caught:
        backend.stats("q")
    thread.join(10)
    listener.close()
    secrets = [data[4:] for data in received if len(data) > 200]
    if "server_public_key=/" in url:
        (secret,) = secrets
        assert CANARY.encode() in _read(servers, secret)
    else:
        assert secrets == []
        assert "server_public_key" in str(caught.value)


def _pem(key: rsa.RSAPrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def _read(key: rsa.RSAPrivateKey, secret: bytes) -> bytes:
    sha1 = hashes.SHA1()  # noqa: S303 - as the protocol has it
    masked = key.decrypt(secret, padding.OAEP(mgf=padding.MGF1(sha1), algorithm=sha1, label=None))
    return bytes(byte ^ b"12345678123456789012"[at % 20] for at, byte in enumerate(masked))


@pytest.mark.one_row
@pytest.mark.filterwarnings("ignore:dangerously_skip_tls_verification")
@pytest.mark.parametrize("is_switched", [False, True])
@pytest.mark.parametrize("plugin", [b"caching_sha2_password", b"sha256_password"], ids=bytes.decode)
def test_the_password_is_not_sent_over_unchecked_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugin: bytes, *, is_switched: bool
) -> None:
    monkeypatch.setattr("multiq_mysql.tls._is_loopback", lambda _host: False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Certificate.make(tmp_path, "impostor").pair)
    listener = socket.create_server(("127.0.0.1", 0))
    received: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(2)
            connection.sendall(greeting(PROTOCOL_41 | TLS, b"mysql_native_password" if is_switched else plugin))
            connection.recv(36)  # the client's request for TLS
            with context.wrap_socket(connection, server_side=True) as secured:
                received.append(data := secured.recv(65536))
                if is_switched or plugin == b"sha256_password":
                    secured.sendall(packet(data[3] + 1, b"\xfe" + plugin + b"\x0012345678901234567890\0"))
                    received.append(data := secured.recv(65536))
                if plugin == b"caching_sha2_password":
                    secured.sendall(packet(data[3] + 1, b"\x01\x04"))  # demands a full authentication
                    received.append(data := secured.recv(65536))
                secured.sendall(packet(data[3] + 1, b"\x01" + _pem(rsa.generate_private_key(65537, 2048))))
                received.append(secured.recv(65536))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    options = "timeout=2&dangerously_skip_tls_verification=yes"
    url = f"mysql://ann:{CANARY}@127.0.0.1:{listener.getsockname()[1]}/jobs?{options}"
    with open_backend(url) as backend, pytest.raises(BackendError, match="server_public_key"):
        backend.stats("q")
    thread.join(10)
    listener.close()
    assert b"ann" in received[0]
    assert CANARY.encode() not in b"".join(received)
