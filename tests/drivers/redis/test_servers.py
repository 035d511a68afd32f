"""The helpers that start private servers: their errors if a server is missing or fails, and that no server is left
running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import servers
from servers import process
from servers.process import until
from servers.redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable

START_AND_DIE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from servers.redis import RedisServer
server = RedisServer().start()
print(server.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_missing_server_skips_with_a_hint_and_fails_under_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install redis-server"):
        process.require("redis-server")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install redis-server"):
        process.require("redis-server")


def test_server_that_does_not_start_shows_its_log() -> None:
    server = RedisServer(no_such_setting="1")
    with pytest.raises(AssertionError, match="no-such-setting"):
        server.start()
    server.close()
    assert not server.folder.exists()


def test_restarted_server_keeps_its_address_and_settings(
    new_redis: Callable[..., RedisServer],
) -> None:
    server = new_redis(appendonly="yes")
    server.ask("SET", "key", "value")
    for end in (server.stop, server.kill):
        end()
        assert not server.is_running
        server.start()
        assert server.ask("GET", "key") == b"value"


def test_server_ends_with_killed_tests() -> None:
    command = [sys.executable, "-c", START_AND_DIE, str(Path(servers.__file__).parent.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "it has ended")
