"""Backoff for nodes of a cluster that did not answer. Meanwhile, consumers use the queues on other nodes.

If another program has written data into the keys of a partition, this partition is excluded for a second. This also
happens outside a cluster.

====================  =========================================================================
what is excluded      a node that failed (or a partition whose node is not known)
for how long          a second; after every 16th failure in a row, the timeout of a call
the next attempt      may take a quarter of a second; every 16th may take the timeout of a call
the backoff ends      at the node's first answer, or when the partition is on another node, or
                      after this time if the consumer asks no partition there
====================  =========================================================================
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiq.driverkit.net import Address
    from multiq.errors import BackendError

    from .servers import Servers

_log = logging.getLogger("multiq.redis")

_BACKOFF = 1.0  # seconds after a failure in which the node gets no calls
_SHORT_TIMEOUT = 0.25  # seconds within which a node must answer after a failure
_FULL_TIMEOUT_EACH = 16  # failures


class _Failure:
    """The failures of a node that did not answer, or of a partition that cannot be read."""

    def __init__(self) -> None:
        self.partition = ""
        """The partition whose call failed last."""
        self.times = 0
        self.until = 0.0  # monotonic
        self.error: BackendError | None = None
        self.is_of_partition = False
        """Whether the cause of the failure is the partition's keys, and not the node."""


class NodeBackoff:
    """One consumer's list of partitions that cannot be read and, in a cluster, of nodes that failed."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.failures: dict[Address | str, _Failure] = {}

    def failed(self, partition: str, error: BackendError) -> None:
        """Record that a partition's node did not answer."""
        failure = self.failures.setdefault(self._node_of(partition), _Failure())
        failure.partition = partition
        failure.times += 1
        failure.error = error
        has_full_timeout = failure.times % _FULL_TIMEOUT_EACH == 0
        failure.until = time.monotonic() + (self._servers.timeout if has_full_timeout else _BACKOFF)

    def corrupt(self, partition: str, error: BackendError) -> None:
        """Record that a partition's keys have another program's data."""
        failure = self.failures.get(partition)
        if failure is None or not failure.is_of_partition:
            _log.error("partition %s is left out until its keys can be read: %s", partition, error)
            failure = self.failures[partition] = _Failure()
        failure.partition, failure.error, failure.is_of_partition = partition, error, True
        failure.until = time.monotonic() + _BACKOFF

    def answered(self, partition: str) -> None:
        """Record that a partition's node answered. Also forget the failures of nodes whose partitions have moved."""
        self.failures.pop(self._node_of(partition), None)
        self.failures.pop(partition, None)
        for node, failure in tuple(self.failures.items()):
            if not failure.is_of_partition and self._node_of(failure.partition) != node:
                del self.failures[node]

    def forget_others(self, partitions: Iterable[str]) -> None:
        """Forget the failures of nodes and partitions that were excluded, unless one of *partitions* is there.

        They may get no call again. So no answer would end their failures, and ``next_end`` would stay in the past.
        """
        kept = {place for partition in partitions for place in (partition, self._node_of(partition))}
        now = time.monotonic()
        for place, failure in tuple(self.failures.items()):
            if failure.until <= now and place not in kept:
                del self.failures[place]

    def error_of(self, partition: str) -> BackendError | None:
        """The error for which a partition is excluded now, or None."""
        for node in (self._node_of(partition), partition):
            failure = self.failures.get(node)
            if failure is not None and time.monotonic() < failure.until:
                return failure.error
        return None

    def excluded(self, partitions: Iterable[str]) -> frozenset[str]:
        """Returns those of *partitions* that must not get calls now."""
        return (
            frozenset(partition for partition in partitions if self.error_of(partition) is not None)
            if self.failures
            else frozenset()
        )

    def timeout_of(self, partition: str) -> float:
        """Seconds within which a partition's node must answer a call."""
        failure = self.failures.get(self._node_of(partition)) or self.failures.get(partition)
        if failure is None or failure.is_of_partition or failure.times % _FULL_TIMEOUT_EACH == _FULL_TIMEOUT_EACH - 1:
            return self._servers.timeout
        return min(_SHORT_TIMEOUT, self._servers.timeout)

    def next_end(self) -> float:
        """The time at which the first excluded partition may be asked again, by the monotonic clock."""
        return min((failure.until for failure in self.failures.values()), default=float("inf"))

    def _node_of(self, partition: str) -> Address | str:
        return self._servers.known(partition) or partition
