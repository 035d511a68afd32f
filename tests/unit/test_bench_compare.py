"""The comparison of two runs: which changes are reported as regressions."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from bench_reports import TARGETS
from bench_reports import report as made

from multiq.bench.compare import Comparison, ReportsDiffer, Row, Verdict, compare
from multiq.bench.report import Report, Violation

replaced = msgspec.structs.replace
report = partial(made, targets=TARGETS[::3])  # redis and sqlite are half the work of judging all four


def verdicts(comparison: Comparison, workload: str, metric: str) -> set[Verdict]:
    return {row.verdict for row in comparison.rows if (row.workload, row.metric.name) == (workload, metric)}


def alone(seed: int, noise: float = 1.0) -> Report:
    """Return a run of one backend, which takes less time to compare."""
    return report(seed=seed, noise=noise, targets=TARGETS[:1])


def row_of(comparison: Comparison, workload: str, metric: str) -> Row:
    wanted = (workload, metric, "redis")
    return next(row for row in comparison.rows if (row.workload, row.metric.name, row.target) == wanted)


# --- verdicts --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("noise", [1.0, 3.0])
def test_two_runs_of_one_build_show_no_difference(noise: float) -> None:
    alarms = 0
    for seed in range(0, 16, 2):
        found = compare(alone(seed, noise), alone(seed + 1, noise))
        alarms += found.regressed
        assert found.regressed or found.summary().startswith(("no difference", "cannot tell")) or found.count("better")
    assert alarms <= 1  # One false alarm in twenty is allowed. The seeds are fixed.


@pytest.mark.long
def test_a_settle_that_is_a_fifth_slower_is_a_regression() -> None:
    found = compare(report(seed=1), report(seed=2, factors={("settle", "settle"): 1.2}))
    assert found.regressed
    assert verdicts(found, "settle", "settle") == {"worse"}
    assert verdicts(found, "settle", "reserve") == {"no difference"}
    assert [row.metric.name for row in found.rows if row.verdict == "worse"] == ["settle", "settle"]
    assert found.summary().startswith("regression")


@pytest.mark.long
def test_a_settle_that_is_a_twentieth_slower_is_not() -> None:
    found = compare(report(seed=1), report(seed=2, factors={("settle", "settle"): 1.05}))
    assert not found.regressed


@pytest.mark.long
def test_fewer_jobs_per_second_are_worse_and_more_are_better() -> None:
    halved = report(seed=2, factors={("drain", "drained"): 0.5, ("bulk", "enqueued"): 2.0})
    found = compare(report(seed=1), halved)
    assert verdicts(found, "drain", "drained") == {"worse"}
    assert verdicts(found, "bulk", "enqueued") == {"better"}
    row = row_of(found, "drain", "drained")
    assert row.ratio is not None
    assert 0.4 < row.ratio < 0.6
    assert row.low is not None
    assert row.high is not None
    assert row.low < row.ratio < row.high


@pytest.mark.long
def test_a_change_within_the_threshold_is_not_a_regression() -> None:
    slower = report(seed=2, factors={("settle", "settle"): 1.2})
    assert not compare(report(seed=1), slower, threshold=0.3).regressed


@pytest.mark.long
def test_one_repeat_allows_no_verdict_on_a_measured_figure() -> None:
    found = compare(report(seed=1, repeats=1), report(seed=2, repeats=1, factors={("drain", "drained"): 0.2}))
    row = row_of(found, "drain", "drained")
    assert (row.verdict, row.why, row.low) == ("cannot tell", "one repeat only", None)
    assert row.ratio is not None
    assert row.ratio < 0.3


@pytest.mark.long
def test_repeats_with_a_large_spread_allow_no_verdict() -> None:
    found = compare(report(seed=1, noise=12, repeats=3), report(seed=2, noise=12, repeats=3))
    assert row_of(found, "latency", "pickup p99").verdict == "cannot tell"
    assert row_of(found, "latency", "pickup p99").why == "its repeats spread too far"
    assert not found.regressed


def test_constant_counts_need_no_spread() -> None:
    before = report(seed=1)
    after = with_figure(report(seed=2), "drain", "commands", lambda value: value and value * 1.5)
    found = compare(before, after)
    assert row_of(found, "drain", "commands").verdict == "worse"
    assert row_of(found, "bulk", "commands").verdict == "no difference"


@pytest.mark.long
def test_zero_in_both_runs_means_no_difference_and_zero_in_one_is_not_judged() -> None:
    none = with_figure(report(seed=1), "drain", "commands", lambda _: 0.0)
    assert row_of(compare(none, none), "drain", "commands").verdict == "no difference"
    row = row_of(compare(none, report(seed=2)), "drain", "commands")
    assert (row.verdict, row.why, row.ratio) == ("cannot tell", "a ratio to zero means nothing", None)


def test_informative_and_unknown_figures_are_not_judged() -> None:
    found = compare(report(seed=1), report(seed=2))
    assert verdicts(found, "drain", "server memory") == set()
    assert not [row for row in found.rows if (row.target, row.metric.name) == ("sqlite", "commands")]


@pytest.mark.long
def test_one_outlying_repeat_is_not_a_regression() -> None:
    after = report(seed=2)
    once = iter([1.9])
    after = with_figure(after, "drain", "client CPU", lambda value: value and value * next(once, 1.0))
    assert not compare(report(seed=1), after).regressed


def with_figure(old: Report, workload: str, metric: str, change: Any) -> Report:
    results = [
        replaced(
            result,
            samples=[
                replaced(sample, metrics={**sample.metrics, metric: change(sample.metrics[metric])})
                for sample in result.samples
            ],
        )
        if result.workload == workload
        else result
        for result in old.results
    ]
    return replaced(old, results=results)


# --- uncertain figures -----------------------------------------------------------------------------------


def test_a_drain_that_is_four_times_slower_in_two_repeats_is_not_reported_as_no_difference() -> None:
    quarter = report(seed=2, repeats=2, noise=3, factors={("drain", "drained"): 0.25})
    found = compare(report(seed=1, repeats=2, noise=3), quarter)
    assert {"worse", "cannot tell"} >= verdicts(found, "drain", "drained")
    assert found.regressed or found.is_unsure
    assert not found.summary().startswith(("no difference", "faster"))
    assert "the new run has 2 repeats: with fewer than 5 only large changes show, and often none" in found.caveats
    assert "the old run has 2 repeats: with fewer than 5 only large changes show, and often none" in found.caveats
    looks_worse = {(row.workload, row.metric.name) for row in [*found.changes(), *found.suspects()]}
    assert ("drain", "drained") in looks_worse


def test_everything_a_tenth_slower_in_five_repeats_is_not_reported_as_no_difference() -> None:
    old = report(seed=1)
    slower = {
        (workload.name, metric.name): 1 / 1.1 if metric.better == "higher" else 1.1
        for workload in old.workloads
        for metric in workload.metrics
    }
    found = compare(old, report(seed=2, factors=slower))
    unsure = found.count("cannot tell")
    assert unsure
    assert found.summary().startswith(f"cannot tell for {unsure} of {len(found.rows)} figures: ") or found.regressed
    assert not [caveat for caveat in found.caveats if "repeats" in caveat]


def test_no_difference_is_reported_for_all_figures_or_for_none() -> None:
    old, new = only(report(seed=1), "settle"), only(report(seed=2), "settle")
    found = compare(old, new, threshold=0.5)
    assert (found.is_unsure, found.count("cannot tell")) == (False, 0)
    assert found.summary().startswith("no difference: of ")
    wild = iter([1.0, 5.0] * 100)
    one_unsure = with_figure(new, "settle", "settle", lambda value: value and value * next(wild))
    found = compare(old, one_unsure, threshold=0.5)
    assert found.is_unsure
    assert found.summary().startswith("cannot tell for ")


@pytest.mark.long
def test_figures_that_look_worse_are_shown_though_uncertain() -> None:
    found = compare(report(seed=1, repeats=1), report(seed=2, repeats=1, factors={("drain", "drained"): 0.2}))
    suspects = [(row.workload, row.metric.name) for row in found.suspects()]
    assert suspects[0] == ("drain", "drained")  # the worst figure comes first
    assert len(suspects) < found.count("cannot tell")
    assert found.changes() == []


def only(old: Report, workload: str) -> Report:
    return replaced(old, results=[result for result in old.results if result.workload == workload])


# --- comparable runs -------------------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"profile": "durable"}, "profile fast against durable"),
        ({"is_quick": True}, "a full run against a quick one"),
        ({"environment": {"CPU": "another"}}, "CPU: AMD EPYC 7R13, 2 cores against another"),
    ],
)
def test_runs_that_are_not_comparable_are_refused_or_listed(change: dict[str, Any], told: str) -> None:
    old, new = report(seed=1), replaced(report(seed=2), **change)
    with pytest.raises(ReportsDiffer) as caught:
        compare(old, new)
    assert told in caught.value.obstacles
    assert told in str(caught.value)
    assert told in compare(old, new, anyway=True).caveats


def test_other_parameters_and_other_durability_are_refused() -> None:
    old = report(seed=1)
    more = [replaced(result, parameters={**result.parameters, "jobs": 9}) for result in old.results[:1]]
    safer = replaced(old.targets[0], durability=replaced(old.targets[0].durability, survives="power loss"))
    new = replaced(old, results=[*more, *old.results[1:]], targets=[safer, *old.targets[1:]])
    with pytest.raises(ReportsDiffer) as caught:
        compare(old, new)
    settings = '(appendonly no, save "")'
    assert caught.value.obstacles == (
        f"redis keeps jobs differently: server crash {settings} against power loss {settings}",
        "enqueue on redis was run with jobs 20000 against jobs 9",
    )


def test_runs_without_a_common_figure_are_never_compared() -> None:
    with pytest.raises(ReportsDiffer, match="no figure in common"):
        compare(report(targets=TARGETS[:1]), report(targets=TARGETS[1:]), anyway=True)


def test_other_differences_are_listed() -> None:
    old = report(seed=1, targets=TARGETS[:3])
    new = report(seed=2, targets=TARGETS[1:], noise=3, violations={("drain", "mysql"): Violation("lost", 1, "one")})
    new = replaced(new, environment={**new.environment, "Python": "3.12.1", "load at the start": "7"})
    newer = [replaced(new.targets[0], server="beanstalkd 1.13"), *new.targets[1:]]
    caveats = compare(old, replaced(new, targets=newer), anyway=True).caveats
    assert caveats[:4] == [
        "Python: 3.11.7 against 3.12.1",
        "beanstalk was beanstalkd 1.12, and is beanstalkd 1.13",
        f"the new run was noisy: {new.noise}",
        "the new run broke promises, so its figures are of work that was not all done",
    ]
    assert caveats[4].startswith("only in the old run: backlog on redis, ")
    assert caveats[5].startswith("only in the new run: backlog on sqlite, ")
    assert len(caveats) == 6


@pytest.mark.long
def test_a_slower_machine_is_not_called_a_regression() -> None:
    slow = {(workload, metric): 1.15 for workload in ("settle",) for metric in ("settle", "reserve")}
    old, new = report(seed=1), report(seed=2, factors=slow)
    assert compare(old, new).regressed
    found = compare(replaced(old, reference=0.020), replaced(new, reference=0.023))
    assert not found.regressed
    assert round(found.drift, 3) == 0.15
    assert "the machine itself was 15.0% slower in the new run: times may differ by as much more" in found.caveats


@pytest.mark.long
def test_a_slower_machine_does_not_explain_more_commands() -> None:
    more = with_figure(report(seed=2), "drain", "commands", lambda value: value and value * 1.2)
    found = compare(replaced(report(seed=1), reference=0.020), replaced(more, reference=0.026))
    assert verdicts(found, "drain", "commands") == {"worse"}


@pytest.mark.long
def test_false_alarms_are_as_rare_as_promised_where_nothing_changed() -> None:
    found = [compare(alone(seed), alone(seed + 1), threshold=0.0) for seed in range(100, 140, 2)]
    assert sum(comparison.regressed for comparison in found) <= 2  # at most 2 of 20 comparisons may be false alarms


@pytest.mark.long
def test_a_comparison_is_a_document() -> None:
    found = compare(report(seed=1), report(seed=2))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


@pytest.mark.long
def test_a_figure_that_the_new_run_does_not_have_is_not_reported_as_no_difference() -> None:
    # Given two equal runs, of which one lacks a figure of a workload
    old, new = report(noise=0.05), report(noise=0.05)
    assert not compare(old, new).is_unsure
    for result in new.results:
        if (result.workload, result.target) == ("drain", "redis"):
            for sample in result.samples:
                sample.metrics["drained"] = None
    # When they are compared, then the missing figure is reported, and not "no difference"
    comparison = compare(old, new)
    assert comparison.is_unsure
    assert comparison.missing == ["redis drain: drained, jobs/s"]
    assert comparison.summary().startswith(f"cannot tell for 1 of {len(comparison.rows) + 1} figures")
    assert "the new run does not have: redis drain: drained, jobs/s" in comparison.caveats
