"""``multiq doctor`` checks whether the settings of a server, or file, are safe for jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.terminal_escapes import safe

from .connection import chosen_connection
from .exits import FAILED, OK
from .options import common_options
from .output import Column, note, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from multiq.app import App
    from multiq.backend import Finding

_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red", "unknown": "yellow"}


@click.command(short_help="Check whether a server is set up for jobs.")
@click.argument("target", required=False, metavar="[URL|NAME]")
@common_options
def doctor(target: str | None, as_json: bool) -> int:
    """Check whether the settings of a server, or file, are safe for jobs. Changes nothing.

    "bad": jobs will be lost or stuck. "warn": jobs work, but a setting has a weakness. "unknown": the check was not
    possible. Exits with 1 if anything is bad.
    """
    from multiq.app import App
    from multiq.settings.url import redact

    from .framework_app import current_settings

    with App(target or chosen_connection(), settings=current_settings(), create=False) as app:
        place = redact(app.url)
        findings = [*app.backend.doctor(), _schedules(app)]
    is_bad = any(finding.level == "bad" for finding in findings)
    if as_json:
        print_json({"connection": place, "fit": not is_bad, "findings": findings})
    else:
        show(_table(findings))
        note(f"{_verdict(findings)}: {safe(place)}")
    return FAILED if is_bad else OK


def _schedules(app: App) -> Finding:
    from multiq.backend import Finding
    from multiq.errors import MultiqError
    from multiq.schedules.managing import others_zones
    from multiq.schedules.zone_database import library_versions, zones_version

    versions = library_versions()
    try:
        others = sorted(others_zones(app.backend))
    except MultiqError:  # the backend has no schedules, or another finding says why the schedules cannot be read
        others = []
    if not others:
        return Finding("ok", "schedules", versions)
    return Finding(
        "warn",
        "schedules",
        f"workers on other hosts have the time zones {', '.join(others)}, and this host has {zones_version()}",
        "where two hosts disagree about a time, an occurrence may run twice: install the same version on all hosts",
    )


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
