"""``multiq top`` shows the workers of a connection and what they run, on each backend."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from processes import until, worker
from worker_app import app, nap, quick

from multiq.control import presence
from multiq.control.flags import PRESENCE_QUEUES
from multiq.control.presence import Viewer

if TYPE_CHECKING:
    from pathlib import Path

    from shell import Shell

    from multiq.control.presence import Answer


@pytest.fixture
def shell(shell: Shell, url: str) -> Shell:
    """On each backend."""
    shell.environment = {"MULTIQ_URL": url}
    return shell


def look(shell: Shell) -> dict[str, Any]:
    """Return what one frame of ``top`` shows about the workers, by their pids."""
    workers = shell.run("top", "--once", "--json", "--workers").json["workers"]
    return {worker["worker"].rpartition(":")[2]: worker for worker in workers}


def heard(call: Viewer, pid: int) -> Answer | None:
    """Return the answer of the worker with this pid."""
    return next((answer for answer in call.read() if answer.worker.endswith(f":{pid}")), None)


@pytest.mark.long
def test_top_shows_every_worker_and_what_each_one_runs(tmp_path: Path, url: str, shell: Shell) -> None:
    # Given two workers, as on two hosts, one of which runs a job
    (tmp_path / "a").mkdir()
    busy_arguments = "['default'], processes=2, threads=2"
    with worker(tmp_path, url, busy_arguments) as busy, worker(tmp_path / "a", url, "['mail'], processes=1") as idle:
        until(lambda: busy.log.count(" working ") == 2 and " working " in idle.log)
        job_id = nap.enqueue(1, 60).id
        until(lambda: app.queue().stats().reserved == 1)
        # When the workers are listed
        seen = look(shell)
        # Then both are listed, and the job with its name
        assert set(seen) == {str(busy.process.pid), str(idle.process.pid)}
        one, other = seen[str(busy.process.pid)], seen[str(idle.process.pid)]
        assert (one["state"], one["processes"], one["at_a_time"], one["running"]) == ("working", 2, 2, 1)
        assert one["queues"] == ["default"]
        ((job),) = one["jobs"]
        assert (job["id"], job["task"], job["attempt"], job["queue"]) == (job_id, "nap", 1, "default")
        assert 0 < job["seconds"] < one["up_for"]
        assert (other["running"], other["jobs"], other["queues"]) == (0, [], ["mail"])
        # And they are in the table for people, and in no listing of queues
        picture = shell.run("top", "--once", "-w").out
        assert "2 workers run 1 job" in picture
        assert [row["queue"] for row in shell.run("stats", "--json").json["queues"]] == ["default"]


@pytest.mark.long
def test_states_in_top_are_those_of_the_worker(tmp_path: Path, url: str, shell: Shell) -> None:
    with worker(tmp_path, url, "processes=1") as process:
        process.wait_until_working()
        call = Viewer(app.backend)
        call.start()

        def state() -> str | None:
            answer = heard(call, process.process.pid)
            return None if answer is None else answer.state

        until(lambda: state() == "working")
        process.send(signal.SIGUSR2)
        until(lambda: state() == "paused")
        process.send(signal.SIGCONT)
        until(lambda: state() == "working")
        shell.run("down")
        until(lambda: state() == "down")
        shell.run("up")
        nap.enqueue(1, 60)
        until(lambda: (answer := heard(call, process.process.pid)) and answer.running == 1)
        process.send(signal.SIGTERM)
        until(lambda: state() == "draining")
        call.close()


def test_several_viewers_each_get_all_answers(tmp_path: Path, url: str) -> None:
    with worker(tmp_path, url, "processes=1") as process:
        process.wait_until_working()
        calls = [Viewer(app.backend) for _ in range(3)]
        for call in calls:
            call.start()
        for call in calls:
            until(lambda call=call: heard(call, process.process.pid))  # type: ignore[misc]  # bound at once
        for call in calls:
            call.close()


@pytest.mark.long
def test_a_killed_viewer_leaves_no_jobs_behind(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker(tmp_path, url, "processes=1") as process:
        process.wait_until_working()
        # Given a viewer that has read an answer and is killed
        monkeypatch.setattr(presence, "_CALL_SECONDS", 8.0)
        call = Viewer(app.backend)
        call.start()
        until(lambda: heard(call, process.process.pid))
        asked = set(PRESENCE_QUEUES)
        until(lambda: any(app.backend.stats(queue).ready for queue in asked))
        # When its call has ended, then the answers to it are cleared, also later ones
        until(lambda: not asked & set(app.backend.queues()))
        time.sleep(2.0)
        assert not asked & set(app.backend.queues())
        call._consumer.close()  # as the viewer's death does
        # And the worker works as before
        quick.enqueue(1)
        until(lambda: app.queue().stats().ready == 0)
