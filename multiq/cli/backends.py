"""``multiq backends``: lists the installed backends and their capabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from multiq.backend.capabilities import DEFINITIONS, MEASURES, POWERS, Gap
from multiq.formatting import size
from multiq.terminal_escapes import safe

from .options import json_option, traceback_option
from .output import Column, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from multiq.backend.capabilities import Capabilities, Claim
    from multiq.settings.url import Option


_STORE = "+store"  # the end of the name of a backend that has a store beside it

# --- backends --------------------------------------------------------------------------------------------


class Installed(NamedTuple):
    """An installed driver. If the driver cannot be imported, ``declared`` is None, and ``error`` is the reason."""

    name: str
    declared: Capabilities | None
    options: Mapping[str, Option]
    error: str | None


@click.command(short_help="Show what is installed, and what it can do.")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--markdown", is_flag=True, help="Print the tables of docs/backends.md.")
@json_option
@traceback_option
def backends(names: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """Show the installed backends, and what each backend can do. With NAMES, show only the named backends, and the
    options of their URLs.

    A missing capability has one of three reasons. "not done": multiq has not built the capability yet. "cannot today":
    no released version of the store has the capability. "never": the capability contradicts how the store works.
    """
    from multiq.backend.registry import installed

    if markdown and as_json:
        raise click.UsageError("--markdown or --json: choose one")
    found = [_load(name) for name in names or _all_names(installed())]
    if as_json:
        print_json({"backends": [_document(backend) for backend in found]})
    elif markdown:
        click.echo(backends_markdown(found))
    else:
        _show_backends(found, with_options=bool(names))


def backends_markdown(found: Sequence[Installed]) -> str:
    """Make the generated part of ``docs/backends.md``."""
    usable = [(backend, backend.declared) for backend in found if backend.declared is not None]
    rows = [["capability", *(f"`{backend.name}`" for backend, _ in usable)]]
    rows += [[f"`{name}`", *(_measure(name, declared) for _, declared in usable)] for name in MEASURES]
    rows += [[f"`{name}`", *(_word(declared.claim(name)) for _, declared in usable)] for name in POWERS]
    parts = [_markdown_table(rows), "What each one means:\n"]
    parts.append("\n".join(f"- `{name}`: {meaning}." for name, meaning in DEFINITIONS.items()) + "\n")
    for backend, declared in usable:
        parts.append(f"### {backend.name}\n")
        gaps = [f"- `{name}`, {gap.kind}: {gap.reason}." for name, gap in declared.gaps()]
        parts.append("\n".join(gaps) + "\n" if gaps else "It has every power.\n")
        options = [["option", "default", "meaning"]]
        options += [[f"`{name}`", f"`{_default(option)}`", option.meaning] for name, option in backend.options.items()]
        parts.append(_markdown_table(options) if len(options) > 1 else "Its URLs take no options.\n")
    return "\n".join(parts).rstrip("\n")


def _all_names(installed: Sequence[str]) -> list[str]:
    """Return the names of all drivers. A driver that can have a store beside it is listed twice: with a store and
    without a store."""
    from multiq.backend.paired.needs import can_have_store

    names = []
    for name in installed:
        names.append(name)
        declared = _load(name).declared
        if declared is not None and can_have_store(declared):
            names.append(name + _STORE)
    return names


def _load(name: str) -> Installed:
    from multiq.backend.registry import installed, load_driver
    from multiq.errors import MultiqError

    if name.endswith(_STORE):
        return _load_with_store(name)
    try:
        driver = load_driver(name)
    except MultiqError as exc:
        if name not in installed():
            raise
        return Installed(name, None, {}, str(exc))
    return Installed(name, driver.declared, driver.options, None)


def _load_with_store(name: str) -> Installed:
    """Return what a driver can do with an SQLite store beside it."""
    from multiq.backend.paired.backend import paired_capabilities
    from multiq.backend.paired.needs import can_have_store
    from multiq.backend.registry import load_driver
    from multiq.errors import OptionInvalid
    from multiq.settings.url import Option

    driver = load_driver(name.removesuffix(_STORE))
    if not can_have_store(driver.declared):
        raise OptionInvalid(f"the {driver.declared.backend} backend keeps outcomes and flows itself: it takes no store")
    declared = paired_capabilities(driver.declared, load_driver("sqlite").declared)
    option = Option(str, None, "the URL of the store, percent-encoded, or the name of a configured connection")
    return Installed(name, declared, {**driver.options, "store": option}, None)


def _document(backend: Installed) -> dict[str, Any]:
    declared = backend.declared
    return {
        "name": backend.name,
        "error": backend.error,
        "measures": None if declared is None else {name: getattr(declared, name) for name in MEASURES},
        "powers": None if declared is None else {name: _claim_document(declared.claim(name)) for name in POWERS},
        "limits_kept_by": None if declared is None else declared.limits_kept_by,
        "options": {
            name: {"default": option.default, "meaning": option.meaning} for name, option in backend.options.items()
        },
    }


def _claim_document(claim: Claim) -> dict[str, Any]:
    if isinstance(claim, Gap):
        return {"has": False, "gap": claim.kind, "reason": claim.reason}
    return {"has": True, "gap": None, "reason": None}


def _show_backends(found: Sequence[Installed], *, with_options: bool) -> None:
    usable = [(backend, backend.declared) for backend in found if backend.declared is not None]
    if usable:
        show(_capability_table(usable))
    notes = [
        (f"{backend.name}: {power}", f"{gap.kind}: {gap.reason}")
        for backend, declared in usable
        for power, gap in declared.gaps()
    ]
    notes += [(backend.name, f"cannot be used: {backend.error}") for backend in found if backend.error is not None]
    if notes:
        show("", _notes_table(notes))
    for backend, _ in usable if with_options else []:
        show("", _options_table(backend))


def _capability_table(usable: Sequence[tuple[Installed, Capabilities]]) -> Table:
    from rich.text import Text

    rows: list[list[str | Text]] = [[name, *(_measure(name, declared) for _, declared in usable)] for name in MEASURES]
    for name in POWERS:
        cells = [Text("yes") if declared.claim(name) else Text("no", style="yellow") for _, declared in usable]
        rows.append([name, *cells])
    return table([Column("CAPABILITY"), *(Column(safe(backend.name)) for backend, _ in usable)], rows)


def _notes_table(notes: Sequence[tuple[str, str]]) -> Table:
    rows = [[safe(left), safe(right)] for left, right in notes]
    return table([Column("GAP"), Column("WHY", folds=True)], rows)


def _options_table(backend: Installed) -> Table:
    columns = [Column(f"{safe(backend.name)}://...?OPTION"), Column("DEFAULT"), Column("MEANING", folds=True)]
    rows = [[name, _default(option), option.meaning] for name, option in backend.options.items()]
    return table(columns, rows or [["(takes none)", "", ""]])


def _measure(name: str, declared: Capabilities) -> str:
    value = getattr(declared, name)
    if name == "poll_interval" and declared.waits_in_server:
        return "none"
    if name == "max_body":
        return "memory" if value is None else size(value)
    if name == "longest_delay" and value is None:
        return "a century"
    return f"{value:g} s" if value >= 0.001 else f"{value * 1e6:g} us"


def _word(claim: Claim) -> str:
    return claim.kind if isinstance(claim, Gap) else "yes"


def _default(option: Option) -> str:
    return "-" if option.default is None else str(option.default)


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
