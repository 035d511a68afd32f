"""Configuration files that another user has put into a folder: multiq does not use them."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.errors import SettingsInvalid
from multiq.settings.loader import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shell import Shell

CANARY = "S3CR3T-canary"
STRANGER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


class Listener:
    """Another user's server. The server records what it receives, and sends nothing."""

    def __init__(self) -> None:
        self.received = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.received += connection.recv(65536)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def leave(folder: Path, text: str, *, name: str = "multiq.toml", owner: int = STRANGER, mode: int = 0o644) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


def refusal(folder: Path) -> str:
    with pytest.raises(SettingsInvalid) as caught:
        load_settings(folder, {})
    (problem,) = caught.value.problems
    return problem


@needs_root
@pytest.mark.parametrize("name", ["multiq.toml", "pyproject.toml"])
def test_a_strangers_file_sends_no_secret_to_its_server(shell: Shell, listener: Listener, name: str) -> None:
    table = "[tool.multiq]\n" if name == "pyproject.toml" else ""
    path = leave(
        shell.folder, f'{table}url = "redis://:${{AWS_SECRET}}@127.0.0.1:{listener.port}?timeout=1"', name=name
    )
    done = shell.run("stats", MULTIQ_URL="", AWS_SECRET=CANARY)
    assert done.code == 2
    assert str(path) in done.err
    assert f"user {STRANGER}" in done.err
    assert CANARY.encode() not in listener.received
    assert listener.received == b""


@needs_root
def test_the_same_file_is_used_when_it_is_named(shell: Shell) -> None:
    path = leave(shell.folder, 'url = "memory://named"')
    done = shell.run("stats", "-v", MULTIQ_URL="", MULTIQ_CONFIG=str(path))
    assert done.code == 0
    assert str(path) in done.err


@needs_root
def test_a_file_in_a_folder_above_is_held_to_the_same_rule(tmp_path: Path) -> None:
    path = leave(tmp_path, 'url = "memory://"')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert str(path) in refusal(inner)


@needs_root
def test_a_strangers_link_to_a_file_of_ones_own_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "other.toml"
    target.write_text('url = "memory://"')
    link = tmp_path / "folder" / "multiq.toml"
    link.parent.mkdir()
    link.symlink_to(target)
    assert load_settings(link.parent, {}).url == "memory://"
    os.lchown(link, STRANGER, STRANGER)
    assert str(link) in refusal(link.parent)


@needs_root
def test_another_user_may_use_a_file_of_roots() -> None:
    with tempfile.TemporaryDirectory() as name:  # the folders of pytest are closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        leave(folder, 'url = "memory://"', owner=0)
        os.seteuid(STRANGER)
        try:
            settings = load_settings(folder, {})
        finally:
            os.seteuid(0)
    assert settings.url == "memory://"


def test_a_world_writable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "multiq.toml"
    path.write_text('url = "memory://"')
    path.chmod(0o646)
    problem = refusal(tmp_path)
    assert str(path) in problem
    assert "0646" in problem
    assert "chmod go-w" in problem
    path.chmod(0o644)
    assert load_settings(tmp_path, {}).url == "memory://"


@needs_root
def test_a_file_that_a_shared_group_may_write_is_refused_and_one_of_a_private_group_is_not(tmp_path: Path) -> None:
    path = tmp_path / "multiq.toml"
    path.write_text('url = "memory://"')
    path.chmod(0o664)
    assert load_settings(tmp_path, {}).url == "memory://"  # group root has no other members
    os.chown(path, 0, STRANGER)
    assert "0664" in refusal(tmp_path)


@needs_root
def test_a_strangers_pyproject_without_our_table_is_passed_over(tmp_path: Path) -> None:
    leave(tmp_path, '[project]\nname = "multiq-shop"', name="pyproject.toml")
    inner = tmp_path / "a"
    inner.mkdir()
    assert load_settings(inner, {}).url == "sqlite:///multiq.db"


@pytest.mark.parametrize("name", ["multiq.toml", "pyproject.toml"])
def test_a_named_pipe_as_configuration_file_blocks_no_command(shell: Shell, name: str) -> None:
    os.mkfifo(shell.folder / name)
    assert shell.run("stats", MULTIQ_URL="memory://").code == 0


@pytest.mark.long
def test_v_names_the_file_that_was_used(shell: Shell) -> None:
    assert "no configuration file" in shell.run("stats", "-v", MULTIQ_URL="memory://").err
    path = shell.folder / "multiq.toml"
    path.write_text('url = "memory://"')
    for arguments in (("-v", "stats"), ("stats", "-v"), ("stats", "--verbose")):
        told = shell.run(*arguments, MULTIQ_URL="")
        assert (told.code, str(path) in told.err) == (0, True)
    assert "MULTIQ_URL" in shell.run("-v", "stats", MULTIQ_URL="memory://").err
    assert shell.run("stats", MULTIQ_URL="").err == ""


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"waits_for": 3}', b'{"a":' * 5000, b"\xff", b"9" * 5000, b"", b"x" * 2_000_000]
)
def test_health_reads_whatever_a_file_holds(shell: Shell, content: bytes) -> None:
    path = shell.folder / "health.json"
    path.write_bytes(content)
    os.utime(path, (1, 1))
    done = shell("health", str(path))
    assert done.code == 1
    assert "should not happen" not in done.err


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"3", b'{"worker": "a"}'])
def test_a_fresh_file_that_no_worker_has_written_is_no_healthy_worker(shell: Shell, content: bytes) -> None:
    (shell.folder / "health.json").write_bytes(content)
    done = shell("health", "health.json")
    assert (done.code, done.out) == (1, "no worker writes health.json\n")


def test_health_waits_for_no_pipe(shell: Shell) -> None:
    os.mkfifo(shell.folder / "health.json")
    assert shell.run("health", "health.json").code == 1


def test_a_link_to_no_file_is_not_followed(shell: Shell) -> None:
    target = shell.folder / "somewhere.db"
    (shell.folder / "link.db").symlink_to(target)
    done = shell("enqueue", "--queue", "q", "--body", "1", MULTIQ_URL=f"sqlite:///{shell.folder}/link.db")
    assert (done.code, str(target) in done.err, target.exists()) == (2, True, False)
    target.touch(0o600)
    assert shell("enqueue", "--queue", "q", "--body", "1", MULTIQ_URL=f"sqlite:///{shell.folder}/link.db").code == 0


def test_health_does_not_wait_for_a_process_that_holds_a_pipe_open(shell: Shell) -> None:
    os.mkfifo(shell.folder / "health")
    pipe = os.open(shell.folder / "health", os.O_RDWR)
    try:
        assert shell.run("health", "--json", "health").json["report"] is None
    finally:
        os.close(pipe)


@pytest.mark.parametrize("content", [b'{"worker": "\\ud800"}', b'{"\\ud800": 1}'])
def test_health_as_json_of_what_json_cannot_say(shell: Shell, content: bytes) -> None:
    (shell.folder / "health").write_bytes(content)
    assert shell.run("health", "--json", "health").json["report"] is None


@needs_root
def test_a_strangers_pyproject_is_not_parsed(tmp_path: Path) -> None:
    slow = ".".join(["a"] * 20_000)  # minutes of tomllib
    leave(tmp_path, f"[project]\nname = 'multiq'\n{slow} = 1\n", name="pyproject.toml")
    load_settings(tmp_path, {})
    leave(tmp_path, f"[ tool.'multiq' ]\nurl = 'sqlite:///x.db'\n{slow} = 1\n", name="pyproject.toml")
    with pytest.raises(SettingsInvalid, match="is not used"):
        load_settings(tmp_path, {})
