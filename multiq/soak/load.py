"""What the processes of one soak share: its settings, which they get by the environment, and what its names are."""

from __future__ import annotations

import os

import msgspec

VARIABLE = "SOAK_LOAD"
"""Of the environment: the settings of a process that is under test."""

TTR = 3.0  # seconds that a lease lasts: as short as the slowest store's whole seconds allow with room
TIMEOUT = 1.0  # seconds, of tasks that have one
MAX_ATTEMPTS = 4
MAX_CRASHES = 50  # a soak kills more often than life does
MARK = "soak#{}#"
"""What is found in a store's raw data of a job with this number."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one soak."""

    folder: str
    """Where the history is written."""
    seed: int
    timeout: float
    """Seconds that a call may take, as the URL says."""
    prefix: str = ""
    """Of the names of all queues."""
    pace: float = 0.02
    """Seconds between two calls of a producer, on average."""
    late: float = 0.03
    """How often a plain consumer keeps jobs until about the end of their leases, of one."""
    oversleep: float = 1.3
    """For how long at most, in leases."""
    released: float = 0.04
    """How often it releases a job instead of acking it, of one."""
    weights: dict[str, int] = {}
    """How many of a hundred jobs are of a kind, where that is not as ``tasks.KINDS`` says."""

    @property
    def tasks(self) -> str:
        """The queue of the workers."""
        return f"{self.prefix}default"

    @property
    def raw(self) -> str:
        """The queue of plain consumers."""
        return f"{self.prefix}raw"

    @property
    def lane(self) -> str:
        """The queue that has a single consumer, so that the order of its jobs can be judged."""
        return f"{self.prefix}lane"

    @property
    def queues(self) -> tuple[str, str, str]:
        return self.tasks, self.raw, self.lane

    def environment(self) -> dict[str, str]:
        """For the processes that are under test."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def of_this_process() -> Load:
    """The settings that this process was started with."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Load)


def name_of(pid: int) -> str:
    """How the process of jobs with this pid is called in the history."""
    return f"job.{pid}"
