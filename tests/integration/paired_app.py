"""The app that ``test_paired_workers.py`` has workers run: ``multiq worker paired_app:app``."""

from __future__ import annotations

import multiq

app = multiq.App()


@app.task(keep=600)
def double(number: int) -> int:
    return 2 * number


@app.task(queue="other", keep=600)
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(keep=600)
def finish(flow_id: str) -> str:
    return f"finished {flow_id}"


@app.task(keep=600, max_attempts=1)
def fail() -> None:
    raise ValueError("no such order")


@app.task(keep=600, max_attempts=3, backoff=0)
def stepwise() -> list[int]:
    job = multiq.current_job()
    first = job.step("first", lambda: job.attempt)
    job.progress(0.5, "halfway")
    if job.attempt == 1:
        raise ConnectionError("once more")
    return [first, job.attempt]
