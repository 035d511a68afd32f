"""The log: a line for each event, as text or JSON, without arguments and terminal codes."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

import pytest

import multiq
from multiq.backend import Ack, Bury, Release
from multiq.logging import JsonFormatter, TextFormatter, setup_logging
from multiq.settings.model import LogSettings, Settings
from multiq.worker.monitoring.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.backend import Verdict


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("multiq")
    handlers, levels, factory = root.handlers[:], (root.level, ours.level), logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def set_up(level: str, form: str) -> None:
    """Set up logging as in a program without logging, because pytest has set up its own."""
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.WARNING)
    assert setup_logging(level, form, over_app=True)


def run(level: str, form: str, *, log_jobs: bool | None = None, summary: float = 60.0) -> None:
    set_up(level, form)
    app = multiq.App(settings=Settings(url="memory://", log=LogSettings(summary=summary)))

    @app.task(max_attempts=1)
    def greet(name: str) -> None:
        if name == "none":
            raise ValueError("\x1b[31mred\x1b[0m")

    greet.enqueue("ann-the-secret")
    greet.enqueue("none")
    multiq.Worker(app, stop_when_empty=True, log_jobs=log_jobs).run()


def test_a_line_for_each_job_if_it_is_asked_for_without_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    run("info", "text", log_jobs=True)
    said = capsys.readouterr().err
    assert " info    done      greet [default]" in said
    assert "ann-the-secret" not in said


def test_by_default_failures_and_a_summary_are_logged_and_no_finished_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("info", "text")
    said = capsys.readouterr().err
    assert " done      greet" not in said
    assert "buried    greet" in said
    (summary,) = [line for line in said.splitlines() if " summary " in line]
    assert " info    summary   " in summary
    assert " 2 jobs in " in summary
    assert summary.endswith(" a second done 1 retried 0 buried 1")


@pytest.mark.parametrize(("level", "summary"), [("warning", 60.0), ("info", 0.0)])
def test_no_summary_is_logged_if_it_is_turned_off(
    level: str, summary: float, capsys: pytest.CaptureFixture[str]
) -> None:
    run(level, "text", summary=summary)
    assert " summary " not in capsys.readouterr().err


def test_a_summary_s_line_has_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    run("info", "json")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (told,) = [line for line in lines if line.get("event") == "summary"]
    assert (told["jobs"], told["done"], told["retried"], told["buried"]) == (2, 1, 0, 1)
    assert told["seconds"] > 0
    assert told["rate"] > 0
    assert told["level"] == "info"


def test_summaries_come_soon_at_first_and_then_ever_more_seldom() -> None:
    told: list[tuple[float, int]] = []
    at = 0.0
    settled: dict[type[Verdict], int] = {Ack: 0, Release: 0, Bury: 0}
    summary = Summary("host:1", settled, 8.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "multiq.worker.monitoring.summary.log_summary",
            lambda _who, _took, **counts: told.append((at, counts["done"])),
        )
        began = time.monotonic()
        for second in range(1, 41):
            at = float(second)
            settled[Ack] += 10
            summary.log_if_due(began + at + 0.5)
        assert [moment for moment, _ in told] == [1, 3, 7, 15, 23, 31, 39]
        assert sum(count for _, count in told) == 390
        for second in range(41, 100):  # a time without jobs
            at = float(second)
            summary.log_if_due(began + at + 0.5)
        settled[Ack] += 1
        at = 100.0
        summary.log_if_due(began + at + 0.5)
        assert told[-1] == (100.0, 1)


def test_debug_logs_each_start_and_error_only_failures(capsys: pytest.CaptureFixture[str]) -> None:
    run("debug", "text")
    said = capsys.readouterr().err
    assert "start     greet" in said
    assert " debug   done      greet" in said
    run("error", "text")
    lines = [line for line in capsys.readouterr().err.splitlines() if " greet " in line]
    assert len(lines) == 1
    assert "buried    greet" in lines[0]


def test_terminal_codes_in_an_error_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    run("info", "text")
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\\x1b[31mred" in said
    assert "Traceback" in said


def test_json_lines_carry_the_event_s_fields(capsys: pytest.CaptureFixture[str]) -> None:
    run("info", "json", log_jobs=True)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["queues"] for line in lines if line.get("event") == "working"] == [["default"]]
    done = next(line for line in lines if line.get("event") == "done")
    assert (done["task"], done["queue"], done["attempt"], done["level"]) == ("greet", "default", 1, "info")
    failed = next(line for line in lines if line.get("event") == "failed")
    assert "ValueError" in failed["traceback"]


def test_both_formats_take_records_of_other_libraries() -> None:
    record = logging.LogRecord("elsewhere", logging.WARNING, __file__, 1, "two %s", ("lines\nhere",), None)
    assert "\n" not in TextFormatter().format(record)
    assert json.loads(JsonFormatter().format(record))["message"] == "two lines\nhere"


def test_json_lines_have_the_values_that_a_program_passes_as_extra() -> None:
    extra = {"order": 4711, "customer": {"id": 3}, "lines": ["a\x1b[1mb"], "level": "mine", "multiq_attempt": 9}
    record = logging.getLogger("shop").makeRecord("shop", logging.INFO, __file__, 1, "paid", (), None, extra=extra)
    line = json.loads(JsonFormatter().format(record))
    assert line.pop("time") == round(record.created, 3)
    assert line == {
        "level": "info",
        "logger": "shop",
        "message": "paid",
        "order": 4711,
        "customer": "{'id': 3}",
        "lines": ["a\\x1b[1mb"],
    }


def run_slowly(slow_job: float, level: str = "info", form: str = "text") -> str:
    """Run a quick job, a slow job, and a slow job that fails. Returns the id of the slow job that succeeds."""
    set_up(level, form)
    app = multiq.App(settings=Settings(url="memory://", log=LogSettings(slow_job=slow_job)))
    app.task(name="quick")(lambda: None).enqueue()
    handle = app.task(name="long")(lambda: time.sleep(0.06)).enqueue()

    @app.task(name="wrong", max_attempts=1)
    def wrong() -> None:
        time.sleep(0.06)
        raise ValueError

    wrong.enqueue()
    multiq.Worker(app, stop_when_empty=True).run()
    return handle.id


def test_a_job_that_took_longer_than_slow_job_is_a_warning_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    job_id = run_slowly(0.05, "warning")
    slow = [line for line in capsys.readouterr().err.splitlines() if " slow " in line]
    assert len(slow) == 2
    assert f"warning slow      long [default] {job_id} attempt 1 in " in slow[0]
    assert "slow      wrong [default]" in slow[1]


def test_a_slow_job_s_line_has_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    job_id = run_slowly(0.05, form="json")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = next(line for line in lines if line.get("event") == "slow")
    assert (told["task"], told["queue"], told["job_id"], told["attempt"]) == ("long", "default", job_id, 1)
    assert told["seconds"] >= 0.06
    assert told["level"] == "warning"


@pytest.mark.parametrize(("slow_job", "level"), [(0, "info"), (3600, "info"), (0.05, "error")])
def test_no_slow_job_is_logged_if_it_is_turned_off(
    slow_job: float, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_slowly(slow_job, level)
    assert " slow " not in capsys.readouterr().err
