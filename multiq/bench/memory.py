"""The memory backend's adapter for the bench. The figures show multiq's own costs, because the memory store itself
costs little."""

from __future__ import annotations

import platform
from contextlib import contextmanager
from typing import TYPE_CHECKING

from multiq.ids import new_id

from .adapter import Adapter, Bench, Durability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .adapter import Profile


class MemoryAdapter(Adapter):
    """This process's memory. No other process sees the jobs of the memory store."""

    def __init__(self, url: str) -> None:
        self.url = url

    def version(self) -> str:
        return f"Python {platform.python_version()}"

    def durability(self) -> Durability:
        return Durability("nothing", {})


class MemoryBench(Bench):
    """``memory://``. No server is started. In every profile, the jobs are lost when the process ends."""

    @classmethod
    @contextmanager
    def throwaway(cls, folder: Path, profile: Profile) -> Iterator[Adapter]:  # noqa: ARG003
        yield MemoryAdapter(f"memory://{new_id()}")

    @classmethod
    @contextmanager
    def at(cls, url: str) -> Iterator[Adapter]:
        yield MemoryAdapter(url)
