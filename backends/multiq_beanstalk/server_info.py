"""What a server and its jobs and tubes say of themselves, read from the few lines that are needed."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from .connection import ProtocolError


class ServerInfo(NamedTuple):
    """A server, as its ``stats`` tell."""

    max_body: int
    """Bytes. With a log two less than it takes: of a larger body it counts the line's end when it reads its log again,
    finds it too large, and stops reading there, so that all later jobs of the file are lost (seen with 1.12).
    """
    has_log: bool
    """Whether it was started with ``-b``."""


class JobStats(NamedTuple):
    """A job, as its ``stats-job`` tells, its id aside. Times are whole seconds, rounded down."""

    tube: bytes
    state: bytes
    priority: int
    age: int
    ttr: int
    time_left: int
    """Until a delayed job is due, or a reserved one's lease ends."""
    file: int
    """The file of the log that it is in; 0: in none."""
    reserves: int
    timeouts: int
    releases: int
    buries: int
    """One more for each restart of the server while it was buried."""
    server_kicks: int
    """Those of a delayed job included."""

    def is_unchanged_since(self, before: JobStats) -> bool:
        """Whether nothing but time has happened to it since."""
        return self[:3] == before[:3] and self[7:] == before[7:]

    @property
    def is_out_of_log(self) -> bool:
        """Whether the log, if there is one, does not know of it: it was buried with its put."""
        return self.state == b"buried" and self.file == 0

    @property
    def burials(self) -> int:
        """How often it was buried, as far as the two counts allow."""
        return min(self.buries, self.server_kicks + (self.state == b"buried"))

    @property
    def crashes(self) -> int:
        """Reservations that ended without a verdict, that of a job that is reserved not counted.

        A dropped connection is counted nowhere; it shows as the reservation that has no end.
        """
        if self.reserves <= 1 and self.state == b"reserved":  # as most are
            return 0
        return max(0, self.reserves - (self.state == b"reserved") - self.releases - self.burials)

    @property
    def kicks(self) -> int:
        """How often it came back from being buried."""
        if not self.buries:
            return 0
        return max(0, self.burials - (self.state == b"buried"))


class TubeStats(NamedTuple):
    """A tube, as its ``stats-tube`` tells."""

    ready: int
    delayed: int
    reserved: int
    buried: int
    pause: int
    """Seconds that it was paused for; 0: it is not paused."""
    pause_left: int

    @property
    def is_in_use(self) -> bool:
        """Whether it holds a job or is paused."""
        return bool(self.ready or self.delayed or self.reserved or self.buried or self.pause)


_LINE_END = 2  # bytes
_LONGEST_STATS = 65536  # bytes; a server's are about 1,500
_LONGEST_LIST = 32_000_000  # bytes: a million names, say
_STRANGE_JOB = "a job's stats are not as expected"

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
    """Read the body of the reply to ``stats``."""
    found = _SERVER.search(body[:_LONGEST_STATS])
    if found is None:
        raise ProtocolError("its stats lack max-job-size or binlog-current-index")
    has_log = int(found[2]) > 0
    return ServerInfo(int(found[1]) - (_LINE_END if has_log else 0), has_log)


def parse_job_stats(body: bytes) -> JobStats:
    """Read the body of the reply to ``stats-job``."""
    found = _JOB_ID.match(body)
    if found is None:
        raise ProtocolError(_STRANGE_JOB)
    return _job_stats(body[found.end() : _LONGEST_STATS])


@functools.lru_cache(maxsize=64)  # jobs that are taken together mostly differ in nothing but their ids
def _job_stats(body: bytes) -> JobStats:
    found = _JOB.match(body)
    if found is None:
        raise ProtocolError(_STRANGE_JOB)
    tube, state, *numbers = found.groups()
    return JobStats(tube, state, *map(int, numbers))


def parse_tube_stats(body: bytes) -> TubeStats:
    """Read the body of the reply to ``stats-tube``."""
    found = _TUBE.search(body[:_LONGEST_STATS])
    if found is None:
        raise ProtocolError("a tube's stats are not as expected")
    ready, reserved, delayed, buried, pause, left = map(int, found.groups())
    return TubeStats(ready, delayed, reserved, buried, pause, max(0, left))


def names(body: bytes) -> list[str]:
    """Read the body of the reply to ``list-tubes``."""
    if len(body) > _LONGEST_LIST:
        raise ProtocolError(f"a list of tubes of {len(body):,} bytes, more than {_LONGEST_LIST:,}")
    lines = body.decode("ascii", "replace").splitlines()
    return [line[2:].strip('"') for line in lines if line.startswith("- ")]
