"""What the processes of one soak share: its settings, passed in the environment, and the names that it uses."""

from __future__ import annotations

import os

import msgspec

VARIABLE = "SOAK_LOAD"
"""The environment variable that holds the settings for each process under test."""

TTR = 3.0  # seconds that a lease lasts: as short as is safe on a store that counts in whole seconds
TIMEOUT = 1.0  # seconds: the time limit of tasks that have one
MAX_ATTEMPTS = 4
MAX_CRASHES = 50  # more than usual, because a soak kills often
MARK = "soak#{}#"
"""The text by which a job with this number is found in a store's raw data."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one soak."""

    folder: str
    """Where the history is written."""
    seed: int
    timeout: float
    """Seconds that a call may take: the URL's ``timeout``."""
    prefix: str = ""
    """What the names of all queues begin with."""
    pace: float = 0.02
    """Seconds between two calls of a producer, on average."""
    late: float = 0.03
    """The share of batches, 0 to 1, that a plain consumer keeps until about the end of their leases."""
    oversleep: float = 1.3
    """How long the consumer keeps such a batch at most, in multiples of the ttr."""
    released: float = 0.04
    """The share of jobs, 0 to 1, that a plain consumer releases instead of acking."""
    weights: dict[str, int] = {}
    """How many of a hundred jobs are of a kind, where this differs from ``tasks.KINDS``."""

    @property
    def tasks(self) -> str:
        """The queue of the workers."""
        return f"{self.prefix}default"

    @property
    def raw(self) -> str:
        """The queue of the plain consumers."""
        return f"{self.prefix}raw"

    @property
    def lane(self) -> str:
        """The queue that has a single consumer, so that the order of its jobs can be judged."""
        return f"{self.prefix}lane"

    @property
    def queues(self) -> tuple[str, str, str]:
        return self.tasks, self.raw, self.lane

    def environment(self) -> dict[str, str]:
        """The environment variables for the processes under test."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def of_this_process() -> Load:
    """The settings that this process was started with."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Load)


def name_of(pid: int) -> str:
    """The name that the history uses for the job process with this pid."""
    return f"job.{pid}"
