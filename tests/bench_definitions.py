"""The part of ``docs/bench.md`` that is made from the workloads; ``python tests/bench_definitions.py`` renews it."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from multiq.bench.figures import costs, speeds
from multiq.bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.bench.workloads import Variant, Workload

PAGE = Path(__file__).parents[1] / "docs" / "bench.md"
_WIDTH = 120  # columns
BEGIN, END = "<!-- made from the workloads -->\n", "<!-- end of what is made -->\n"


def definitions() -> str:
    """Each workload with its parameters and figures, as Markdown."""
    return "\n".join(line for workload in WORKLOADS for line in _definition(workload))


def written() -> str:
    """The definitions as they are in the page now."""
    return PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def _definition(workload: Workload) -> Iterator[str]:
    defined = workload.definition()
    figures = ", ".join(f"{metric.name} ({metric.unit})" for metric in speeds(defined))
    yield f"### {defined.title}: `{defined.name}`"
    yield ""
    yield fill(defined.about, _WIDTH)
    yield ""
    yield f"- figures: {figures}" + (", and costs" if costs(defined) else "")
    yield f"- in full: {_parameters(workload.variants(is_quick=False))}"
    yield f"- quick: {_parameters(workload.variants(is_quick=True))}"
    yield ""


def _parameters(variants: list[Variant]) -> str:
    return "; ".join(_variant(variant) for variant in variants)


def _variant(variant: Variant) -> str:
    words = ", ".join(f"{name} {value:,}" for name, value in variant.parameters.items())
    return f"*{variant.name}*: {words}" if variant.name else words


if __name__ == "__main__":
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{definitions()}\n{END}{rest.partition(END)[2]}", "utf-8")
