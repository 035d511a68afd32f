"""The group of all commands. The group imports a command's module when the command is called, and turns errors into
exit codes.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from .exits import OK, report
from .output import take_standard_streams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_FIND = "multiq failed list lists the jobs that failed for good, multiq jobs QUEUE buried those of one queue"
_KICK = "multiq failed retry makes failed jobs ready again, multiq failed retry ID one of them"
_LIST = "multiq stats lists the queues, multiq jobs QUEUE the jobs of one"
_ADD = "multiq enqueue APP TASK --args JSON adds a job"
_WHEN = (
    "multiq enqueue ... --delay 5m (or --at TIME) adds a job for later, multiq reschedule ID --delay 5m changes when a "
    "job is due"
)
_RUN = "multiq worker APP runs the jobs of an app"
_STOP = (
    "Ctrl-C or SIGTERM ends a worker; multiq down has all workers take no more jobs, multiq pause QUEUE those of one"
)

#: The names of other tools' commands. Each name has a hint, which names multiq's command for the same purpose.
_HINTS = {
    **dict.fromkeys(("failures", "dead", "buried", "errors", "failed-jobs"), _FIND),
    **dict.fromkeys(("retry", "requeue", "retry-failed"), _KICK),
    **dict.fromkeys(("list", "ls", "queues", "status", "info", "count"), _LIST),
    **dict.fromkeys(("add", "put", "push", "send", "call"), _ADD),
    **dict.fromkeys(("delay", "at", "later"), _WHEN),
    **dict.fromkeys(
        ("schedule", "cron", "beat", "periodic"),
        "multiq schedules lists and makes schedules, which every worker runs; multiq enqueue ... --delay 5m adds one "
        "job for later",
    ),
    **dict.fromkeys(("run", "start", "work", "consume"), _RUN),
    **dict.fromkeys(("stop", "quit", "shutdown"), _STOP),
    **dict.fromkeys(("workers", "ps", "monitor", "watch"), "multiq top shows the workers, and what each one runs"),
    **dict.fromkeys(("clear", "flush", "empty"), "multiq purge QUEUE deletes a queue's jobs"),
    **dict.fromkeys(("cancel", "remove", "rm"), "multiq delete ID deletes a job that is not running"),
    **dict.fromkeys(("show", "inspect", "get"), "multiq peek ID shows a job"),
    **dict.fromkeys(("forget", "discard"), "multiq failed forget ID deletes a failed job"),
    **dict.fromkeys(("prune", "cleanup"), "multiq failed prune --older 30d deletes what failed long ago"),
    **dict.fromkeys(("migrate", "init"), "multiq schema up makes what a MySQL database needs; others need nothing"),
}


class LazyGroup(click.Group):
    """A group whose commands are listed by section. The command ``kick`` is the function ``kick`` of the module
    ``kick`` in *package*.
    """

    def __init__(self, *args: Any, package: str, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._sections = sections
        self._names = [name for section in sections.values() for name in section]

    def main(  # type: ignore[override]  # click's method main may return, and this method never returns
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run a command, and exit with the command's code. An error is printed as one message."""
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        extra["standalone_mode"] = False
        take_standard_streams()
        try:
            code = super().main(arguments, prog_name or "multiq", **extra)
        except Exception as exc:  # noqa: BLE001 - every error becomes a message and a code
            code = report(exc, arguments)
        sys.exit(code if isinstance(code, int) else OK)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self._names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self._names:
            return None
        module = importlib.import_module(f"{self._package}.{cmd_name}")
        return cast("click.Command", getattr(module, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._names and not name.startswith("-"):
            close = difflib.get_close_matches(name, self._names, n=1)
            hint = f": {_HINTS[name]}" if name in _HINTS else f"; did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"there is no command {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        room = formatter.width - 6 - max(map(len, self._names))
        for title, section in self._sections.items():
            commands = [(name, self.get_command(ctx, name)) for name in section]
            rows = [(f"{name:<11}", command.get_short_help_str(room)) for name, command in commands if command]
            with formatter.section(title):
                formatter.write_dl(rows)
