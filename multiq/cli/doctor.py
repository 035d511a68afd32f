"""``multiq doctor`` checks whether the settings of a server, or file, are safe for jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.formatting import safe

from .exits import FAILED, OK
from .options import chosen_connection, common_options
from .output import Column, note, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from multiq.backend import Finding

_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red", "unknown": "yellow"}


@click.command(short_help="Check whether a server is set up for jobs.")
@click.argument("target", required=False, metavar="[URL|NAME]")
@common_options
def doctor(target: str | None, as_json: bool) -> int:
    """Check whether the settings of a server, or file, are safe for jobs. Changes nothing.

    "bad": jobs will be lost or stuck. "warn": it works, with a weakness. "unknown": the command could not find out.
    Exits with 1 if anything is bad.
    """
    from multiq.app import App
    from multiq.settings.url import redact

    with App(target or chosen_connection(), create=False) as app:
        place = redact(app.url)
        findings = app.backend.doctor()
    is_bad = any(finding.level == "bad" for finding in findings)
    if as_json:
        print_json({"connection": place, "fit": not is_bad, "findings": findings})
    else:
        show(_table(findings))
        note(f"{_verdict(findings)}: {safe(place)}")
    return FAILED if is_bad else OK


def _table(findings: Sequence[Finding]) -> Table:
    from rich.text import Text

    columns = [Column(""), Column("WHAT"), Column("FOUND", folds=True)]
    rows: list[list[str | Text]] = [
        [Text(finding.level, style=_STYLES[finding.level]), safe(finding.what), _words(finding)] for finding in findings
    ]
    return table(columns, rows)


def _words(finding: Finding) -> str:
    return safe(f"{finding.why}; {finding.advice}" if finding.advice else finding.why)


def _verdict(findings: Sequence[Finding]) -> str:
    levels = [finding.level for finding in findings]
    counts = [f"{levels.count(level)} {level}" for level in ("bad", "warn", "unknown") if level in levels]
    return ", ".join(counts) or "all is well"
