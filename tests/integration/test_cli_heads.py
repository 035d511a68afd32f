"""``multiq jobs`` on a backend that shows the first job of a state only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from servers.beanstalk import BeanstalkServer

import multiq
from multiq.cli import cli

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def url() -> Iterator[str]:
    with BeanstalkServer() as server:
        yield server.url


@pytest.mark.parametrize("limit", ["50", "5000"])
def test_jobs_shows_the_heads_and_says_where_there_are_more(url: str, limit: str) -> None:
    # Given two buried jobs, a delayed one, and one that is reserved
    with multiq.App(settings=multiq.Settings(url=url)) as app:
        queue = app.queue("mail")
        ids = [queue.enqueue(number).id for number in range(2)]
        for job in queue.reserve_many(2):
            job.bury()
        late = queue.enqueue("late", delay=3600).id
        queue.enqueue("running")
        running = queue.reserve()
        # When all jobs are listed, then the first job of each state is shown, and a line about the others
        done = CliRunner().invoke(cli, ["jobs", "mail", "-n", limit], env={"MULTIQ_URL": url})
        assert done.exit_code == 0
        assert ids[0] in done.stdout.split()
        assert late in done.stdout.split()
        assert ids[1] not in done.stdout.split()
        assert "more buried jobs" in done.stderr
        assert "more reserved jobs" in done.stderr
        assert "delayed" not in done.stderr.replace("ready, delayed or buried", "")
        # And with --json
        done = CliRunner().invoke(cli, ["jobs", "mail", "-n", limit, "--json"], env={"MULTIQ_URL": url})
        document = json.loads(done.stdout)
        assert [job["id"] for job in document["jobs"]] == [late, ids[0]]
        assert sorted(document["unlisted"]) == ["buried", "reserved"]
        running.ack()
