"""Runs the examples in a temporary folder, with a real worker in a process of its own, and prints a report."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from .diary import Entry, read_diary
from .report import Check, Counts, Narrator, Outcome, report, report_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

__all__ = ["BaseStory", "Check", "Counts", "Outcome", "Scene", "run"]

EXIT_INTERRUPTED = 130
PATIENCE = 30.0  # seconds until something that does not happen counts as failed


class BaseStory:
    """One example. Its ``with`` block sets up what it needs, such as a server."""

    title: ClassVar[str]
    queue: ClassVar[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """No setup was needed."""

    def environment(self) -> dict[str, str]:
        """Variables for the worker that are known only now."""
        return {}

    def play(self, scene: Scene) -> Outcome:
        raise NotImplementedError


class Failed(Exception):
    """The story cannot continue."""


class Scene:
    """The functions that a story uses."""

    def __init__(self, story: BaseStory, narrator: Narrator, worker: subprocess.Popen[bytes], diary: Path) -> None:
        self._story = story
        self._narrator = narrator
        self._worker = worker
        self._diary = diary

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        self._narrator.say(self._story.title, sentence)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raises ``Failed`` if it does not become true, or if the worker has ended."""
        give_up_at = time.monotonic() + PATIENCE
        while not condition():
            if self._worker.poll() is not None:
                raise Failed(f"the worker ended with code {self._worker.returncode} before: {what}")
            if time.monotonic() > give_up_at:
                raise Failed(f"waited {PATIENCE:g} s in vain until {what}")
            time.sleep(0.02)

    def follow(self, jobs: int) -> None:
        """Wait until this number of the story's jobs has ended, and show how many have."""
        from .app import app  # created by the stories, once the environment is set

        queue = app.queue(self._story.queue)

        def all_ended() -> bool:
            ended = self.happened("done") + self.happened("buried")
            self._narrator.progress(self._story.title, ended, jobs)
            return ended >= jobs and queue.stats().reserved == 0  # the worker settles a job after it wrote the diary

        self.until(all_ended, f"{jobs} jobs have come to an end")

    def count(self, *, queued: int, delayed: int, cancelled: int) -> Counts:
        """Return the story's own counts, with the counts of the worker's diary."""
        return Counts(
            queued=queued,
            delayed=delayed,
            retried=self.happened("retried"),
            cancelled=cancelled,
            worked_off=self.happened("done"),
            buried=self.happened("buried"),
        )

    def happened(self, what: str) -> int:
        """The number of entries of the kind *what* (done, retried or buried) that the worker's diary has for this
        story's jobs."""
        return sum(entry.what == what for entry in self._entries())

    def _entries(self) -> list[Entry]:
        return read_diary(self._diary, self._story.queue)


def run(*names: str) -> int:
    """Play these examples side by side, with one worker. Returns 0 if all went as it should, else 1."""
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="multiq-demo-") as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        _set_environment(folder)
        stories = [stack.enter_context(_load(name)) for name in names]
        narrator = stack.enter_context(Narrator([story.title for story in stories]))
        log = folder / "worker.log"
        try:
            outcomes = _play(stories, narrator, folder, log)
        except Failed as failed:
            narrator.close()
            return report_failure(str(failed), log.read_text())
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return report(outcomes, time.monotonic() - started_at)


def _set_environment(folder: Path) -> None:
    """Must be called before the stories are imported, because their modules read the environment at import."""
    os.environ.update(
        MULTIQ_URL=f"sqlite:///{folder}/shop.db",
        SHOP_DATABASE=str(folder / "shop.db"),
        SHOP_PAYMENT_TIME="3",
        SHOP_MAIL_FIRST_WAIT="0.6",
        ALARM_SIREN=str(folder / "siren.jsonl"),
        EXAMPLES_DIARY=str(folder / "diary.jsonl"),
    )


def _load(name: str) -> BaseStory:
    try:
        story: BaseStory = importlib.import_module(f"examples.{name}.story").Story()
    except ModuleNotFoundError as missing:
        raise SystemExit(f"the examples need {missing.name}: pip install 'multiq[demo]'") from missing
    return story


def _play(stories: Sequence[BaseStory], narrator: Narrator, folder: Path, log: Path) -> list[Outcome]:
    """Play all stories at once, each in a thread, and stop the worker, which must exit with 0."""
    diary = folder / "diary.jsonl"
    with _worker(stories, log) as worker, ThreadPoolExecutor() as threads:
        plays = [threads.submit(story.play, Scene(story, narrator, worker, diary)) for story in stories]
        outcomes = [play.result() for play in plays]
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(PATIENCE)
    if code != 0:
        raise Failed(f"the worker ended with code {code} when it was told to stop")
    return outcomes


@contextlib.contextmanager
def _worker(stories: Sequence[BaseStory], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``multiq worker``, started from the command line as a user would; ended when the block ends, in any case."""
    command = [
        str(Path(sysconfig.get_path("scripts")) / "multiq"), "worker", "examples.demo_app:app",
        "--queues", ",".join(story.queue for story in stories), "--threads", "8",
    ]  # fmt: skip
    environment = dict(os.environ)
    for story in stories:
        environment.update(story.environment())
    with log.open("wb") as output:
        worker = subprocess.Popen(  # noqa: S603 - a fixed command
            command, cwd=Path(__file__).parents[1], env=environment, stdout=output, stderr=output
        )
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()
