"""Parses the replies to ``stats``, ``stats-job``, ``stats-tube`` and ``list-tubes``."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from .replies import ProtocolError


class ServerInfo(NamedTuple):
    """A server's limits and log, from ``stats``."""

    max_body: int
    """The largest body in bytes. If the server has a log, this is two bytes less than the server accepts.

    When the server reads its log again, the server counts the end of the line as part of the body. A body that is then
    too large makes the server stop reading. All later jobs of the file are lost (seen with 1.12).
    """
    has_log: bool
    """Whether the server was started with ``-b``."""


class JobStats(NamedTuple):
    """A job's stats, without its id. Times are whole seconds, rounded down."""

    tube: bytes
    state: bytes
    priority: int
    age: int
    ttr: int
    time_left: int
    """Seconds until a delayed job is due, or a reserved job's lease ends."""
    file: int
    """The number of the log file that has the job, or 0."""
    reserves: int
    timeouts: int
    releases: int
    buries: int
    """The number of times that the job was buried. If the job is buried when the server restarts, the restart adds one
    to this number."""
    server_kicks: int
    """The number of times that the job was kicked. Kicks of the delayed job are counted, too."""

    def is_unchanged_since(self, before: JobStats) -> bool:
        """Whether only times and the log file differ from the job's earlier stats *before*."""
        return self[:3] == before[:3] and self[7:] == before[7:]

    @property
    def is_out_of_log(self) -> bool:
        """Whether the job was buried by its put. Such a job is in no log file, even if the server has a log."""
        return self.state == b"buried" and self.file == 0

    @property
    def burials(self) -> int:
        """An estimate of the number of times that the job was buried. There are two numbers for this, and both may be
        too high. So the lower one is used."""
        return min(self.buries, self.server_kicks + (self.state == b"buried"))

    @property
    def crashes(self) -> int:
        """The number of earlier reservations that ended without a verdict.

        The server does not count such reservations. All other earlier reservations ended by a release or a burial.
        """
        if self.reserves <= 1 and self.state == b"reserved":  # the common case
            return 0
        return max(0, self.reserves - (self.state == b"reserved") - self.releases - self.burials)

    @property
    def kicks(self) -> int:
        """The number of times that the job was kicked while it was buried."""
        if not self.buries:
            return 0
        return max(0, self.burials - (self.state == b"buried"))


class TubeStats(NamedTuple):
    """A tube's stats."""

    ready: int
    delayed: int
    reserved: int
    buried: int
    pause: int
    """The seconds for which the tube was paused, or 0 if the tube is not paused."""
    pause_left: int

    @property
    def is_in_use(self) -> bool:
        """Whether the tube holds a job or is paused."""
        return bool(self.ready or self.delayed or self.reserved or self.buried or self.pause)


_LINE_END = 2  # bytes
_LONGEST_STATS = 65536  # bytes; a server's stats have about 1,500 bytes
_LONGEST_LIST = 32_000_000  # bytes: about a million names
_STRANGE_JOB = "a job's stats have an unexpected form"

NO_TUBE = TubeStats(0, 0, 0, 0, 0, 0)

_JOB = re.compile(
    rb"tube: \"?([^\n\"]+)\"?\nstate: (\w+)\npri: (\d{1,20})\nage: (\d{1,20})\ndelay: \d+\nttr: (\d{1,10})\n"
    rb"time-left: (-?\d{1,20})\nfile: (\d{1,20})\nreserves: (\d{1,20})\ntimeouts: (\d{1,20})\n"
    rb"releases: (\d{1,20})\nburies: (\d{1,20})\nkicks: (\d{1,20})\n"
)
_JOB_ID = re.compile(rb"---\nid: \d+\n")
_SERVER = re.compile(rb"\nmax-job-size: (\d{1,20})\n.*\nbinlog-current-index: (\d{1,20})\n", re.DOTALL)
_TUBE = re.compile(
    rb"\ncurrent-jobs-ready: (\d{1,20})\ncurrent-jobs-reserved: (\d{1,20})\ncurrent-jobs-delayed: (\d{1,20})\n"
    rb"current-jobs-buried: (\d{1,20})\n.*\npause: (\d{1,20})\npause-time-left: (-?\d{1,20})",
    re.DOTALL,
)


def parse_server_info(body: bytes) -> ServerInfo:
    """Parse the body of the reply to ``stats``."""
    found = _SERVER.search(body[:_LONGEST_STATS])
    if found is None:
        raise ProtocolError("its stats lack max-job-size or binlog-current-index")
    has_log = int(found[2]) > 0
    return ServerInfo(int(found[1]) - (_LINE_END if has_log else 0), has_log)


def parse_job_stats(body: bytes) -> JobStats:
    """Parse the body of the reply to ``stats-job``."""
    found = _JOB_ID.match(body)
    if found is None:
        raise ProtocolError(_STRANGE_JOB)
    return _job_stats(body[found.end() : _LONGEST_STATS])


@functools.lru_cache(maxsize=64)  # jobs of one batch mostly differ in their ids only
def _job_stats(body: bytes) -> JobStats:
    found = _JOB.match(body)
    if found is None:
        raise ProtocolError(_STRANGE_JOB)
    tube, state, *numbers = found.groups()
    return JobStats(tube, state, *map(int, numbers))


def parse_tube_stats(body: bytes) -> TubeStats:
    """Parse the body of the reply to ``stats-tube``."""
    found = _TUBE.search(body[:_LONGEST_STATS])
    if found is None:
        raise ProtocolError("a tube's stats have an unexpected form")
    ready, reserved, delayed, buried, pause, left = map(int, found.groups())
    return TubeStats(ready, delayed, reserved, buried, pause, max(0, left))


def names(body: bytes) -> list[str]:
    """Parse the body of the reply to ``list-tubes``."""
    if len(body) > _LONGEST_LIST:
        raise ProtocolError(f"the list of tubes must have at most {_LONGEST_LIST:,} bytes, got {len(body):,}")
    lines = body.decode("ascii", "replace").splitlines()
    return [line[2:].strip('"') for line in lines if line.startswith("- ")]
