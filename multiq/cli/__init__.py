"""The command line, ``multiq``. Each command is in a module of the same name. A command's module is imported when the
command is called.
"""

from __future__ import annotations

import click

from multiq import __version__

from .group import LazyGroup
from .options import connection_option, traceback_option, verbose_option

#: The commands by section, in the order in which ``multiq --help`` lists them. A command's module has the command's
#: name.
SECTIONS = {
    "Run": ("worker", "enqueue", "scheduler", "tick", "outbox"),
    "Inspect": (
        "stats",
        "jobs",
        "peek",
        "result",
        "history",
        "flows",
        "schedules",
        "limits",
        "top",
        "health",
        "metrics",
    ),
    "Manage": ("failed", "kick", "cancel", "delete", "reschedule", "pause", "resume", "purge", "down", "up", "restart"),
    "Check": ("doctor", "schema", "backends", "conformance", "bench", "soak"),
}


@click.group(
    "multiq",
    cls=LazyGroup,
    package=__name__,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 usage error, 3 not found, 4 the job is being run, or belongs to a flow, "
    "5 the backend cannot do it, 6 a check failed (conformance, bench, soak), 7 unknown, 12 out of its memory limit "
    "(worker), 130 stopped.",
)
@click.version_option(__version__, prog_name="multiq")
@connection_option
@verbose_option
@traceback_option
def cli() -> None:
    """Job queues behind one API.

    Without -c, multiq uses the connection in MULTIQ_URL, multiq.toml or pyproject.toml. The default connection is
    sqlite:///multiq.db.
    """


def main() -> None:
    cli.main()
