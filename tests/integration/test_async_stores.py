"""Coroutines on each backend: enqueues that go together, a server that hangs, and jobs that are not lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from servers.beanstalk import BeanstalkServer
from servers.mysql import MysqlServer
from servers.process import until
from servers.redis import RedisServer
from stores import NAMES, STORES

import multiq
from multiq import BackendError, BackendTimeout, EnqueueUncertain, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers.process import Server


@pytest.fixture(params=NAMES)
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[multiq.Queue]:
    with STORES[request.param](tmp_path) as url, multiq.App(url) as app:
        yield app.queue("mail")


@pytest.mark.one_row
def test_enqueues_side_by_side_are_stored_in_their_order(queue: multiq.Queue) -> None:
    async def main() -> None:
        # given two callers that wait for each of their enqueues, and many callers that do not wait
        async def caller(name: str) -> None:
            for number in range(20):
                await queue.aenqueue([name, number])

        await asyncio.gather(caller("a"), caller("b"), *(queue.aenqueue(["crowd", number]) for number in range(100)))

        # when all jobs are reserved
        jobs = [await queue.areserve(5) for _ in range(140)]

        # then no job is missing, and the jobs of each caller are in its order
        for name, count in (("a", 20), ("b", 20), ("crowd", 100)):
            assert [job.body[1] for job in jobs if job.body[0] == name] == [*range(count)]
        await asyncio.gather(*(job.aack() for job in jobs))
        assert (await queue.astats()).reserved == 0

    asyncio.run(main())


@pytest.mark.one_row
def test_a_hundred_consumers_share_the_jobs(queue: multiq.Queue) -> None:
    async def main() -> None:
        got: list[int] = []

        async def consume() -> None:
            while True:
                async with await queue.areserve(60) as job:
                    got.append(job.body)

        consumers = [asyncio.ensure_future(consume()) for _ in range(50)]
        await asyncio.gather(*(queue.aenqueue(number) for number in range(100)))
        await asyncio.to_thread(until, lambda: len(got) == 100 and not queue.stats().reserved, "all jobs are acked")
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        assert sorted(got) == [*range(100)]

    asyncio.run(main())


def test_a_body_that_the_server_refuses_fails_only_its_own_enqueue(tmp_path: Path) -> None:
    async def main() -> None:
        # given beanstalkd, which takes 65,535 bytes
        with BeanstalkServer() as server, multiq.App(server.url) as app:
            queue = app.queue()
            await queue.aenqueue(b"first")

            # when one of many jobs has a larger body
            results = await asyncio.gather(
                *(queue.aenqueue(b"x" * (70_000 if number == 7 else 10)) for number in range(30)),
                return_exceptions=True,
            )

            # then only the caller of this job gets the error, with the server's limit
            wrong = [number for number, result in enumerate(results) if isinstance(result, BaseException)]
            assert wrong == [7]
            assert isinstance(results[7], PayloadTooLarge)
            assert results[7].limit_bytes == 65_535
            assert (await queue.astats()).ready == 30

    asyncio.run(main())


@pytest.fixture(params=["redis", "mysql", "beanstalk"])
def hanging(request: pytest.FixtureRequest) -> Iterator[tuple[Server, str]]:
    """A server that can be stopped, and the URL of a store on it whose calls take a second at most."""
    if request.param == "mysql":
        with MysqlServer() as mysql, mysql.database() as place:
            yield mysql, f"{place.url}{'&' if '?' in place.url else '?'}timeout=1"
    else:
        with RedisServer() if request.param == "redis" else BeanstalkServer() as server:
            yield server, f"{server.url}?timeout=1"


@pytest.mark.one_row
def test_a_stopped_server_holds_up_nothing_else_and_hides_no_job(hanging: tuple[Server, str]) -> None:
    server, url = hanging

    async def main() -> None:
        async with multiq.App(url) as app:
            queue = app.queue()
            await queue.aenqueue("first")

            # given many calls to a server that does not answer
            server.pause()
            enqueues = [asyncio.ensure_future(queue.aenqueue(number)) for number in range(60)]
            looks = [asyncio.ensure_future(queue.astats()) for _ in range(40)]
            waits = [asyncio.ensure_future(queue.areserve(0)) for _ in range(10)]
            await asyncio.sleep(0.1)

            # when other coroutines use the loop's threads, then these are not delayed
            await asyncio.gather(*(asyncio.to_thread(str, number) for number in range(100)))
            assert not any(call.done() for call in (*enqueues, *looks, *waits))

            # then each call ends with an error, and each enqueue says whether its job may be stored
            results = await asyncio.gather(*enqueues, return_exceptions=True)
            assert {type(result) for result in results} <= {EnqueueUncertain, BackendTimeout}
            others = await asyncio.gather(*looks, *waits, return_exceptions=True)
            assert all(isinstance(error, BackendError) for error in others)
            server.go_on()

            # and when the uncertain jobs are enqueued again, then each of them is stored once
            if app.backend.declared.client_ids:
                uncertain = [error for error in results if isinstance(error, EnqueueUncertain)]
                assert len({error.ids for error in uncertain}) == len(uncertain)
                await asyncio.gather(*(error.arepeat() for error in uncertain))
                assert (await queue.astats()).ready == 1 + len(uncertain)

    try:
        asyncio.run(main())
    finally:
        server.go_on()
