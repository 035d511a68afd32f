"""The memos of running jobs: a job's thread changes its memo, and the fetcher stores it with a touch of the lease.

=====================  =====================================================================  =======================
guarantee              how                                                                    cost
=====================  =====================================================================  =======================
one order of writes    only the fetcher sends memos, under its lock. Each memo is read under   a step waits for the
                       this lock, so a later touch never stores an older memo                 fetcher's current call
a step that returns    ``store_step`` returns after the reply, and repeats the touch after    one settle for each step
is stored              an error of the backend until the lease's end
progress is cheap      the heartbeat stores it, at most once a second                         up to a second's delay
=====================  =====================================================================  =======================
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.driverkit.fork import forks
from multiq.errors import LeaseLost, MultiqError, PayloadTooLarge
from multiq.memo import Memo, Progress, decode_memo, encode_memo

if TYPE_CHECKING:
    from multiq.app import App
    from multiq.backend import Lease
    from multiq.outcome import AttemptError
    from multiq.worker.processes.inflight import Held

    from .cancels import Cancel
    from .fetcher import Fetcher

_PROGRESS_EVERY = 1.0  # seconds between two touches that store a job's progress


class JobMemos:
    """The memos of the jobs that this process runs (``multiq.memo.Memos``)."""

    def __init__(self, app: App, fetcher: Fetcher) -> None:
        self._backend = app.backend
        self._max_body = app.settings.max_body
        self._fetcher = fetcher
        self._generation = forks.generation
        self._making = threading.Lock()

    def of(self, lease: Lease) -> JobMemo:
        if forks.generation != self._generation:
            raise MultiqError("progress and steps must be stored in the worker's process, and this is a fork of it")
        if not self._backend.capabilities.memos:
            raise self._backend.unsupported("memos")
        held = self._fetcher.held_of(lease)
        if held is None:
            raise LeaseLost(lease.queue, lease.id)
        with self._making:
            if held.memo is None:
                held.memo = JobMemo(held, self._fetcher, self._limit())
        return held.memo

    def cancel_of(self, lease: Lease) -> Cancel | None:
        """Return the request to cancel a running job. None: there is no request."""
        held = self._fetcher.held_of(lease)
        return None if held is None else held.cancel

    def current(self, lease: Lease) -> JobMemo | None:
        """Return a running job's memo. None: the job has not used its memo, or does not run in this process."""
        held = self._fetcher.held_of(lease)
        return None if held is None else held.memo

    def _limit(self) -> int:
        most = self._backend.capabilities.max_body
        return self._max_body if most is None else min(self._max_body, most)


class JobMemo:
    """The memo of one running job (``multiq.memo.RunningMemo``).

    ``take`` and ``sent`` are called under the fetcher's lock.
    """

    def __init__(self, held: Held, fetcher: Fetcher, limit: int) -> None:
        self._held = held
        self._fetcher = fetcher
        self._limit = limit
        self._memo = decode_memo(held.lease.memo)
        self._changing = threading.Lock()
        self._version = self._sent_version = 0
        self._sent_at = -_PROGRESS_EVERY
        self._is_over = False  # whether a verdict contains the memo; after that, the memo must not change

    # --- the job's threads ---

    def set_progress(self, progress: Progress) -> None:
        with self._changing:
            self._check_open()
            self._memo.progress = progress
            self._version += 1
        self._fetcher.touch_at(self._held, max(time.monotonic(), self._sent_at + _PROGRESS_EVERY))

    def find_step(self, name: str) -> bytes | None:
        value = self._memo.steps.get(name)
        return None if value is None else bytes(value)

    def store_step(self, name: str, value: bytes) -> None:
        with self._changing:
            self._check_open()
            before = self._memo
            after = Memo(before.progress, {**before.steps, name: msgspec.Raw(value)}, before.errors)
            size = len(encode_memo(after))
            if size > self._limit:
                raise PayloadTooLarge(
                    size, self._limit, f"the job's memo has no room for step {name!r}: keep the data elsewhere"
                )
            self._memo = after
            self._version += 1
        try:
            self._fetcher.store_memo(self._held)
        except BaseException:
            with self._changing:  # without this, the attempt would skip a step that is not stored
                steps = {other: kept for other, kept in self._memo.steps.items() if other != name}
                self._memo = Memo(self._memo.progress, steps, self._memo.errors)
                self._version += 1
            raise

    # --- the fetcher ---

    @property
    def is_pending(self) -> bool:
        """Whether the memo has changed since it was sent."""
        return self._version != self._sent_version

    def take(self) -> tuple[int, bytes | None]:
        """Return the memo's version and bytes. The bytes are None if the memo is unchanged or too large."""
        with self._changing:
            return self._version, self._encode(self._memo) if self.is_pending else None

    def sent(self, version: int) -> None:
        """Record that the backend has stored this version."""
        self._sent_version = version
        self._sent_at = time.monotonic()

    @property
    def next_touch(self) -> float:
        """The time of the next touch that stores this memo. Infinite if the memo is unchanged."""
        return self._sent_at + _PROGRESS_EVERY if self.is_pending else float("inf")

    # --- the runner ---

    def with_error(self, error: AttemptError | None) -> bytes | None:
        """Return the memo's bytes for the verdict on a run. None: the memo is unchanged.

        Adds the error, unless the memo gets too large. The memo cannot change after this call. If an overdue job stored
        another step after this call, the verdict would undo that step.
        """
        with self._changing:
            self._is_over = True
            return failed_memo(self._memo, error, self._limit, is_changed=self.is_pending)

    def _check_open(self) -> None:
        if self._is_over:
            raise LeaseLost(self._held.lease.queue, self._held.lease.id)

    def _encode(self, memo: Memo) -> bytes | None:
        body = encode_memo(memo)
        return body if len(body) <= self._limit else None


def failed_memo(memo: Memo, error: AttemptError | None, limit: int | None, *, is_changed: bool) -> bytes | None:
    """Return the bytes of *memo*. *error* is added if the memo stays within *limit*. None: there is nothing to
    store."""
    bodies = [] if not is_changed else [encode_memo(memo)]
    if error is not None:
        longer = Memo(memo.progress, memo.steps, memo.errors)
        longer.add_error(error)
        bodies.insert(0, encode_memo(longer))
    return next((body for body in bodies if limit is None or len(body) <= limit), None)
