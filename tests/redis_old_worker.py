"""A worker of an older multiq. The folder ``scripts_before_extras`` has its scripts.

These scripts take the same keys and arguments as the present ones.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiq_redis import keys

if TYPE_CHECKING:
    from servers.redis import RedisServer

OLD_SCRIPTS = Path(__file__).parent / "drivers" / "redis" / "scripts_before_extras"


class OldWorker:
    """Runs the scripts of a worker that does not know memos, outcomes and held jobs."""

    def __init__(self, server: RedisServer, queue: str = "q") -> None:
        self._server = server
        self._queue = queue
        self._number = 10**11
        self._name = os.urandom(7).hex()

    def run(self, verb: str, *arguments: str | bytes | int) -> Any:
        text = (OLD_SCRIPTS / f"{verb}.lua").read_text()
        header = re.search(r"^-- KEYS  (.*?)^-- ARGV", text, re.MULTILINE | re.DOTALL)
        assert header is not None
        names = re.findall(r"\d+ ([a-z]+)", header[1])
        base = keys.base("multiq", self._queue)
        paths = [keys.call(base, self._name) if name == "call" else keys.BY_NAME[name](base) for name in names]
        self._number += 1
        return self._server.ask("EVAL", text, len(paths), *paths, self._number, *arguments)

    def reserve(self) -> tuple[bytes, bytes]:
        """Returns the packed id and the token."""
        token = os.urandom(12)
        reply = self.run("exchange", token, 1)
        return reply[5], token

    def settle(self, lease: tuple[bytes, bytes], details: bytes) -> None:
        assert self.run("exchange", b"", 0, lease[0], lease[1] + details)[3] == b"1"
