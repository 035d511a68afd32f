"""The settings and names that all processes of one soak share. An environment variable passes the settings on."""

from __future__ import annotations

import os

import msgspec

VARIABLE = "SOAK_LOAD"
"""The environment variable with the settings."""

TTR = 3.0  # seconds of a lease; the shortest safe time on a store that counts in whole seconds
TIMEOUT = 1.0  # seconds; the time limit of tasks that have a time limit
MAX_ATTEMPTS = 4
MAX_CRASHES = 50  # higher than the default, because a soak kills often
MARK = "soak#{}#"
"""A pattern that identifies a job's number in a store's raw data."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one soak."""

    folder: str
    """The folder of the history."""
    seed: int
    timeout: float
    """The time limit of a call in seconds, which is the URL's ``timeout``."""
    prefix: str = ""
    """The common prefix of the names of all queues."""
    pace: float = 0.02
    """The average time between two calls of a producer, in seconds."""
    late: float = 0.03
    """The share of batches (0 to 1) that a plain consumer holds until about the end of their leases."""
    oversleep: float = 1.3
    """The longest time that the consumer holds a late batch, in multiples of the ttr."""
    released: float = 0.04
    """The share of jobs (0 to 1) that a plain consumer releases instead of acking."""
    weights: dict[str, int] = {}
    """Weights of kinds of jobs. The weights replace the weights in ``tasks.KINDS``."""

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
        """The queue with a single consumer, so that the order of its jobs can be judged."""
        return f"{self.prefix}lane"

    @property
    def queues(self) -> tuple[str, str, str]:
        return self.tasks, self.raw, self.lane

    def environment(self) -> dict[str, str]:
        """The environment variables for the processes of the load."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def of_this_process() -> Load:
    """The settings that this process was started with."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Load)


def name_of(pid: int) -> str:
    """The name that the job process with this pid has in the history."""
    return f"job.{pid}"
