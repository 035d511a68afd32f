"""Hooks of all kinds that raise exceptions which are not an ``Exception``."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any, NoReturn

from worker_app import note

import multiq
from multiq import events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from multiq.job import JobContext

app = multiq.App()


class Rude(BaseException):
    """Not an ``Exception``, and expected by no caller."""


KINDS = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, SystemExit, Rude)
_kinds = itertools.cycle(KINDS)


def rude(*_: Any) -> NoReturn:
    """Raise each of the kinds in turn."""
    raise next(_kinds)


class RudeEnd(multiq.Middleware):
    """Raises at each end of a job."""

    def ended(self, job: JobContext, ending: multiq.Ending) -> None:
        rude()


def work(number: int) -> None:
    note("start", number)


async def awork(number: int) -> None:
    note("start", number)
    await asyncio.sleep(0)


def fail(number: int) -> None:
    note("start", number)
    raise ValueError(number)


async def afail(number: int) -> None:
    note("start", number)
    await asyncio.sleep(0)
    raise ValueError(number)


succeeds: list[multiq.Task[..., Any]] = [
    app.task(name="succeeds", middleware=[RudeEnd()])(work),
    app.task(name="asucceeds", middleware=[RudeEnd()])(awork),
]
fails: list[multiq.Task[..., Any]] = [
    app.task(name="fails", middleware=[RudeEnd()], max_attempts=1)(fail),
    app.task(name="afails", middleware=[RudeEnd()], max_attempts=1)(afail),
]
retries: list[multiq.Task[..., Any]] = [
    app.task(name="retries", middleware=[RudeEnd()], max_attempts=2, backoff=0)(fail),
    app.task(name="aretries", middleware=[RudeEnd()], max_attempts=2, backoff=0)(afail),
]
backs_off: list[multiq.Task[..., Any]] = [
    app.task(name="backs_off", backoff=rude)(fail),
    app.task(name="abacks_off", backoff=rude)(afail),
]
wrapped: list[multiq.Task[..., Any]] = [
    app.task(name="wrapped.before", max_attempts=1)(work),
    app.task(name="wrapped.after", max_attempts=1)(work),
    app.task(name="awrapped.before", max_attempts=1)(awork),
    app.task(name="awrapped.after", max_attempts=1)(awork),
    app.task(name="awrapped.abefore", max_attempts=1)(awork),
    app.task(name="awrapped.aafter", max_attempts=1)(awork),
]

ROLE = os.environ.get("RUDE_ROLE")

if ROLE == "middleware":

    @app.middleware
    def around(job: JobContext) -> Iterator[None]:
        if str(job.task).endswith(".before"):
            rude()
        yield
        if str(job.task).endswith(".after"):
            rude()

    @app.middleware
    async def aaround(job: JobContext) -> AsyncIterator[None]:
        if str(job.task).endswith(".abefore"):
            rude()
        yield
        if str(job.task).endswith(".aafter"):
            rude()


if ROLE == "subscriber":
    app.on(events.Event)(rude)

if ROLE == "coroutine subscriber":

    @app.on(events.Event)
    async def arude(event: events.Event) -> None:
        await asyncio.sleep(0)
        rude()


if ROLE == "before_fetch":

    class RudeFetch(multiq.Middleware):
        def before_fetch(self, worker: str) -> None:
            rude()

    app.middleware(RudeFetch())
