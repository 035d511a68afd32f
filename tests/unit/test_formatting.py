"""The formatting of values for the command line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from multiq.backend import JobRecord, QueueStats, State
from multiq.cli.top import Look, frame
from multiq.cli.top_workers import Running, WorkerNow
from multiq.formatting import abridge, count, duration, many, shorten, size, summary
from multiq.job import JobInfo
from multiq.terminal_escapes import safe


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.35, "350ms"),
        (1, "1s"),
        (59.6, "1m"),
        (60, "1m"),
        (298, "4m 58s"),
        (3600, "1h"),
        (3599.99, "1h"),
        (11520, "3h 12m"),
        (86400, "1d"),
        (187200, "2d 4h"),
        (86400 * 400, "400d"),
        (3601, "1h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e9))
def test_every_duration_is_short(seconds: float) -> None:
    assert len(duration(seconds)) <= 10


@pytest.mark.parametrize(("number", "text"), [(None, "?"), (0, "0"), (1234567, "1,234,567")])
def test_an_unknown_number_is_not_shown_as_zero(number: int | None, text: str) -> None:
    assert count(number) == text


def test_one_job_and_many_jobs() -> None:
    assert [many(number, "job") for number in (0, 1, 2000)] == ["0 jobs", "1 job", "2,000 jobs"]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KB"), (1_000_000_000, "953.7 MB")]
)
def test_a_size_has_a_unit(number: int, text: str) -> None:
    assert size(number) == text


@given(st.text())
def test_no_terminal_code_is_left(text: str) -> None:
    assert safe(text).isprintable()


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_readable_text_stays_as_it_is(text: str) -> None:
    assert safe(text) == text


@given(st.text(), st.integers(1, 100))
def test_a_shortened_text_fits(text: str, room: int) -> None:
    short = shorten(text, room)
    assert len(short) <= room
    assert short == text or short.endswith("…")


def job(body: bytes) -> JobInfo:
    return JobInfo.of(
        JobRecord(
            queue="q", id="1", state=State.READY, body=body, priority=1, ttr=60, attempt=0, crashes=0, kicks=0,
            due_in=0, age=0, reason=None,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"multiq":1,"task":"mail.reset","args":["a",1],"kwargs":{"b":null}}', 'mail.reset("a", 1, b=null)'),
        (b'{"multiq":1,"task":"mail.reset","args":7,"kwargs":7}', "mail.reset()"),
        (b'{"multiq":1,"task":7}', '{"multiq": 1, "task": 7}'),
        (b'{"any":"json"}', '{"any": "json"}'),
        (b"\xff\x1b", "b'\\xff\\x1b'"),
        (b"", "b''"),
    ],
)
def test_a_job_is_summed_up_as_a_call_or_as_its_body(body: bytes, text: str) -> None:
    assert summary(job(body)) == text


@given(st.binary() | st.recursive(st.text() | st.none(), st.lists, max_leaves=5).map(lambda v: json.dumps(v).encode()))
def test_any_body_is_summed_up_in_one_line(body: bytes) -> None:
    text = summary(job(body))
    assert len(text) <= 200
    assert text.isprintable()


# --- a frame of top --------------------------------------------------------------------------------------


def stats(queue: str, ready: int | None, buried: int = 0, paused_for: float | None = None) -> QueueStats:
    return QueueStats(queue=queue, ready=ready, delayed=0, reserved=0, buried=buried, paused_for=paused_for)


def look(*queues: QueueStats) -> Look:
    return Look(0, {found.queue: found for found in queues})


def drawn(now: Look, before: Look | None = None, rows: int | None = None, trouble: str = "") -> list[str]:
    console = Console(width=80, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(frame(now, before, place="memory://", rows=rows, trouble=trouble))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_first_frame_shows_no_change() -> None:
    assert "+/-" not in "".join(drawn(look(stats("a", 1))))


def test_a_frame_shows_the_change_since_the_last_look() -> None:
    lines = drawn(look(stats("a", 5), stats("b", 1), stats("new", 2)), look(stats("a", 2), stats("b", 4)))
    cells = {line.split()[0]: line.split()[1:3] for line in lines[2:]}
    assert cells == {"a": ["5", "+3"], "new": ["2", "+2"], "b": ["1", "-3"]}


def test_the_busiest_queue_comes_first_and_the_rest_is_counted() -> None:
    lines = drawn(look(stats("a", 1), stats("b", 9), stats("c", 5), stats("d", None)), rows=2)
    assert [line.split()[0] for line in lines[2:4]] == ["b", "c"]
    assert lines[4] == "and 2 more queues"


def test_an_unknown_value_is_shown_as_unknown() -> None:
    assert drawn(look(stats("a", None)), look(stats("a", 1)))[2].split()[:3] == ["a", "?", "?"]


def test_a_pause_and_trouble_are_shown() -> None:
    lines = drawn(look(stats("a", 1, paused_for=60)), trouble="no answer")
    assert lines[1].endswith("PAUSED")
    assert lines[2].endswith("1m")
    assert lines[-1] == "no answer"


def test_a_screen_without_queues_says_so() -> None:
    assert drawn(look())[-1] == "no queue holds a job"


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = "first line\n" + "x" * 10_000 + "\nlast line"
    short = abridge(text, 400)
    assert len(short) < 450
    assert short.startswith("first line\n")
    assert short.endswith("\nlast line")
    assert f"[... {len(text) - 400:,} characters ...]" in short
    assert abridge(text, len(text)) == text


def crew(workers: int, jobs: int) -> list[WorkerNow]:
    return [
        WorkerNow(
            worker=f"host{number}:1",
            state="working",
            up_for=60.0,
            queues=["q"],
            processes=1,
            at_a_time=jobs,
            running=jobs,
            jobs=[Running(f"host{number}:2", "q", str(job), float(job), "task", 1) for job in range(jobs)],
        )
        for number in range(workers)
    ]


@pytest.mark.parametrize(("queues", "workers", "jobs"), [(0, 0, 0), (1, 1, 0), (40, 1, 1), (1, 30, 9), (40, 30, 9)])
def test_queues_and_workers_share_a_screen(queues: int, workers: int, jobs: int) -> None:
    now = look(*(stats(f"q{number:02}", number) for number in range(queues)))._replace(workers=crew(workers, jobs))
    lines = drawn(now, rows=24 - 6)
    assert len(lines) < 24  # the last line is the footer
    text = "\n".join(lines)
    if queues:
        assert f"q{queues - 1:02} " in text
    if workers:
        assert "host0:1 " in text
        assert f"run{'s' if workers == 1 else ''} {workers * jobs:,} job" in text
    if jobs:
        assert ["host0:2", "task", "q", f"{jobs - 1}s", "1", f"{jobs - 1}"] in [line.split() for line in lines]


def test_names_of_workers_and_jobs_cannot_move_the_cursor() -> None:
    (one,) = crew(1, 1)
    evil = "\x1b[2J"
    other = WorkerNow(evil, evil, 1.0, [evil], 1, 1, 1, [Running(evil, evil, evil, 1.0, evil, 1)])
    assert "\x1b" not in "".join(drawn(look()._replace(workers=[one, other])))
