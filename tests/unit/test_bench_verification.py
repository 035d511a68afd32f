"""The bench's verification: every kind of violation, and correct runs, from run logs written by hand."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from multiq.bench.run_log import Run, RunLog, RunLogFull, RunLogs
from multiq.bench.scenario import timeline
from multiq.bench.verification import Evidence, Sent, verify

if TYPE_CHECKING:
    from pathlib import Path

    from multiq.bench.report import Violation

MS = 1_000_000
SECOND = 1000 * MS
ME, OTHER = 100, 200  # processes


def run(number: int, at: int = SECOND, *, took: int = MS, pid: int = ME, failed: bool = False) -> Run:
    return Run(number, at, at + took if took else 0, 1, pid, failed)


def found(evidence: Evidence) -> dict[str, Violation]:
    return {violation.kind: violation for violation in verify(evidence).violations}


def test_jobs_that_ran_once_are_in_order() -> None:
    runs = [run(n, SECOND + n * MS) for n in range(10)]
    result = verify(Evidence(sent=[Sent(0, 10, 0, 1)], runs=runs, in_order=True))
    assert (result.enqueued, result.finished, result.runs, result.explained) == (10, 10, 10, 0)
    assert result.violations == []
    assert result.checked == ["lost", "doubled", "early", "out of order", "overlap", "invented", "left over"]


def test_a_job_that_never_ran_and_is_nowhere_is_lost() -> None:
    lost = found(Evidence(sent=[Sent(0, 3, 0, 1)], runs=[run(0), run(2)]))["lost"]
    assert lost.count == 1
    assert lost.example == "job 1 was enqueued, was never begun, and the store does not hand it out"


def test_a_job_that_never_came_to_its_end_is_lost() -> None:
    lost = found(Evidence(sent=[Sent(0, 1, 0, 1)], runs=[run(0, took=0)]))["lost"]
    assert "was begun and never ended" in lost.example


def test_a_job_that_only_failed_is_lost() -> None:
    assert "lost" in found(Evidence(sent=[Sent(0, 1, 0, 1)], runs=[run(0, failed=True)], fails={0: 1}))


def test_a_job_that_is_handed_out_when_the_queue_is_emptied_is_not_lost() -> None:
    result = verify(Evidence(sent=[Sent(0, 3, 0, 1)], runs=[run(0)], emptied=array("q", [2, 1])))
    assert result.violations == []
    assert (result.enqueued, result.finished, result.runs) == (3, 3, 1)


def test_lost_jobs_are_reported_although_others_are_doubled() -> None:
    emptied = array("q", [0, 2, 4, 0, 2, 4])
    wrong = found(Evidence(sent=[Sent(0, 4, 0, 1), Sent(4, 2, 0, 1)], runs=[], emptied=emptied))
    assert (wrong["lost"].count, wrong["doubled"].count) == (3, 3)
    assert wrong["lost"].example.startswith("job 1 was enqueued, was never begun")
    assert wrong["doubled"].example == (
        "job 0 was handed out 2 times, nothing explains more than one: 2 times when the queue was emptied"
    )


def test_a_job_that_has_run_and_is_found_again_is_doubled() -> None:
    doubled = found(Evidence(sent=[Sent(0, 1, 0, 1)], runs=[run(0)], emptied=array("q", [0])))["doubled"]
    assert doubled.example.endswith("process 100 at +0.0 ms, 1 time when the queue was emptied")
    explained = Evidence(sent=[Sent(0, 1, 0, 1)], runs=[run(0, took=0)], emptied=array("q", [0]), killed={ME: SECOND})
    assert found(explained) == {}


def test_a_found_job_that_was_not_enqueued_is_invented() -> None:
    emptied = array("q", [0, 1, 7])
    assert found(Evidence(sent=[Sent(0, 2, 0, 1)], runs=[], emptied=emptied))["invented"].count == 1
    broken_off = Evidence(sent=[], runs=[], emptied=emptied, complaint="the producer died")
    assert set(found(broken_off)) == {"failed"}


@pytest.mark.parametrize("left", [{"ready": 2}, {"ready": 1, "buried": 1}, {"ready": None}, {"ready": 0}])
def test_counts_of_the_store_do_not_explain_a_lost_job(left: dict[str, int | None]) -> None:
    assert found(Evidence(sent=[Sent(0, 3, 0, 1)], runs=[run(0)], left=left))["lost"].count == 2


def test_a_job_that_is_left_when_all_is_done_is_a_violation() -> None:
    runs = [run(0), run(1)]
    counted = found(Evidence(sent=[Sent(0, 2, 0, 1)], runs=runs, left={"ready": 0, "delayed": 2, "buried": 1}))
    assert set(counted) == {"left over"}
    assert counted["left over"].count == 3
    assert counted["left over"].example == (
        "when all work was done, the store counts 2 delayed, 1 buried, and hands out none"
    )
    emptied = array("q", [1])
    kept = found(Evidence(sent=[Sent(0, 2, 0, 1)], runs=runs[:1], emptied=emptied, found_after=1, left={"ready": 0}))
    assert set(kept) == {"left over"}
    assert kept["left over"].example == "when all work was done, the store counts none, and hands out 1"


def test_where_the_work_broke_off_the_store_may_still_have_jobs() -> None:
    broken_off = Evidence(sent=[Sent(0, 3, 0, 1)], runs=[run(0)], left={"reserved": 2}, complaint="the server is gone")
    assert set(found(broken_off)) == {"failed"}
    gone = Evidence(sent=[Sent(0, 3, 0, 1)], runs=[run(0)], left={"reserved": 0}, complaint="the server is gone")
    assert set(found(gone)) == {"failed", "lost"}


def test_where_only_the_figure_is_missing_what_is_left_is_a_violation() -> None:
    sent, emptied = [Sent(0, 2, 0, 1)], array("q", [7])
    for left, what in (({"buried": 2}, "left over"), ({"ready": None}, "lost")):
        through = Evidence(sent=sent, runs=[run(0)], left=left, emptied=emptied, complaint="no figure", is_through=True)
        assert {"failed", "invented", what} <= set(found(through))


def test_a_second_run_that_nothing_explains_is_doubled() -> None:
    doubled = found(Evidence(sent=[Sent(0, 2, 0, 1)], runs=[run(0), run(1), run(1, 2 * SECOND, pid=OTHER)]))["doubled"]
    assert doubled.count == 1
    assert doubled.example == (
        "job 1 was run 2 times, nothing explains more than one: process 100 at +0.0 ms, process 200 at +1000.0 ms"
    )


def test_a_run_that_was_to_fail_explains_the_next_one() -> None:
    runs = [run(0, failed=True), run(0, 2 * SECOND)]
    result = verify(Evidence(sent=[Sent(0, 1, 0, 1)], runs=runs, fails={0: 1}))
    assert result.violations == []
    assert result.explained == 1
    assert "doubled" in found(Evidence(sent=[Sent(0, 1, 0, 1)], runs=[*runs, run(0, 3 * SECOND)], fails={0: 1}))


def test_a_killed_process_explains_a_second_run_of_what_it_had() -> None:
    runs = [run(0), run(1, took=0), run(0, 3 * SECOND, pid=OTHER), run(1, 3 * SECOND, pid=OTHER)]
    sent = [Sent(0, 2, 0, 1)]
    result = verify(Evidence(sent=sent, runs=runs, killed={ME: 2 * SECOND}))
    assert result.violations == []
    assert result.explained == 2
    assert "doubled" in found(Evidence(sent=sent, runs=runs))


def test_a_start_before_its_due_time_is_early() -> None:
    sent = [Sent(0, 1, SECOND, SECOND + MS, delay=1.0), Sent(1, 1, SECOND, SECOND + MS, delay=1.0)]
    early = found(Evidence(sent=sent, runs=[run(0, 2 * SECOND), run(1, 2 * SECOND - 5 * MS)]))["early"]
    assert early.count == 1
    assert early.example == "job 1, delayed by 1.000 s, was begun 5.0 ms before it was due"


def test_a_start_before_the_enqueue_is_early_too() -> None:
    assert "early" in found(Evidence(sent=[Sent(0, 1, SECOND, SECOND + MS)], runs=[run(0, SECOND - 5 * MS)]))


def test_a_lower_priority_number_and_the_older_job_go_first() -> None:
    sent = [Sent(0, 2, 0, 1, priority=5), Sent(2, 1, 0, 1, priority=1)]
    right = [run(2, SECOND), run(0, 2 * SECOND), run(1, 3 * SECOND)]
    assert found(Evidence(sent=sent, runs=right, in_order=True)) == {}
    wrong = [run(0, SECOND), run(2, 2 * SECOND), run(1, 3 * SECOND)]
    order = found(Evidence(sent=sent, runs=wrong, in_order=True))["out of order"]
    assert order.count == 1
    assert order.example == "job 0 of priority 5 was begun before job 2 of priority 1"
    younger_first = [run(2, SECOND), run(1, 2 * SECOND), run(0, 3 * SECOND)]
    assert "out of order" in found(Evidence(sent=sent, runs=younger_first, in_order=True))


def test_an_order_that_was_not_promised_is_not_checked() -> None:
    result = verify(Evidence(sent=[Sent(0, 2, 0, 1)], runs=[run(1), run(0, 2 * SECOND)]))
    assert result.violations == []
    assert "out of order" not in result.checked


def test_two_runs_at_one_time_overlap() -> None:
    runs = [run(0, SECOND, took=10 * MS), run(0, SECOND + 5 * MS, pid=OTHER)]
    overlap = found(Evidence(sent=[Sent(0, 1, 0, 1)], runs=runs))["overlap"]
    assert overlap.example == "job 0 was begun by process 200 while process 100 ran it"


def test_a_run_that_was_cut_short_ended_with_its_process() -> None:
    runs = [run(0, SECOND, took=0), run(0, 2 * SECOND, pid=OTHER)]
    sent = [Sent(0, 1, 0, 1)]
    assert found(Evidence(sent=sent, runs=runs, killed={ME: 2 * SECOND - 1})) == {}
    assert "overlap" in found(Evidence(sent=sent, runs=runs, killed={ME: 3 * SECOND}))


def test_a_job_that_was_not_enqueued_is_invented() -> None:
    invented = found(Evidence(sent=[Sent(5, 2, 0, 1)], runs=[run(5), run(6), run(7), run(4)]))["invented"]
    assert invented.count == 2
    assert invented.example == "job 4 was run, and was never enqueued"


def test_work_that_could_not_be_done_has_failed() -> None:
    assert found(Evidence(sent=[], runs=[], complaint="the server is gone"))["failed"].example == "the server is gone"


# --- the run log -----------------------------------------------------------------------------------------


def test_a_run_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    run_logs = RunLogs(tmp_path)
    assert run_logs.look() == []
    run_log = RunLog(tmp_path, capacity=10)
    first = run_log.begin(7, 1)
    run_log.begin(8, 2, fails=True)
    (reader,) = run_logs.look()
    assert reader.ended == 0
    assert [(r.number, r.end, r.attempt, r.failed) for r in reader.runs()] == [(7, 0, 1, False), (8, 0, 2, True)]
    run_log.end(first)
    assert run_logs.ended() == 1
    assert [r.is_finished for r in run_logs.runs()] == [True, False]
    assert run_logs.cpu() is None
    run_log.close()
    cpu = run_logs.cpu()
    assert cpu is not None
    assert cpu >= 0
    run_logs.close()


def test_a_full_run_log_is_reported(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path, capacity=1)
    run_log.begin(1, 1)
    with pytest.raises(RunLogFull, match="at most 1 runs were expected, but job 2 begins one more"):
        run_log.begin(2, 1)


def test_a_timeline_counts_what_ended_in_each_part() -> None:
    runs = [run(n, SECOND + n * 10 * MS, took=MS) for n in range(100)]
    points = timeline(runs, SECOND, parts=10)
    assert [round(speed) for _, speed in points[:3]] == [101, 101, 101]
    width = points[1][0] - points[0][0]
    assert round(sum(speed * width for _, speed in points)) == 100
    assert timeline([], 0) == []
