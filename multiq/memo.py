"""Memos of jobs. A memo is JSON that is stored with a job while the job runs. The job's next attempt reads the memo.

``docs/results.md`` describes the format of a memo. A memo has the job's progress, the values of its steps, and the
errors of its earlier attempts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import msgspec

from .envelope import refusal_of
from .errors import OptionInvalid, PayloadInvalid
from .formatting import shown
from .outcome import ERRORS_KEPT, AttemptError

if TYPE_CHECKING:
    from .backend import Lease

_MESSAGE_MAX = 500  # the most characters of a progress message


class Progress(msgspec.Struct, frozen=True):
    """The progress that a job has set by its last call of ``JobContext.progress``."""

    fraction: float
    """A number from 0 to 1."""
    message: str = ""


class Memo(msgspec.Struct, omit_defaults=True):
    """The content of a memo. The values of steps are JSON."""

    progress: Progress | None = None
    steps: dict[str, msgspec.Raw] = {}
    errors: list[AttemptError] = []

    def add_error(self, error: AttemptError) -> None:
        self.errors = [*self.errors, error][-ERRORS_KEPT:]


class RunningMemo(Protocol):
    """The memo of a job that a worker runs. Any thread of the worker's process may call the methods."""

    def set_progress(self, progress: Progress) -> None:
        """Ask the worker to store the progress soon. Raises ``LeaseLost``."""

    def find_step(self, name: str) -> bytes | None:
        """Return the JSON of a step's value. None means that the step is not done."""

    def store_step(self, name: str, value: bytes) -> None:
        """Store the JSON of a step's value now. Raises ``LeaseLost``, ``PayloadTooLarge``, ``BackendError``."""


class Cancellation(Protocol):
    """A request to cancel a running job."""

    def error(self) -> Exception:
        """Return the error to raise in the task. After a call of ``error``, the worker does not interrupt the task."""


class Memos(Protocol):
    """The memos of the jobs that a worker runs, and the requests to cancel these jobs."""

    def cancel_of(self, lease: Lease) -> Cancellation | None:
        """Return the request to cancel the job, or None if there is no request."""

    def of(self, lease: Lease) -> RunningMemo:
        """Return the memo of a running job. Raises ``LeaseLost``, ``Unsupported``, ``PayloadInvalid``."""


_decoder = msgspec.json.Decoder(Memo)
_encode = msgspec.json.Encoder().encode


def encode_memo(memo: Memo) -> bytes:
    return _encode(memo)


def decode_memo(body: bytes | None) -> Memo:
    """Decode a memo. For an empty body, return an empty memo. Raises ``PayloadInvalid``."""
    if not body:
        return Memo()
    if (refusal := refusal_of(body)) is not None:
        raise PayloadInvalid(f"the job's memo cannot be read: {refusal}")
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise PayloadInvalid(f"the job's memo cannot be read: {exc}") from exc


def readable_memo(body: bytes | None) -> Memo:
    """``decode_memo``, but a memo that cannot be read counts as empty.

    Another program, or another version of multiq, may have stored it.
    """
    try:
        return decode_memo(body)
    except PayloadInvalid:
        return Memo()


def check_progress(fraction: float, message: str) -> Progress:
    """Return a ``Progress`` whose message is cut short. Raises ``OptionInvalid``."""
    is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not is_number or not math.isfinite(fraction) or not 0 <= fraction <= 1:
        raise OptionInvalid(f"fraction must be a number from 0 to 1, got {shown(fraction)}")
    if not isinstance(message, str):
        raise OptionInvalid(f"message must be text, got {shown(message)}")
    text = str.__str__(message).encode("utf-8", "replace").decode()
    return Progress(float(fraction), text if len(text) <= _MESSAGE_MAX else text[: _MESSAGE_MAX - 3] + "...")
