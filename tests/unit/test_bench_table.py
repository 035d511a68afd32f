"""The tables of a run, and of two compared runs, on a terminal."""

from __future__ import annotations

import msgspec
import pytest
from bench_reports import TARGETS, Target, report
from rich.console import Console, RenderableType

from multiq.bench.compare import compare
from multiq.bench.figures import number
from multiq.bench.report import Metric, Report, Violation
from multiq.bench.table import render, render_comparison

replaced = msgspec.structs.replace


def lines(renderable: RenderableType, width: int = 100) -> list[str]:
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def line(found: list[str], beginning: str) -> str:
    return next(text for text in found if text.startswith(beginning))


def renamed(name: str) -> list[Target]:
    return [Target(replaced(TARGETS[0].target, name=name), 1.0), *TARGETS[1:]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0041, "0.00410"),
        (0.93, "0.930"),
        (9.999, "10.00"),
        (31.46, "31.5"),
        (999.4, "999"),
        (41003.4, "41,003"),
    ],
)
def test_a_number_has_about_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("width", [24, 46, 80, 100, 4096])
def test_a_run_fits_any_width_and_loses_no_figure(width: int) -> None:
    found = lines(render(report()), width)
    assert max(map(len, found)) <= width
    everything = "".join(found).replace(" ", "")
    for target in ("redis", "beanstalk", "mysql", "sqlite"):
        assert everything.count(target) >= 9


def test_a_row_has_each_targets_median_spread_and_share_of_the_baseline() -> None:
    a_run = report(targets=TARGETS[:1], repeats=3)
    drain = next(result for result in a_run.results if result.workload == "drain")
    samples = [
        replaced(sample, metrics={**sample.metrics, "drained": figure})
        for sample, figure in zip(drain.samples, (900.0, 1000.0, 1250.0), strict=True)
    ]
    alone = replaced(a_run, results=[replaced(drain, samples=samples, baseline=4000.0)])
    found = lines(render(alone))
    assert line(found, "drained, jobs/s").split()[2:] == ["1,000", "±25%"]
    assert line(found, "of the baseline").split() == ["of", "the", "baseline", "25%"]


def test_a_figure_that_a_server_does_not_report_is_not_shown_as_zero() -> None:
    assert line(lines(render(report())), "commands/job").split()[-1] == "-"


def test_targets_are_listed_with_what_they_survive() -> None:
    found = lines(render(report()))
    assert line(found, "sqlite").split() == ["sqlite", "SQLite", "3.40.1", "server", "crash", "(synchronous", "NORMAL)"]
    assert "yours" not in "".join(found)
    theirs = [replaced(target, is_ours=False) for target in report().targets]
    assert "redis 7.0.15, yours" in "".join(lines(render(replaced(report(), targets=theirs))))


def test_a_skipped_workload_says_why() -> None:
    assert line(lines(render(report()), 200), "not on beanstalk, body 60 KB").endswith("raise the server's -z")


def test_a_green_run_says_what_was_looked_for() -> None:
    assert lines(render(report()))[-1] == "6,300,000 jobs, each accounted for; none lost, doubled, early"


def test_each_broken_promise_has_a_line_of_its_own() -> None:
    violations = {
        ("drain", "mysql"): Violation("lost", 3, "job 17 never ran"),
        ("bulk", "redis"): Violation("doubled", 1, "job 4 ran twice"),
    }
    found = lines(render(report(violations=violations)))
    assert "lost: 3 on mysql in drain: job 17 never ran" in found
    assert "doubled: 1 on redis in bulk: job 4 ran twice" in found
    assert found[-1] == "2 broken promises among 6,300,000 jobs"


def test_a_noisy_machine_is_reported() -> None:
    noisy = report(noise=3)
    assert f"take the figures with care: {noisy.noise}" in lines(render(noisy))
    assert not [text for text in lines(render(report())) if "care" in text]


@pytest.mark.long
def test_no_terminal_code_comes_through() -> None:
    evil = report(targets=renamed("re\x1b[31mdis\u202e"))
    for renderable in (render(evil), render_comparison(compare(evil, evil))):
        text = "".join(lines(renderable))
        assert text.isprintable()
    assert r"re\x1b[31mdis\u202e" in "".join(lines(render(evil), 200))


def test_a_run_without_results_is_still_shown() -> None:
    empty = replaced(report(), results=[])
    assert lines(render(empty))[-1] == "0 jobs, each accounted for"


def test_markup_in_a_name_is_text() -> None:
    assert "[bold]x" in "".join(lines(render(report(targets=renamed("[bold]x")))))


# --- two runs --------------------------------------------------------------------------------------------


def compared(new: Report, width: int = 100) -> list[str]:
    return lines(render_comparison(compare(report(seed=1), new)), width)


@pytest.mark.long
def test_worse_figures_come_first_and_the_verdict_last() -> None:
    found = compared(report(seed=2, factors={("settle", "settle"): 1.3, ("bulk", "enqueued"): 1.7}), 120)
    rows = [text for text in found if text.endswith(("worse", "better"))]
    assert [text.split()[-1] for text in rows] == ["worse"] * 4 + ["better"] * 4
    assert found[-1].startswith("regression: of 267 figures 4 worse by more than 10%, 4 better")


@pytest.mark.long
def test_no_difference_is_one_sentence() -> None:
    old = report(seed=1, targets=TARGETS[:1])
    settle = replaced(old, results=[result for result in old.results if result.workload == "settle"])
    found = lines(render_comparison(compare(settle, settle, threshold=1.0)), 120)
    assert len(found) == 3
    assert found[-1].startswith("no difference: of 2 figures none is worse by more than 100%")


@pytest.mark.long
def test_figures_that_may_be_worse_are_shown_and_the_rest_counted() -> None:
    found = compared(report(seed=2, repeats=2, factors={("drain", "drained"): 0.25}), 120)
    unsure = [text for text in found if text.endswith("cannot tell")]
    assert len(unsure) == 10
    assert any(text.startswith("redis drain: drained, jobs/s") for text in unsure)
    assert any(text.startswith("and ") and text.endswith("more that may be worse, or not") for text in found)
    assert found[-1].startswith("cannot tell for ")


@pytest.mark.long
@pytest.mark.parametrize("width", [40, 80])
def test_a_comparison_fits_too(width: int) -> None:
    found = compared(report(seed=2, factors={("settle", "settle"): 1.3}), width)
    assert max(map(len, found)) <= width


def test_a_headline_that_is_a_time_per_job_is_not_repeated_as_a_cost() -> None:
    found = lines(render(report()))
    assert line(found, "settle, us/job").count("±") == 4


def test_a_metric_that_no_target_has_is_shown_as_unknown() -> None:
    a_run = report(targets=TARGETS[:2])
    more = [
        replaced(workload, metrics=[*workload.metrics, Metric("swaps", "swaps/job", "lower")])
        for workload in a_run.workloads
    ]
    assert line(lines(render(replaced(a_run, workloads=more))), "swaps/job").split() == ["swaps/job", "-", "-"]
