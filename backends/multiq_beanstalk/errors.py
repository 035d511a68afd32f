"""Translates beanstalkd's error replies and socket errors into multiq's exceptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import greenstalk

from multiq.driverkit.call_retry import Failure
from multiq.driverkit.resolver import NameTimeoutError
from multiq.errors import BackendError, BackendFull, BackendTimeout, BackendUnavailable

from .replies import ProtocolError

if TYPE_CHECKING:
    from multiq.driverkit.net import Address

CONNECTION_ERRORS = (OSError, ProtocolError)
"""Exceptions after which a connection is closed."""

_ERRORS: dict[bytes, tuple[type[BackendError], str]] = {
    b"DRAINING": (
        BackendUnavailable,
        "is draining: it takes no new jobs until it is restarted, and still hands out the jobs that it has",
    ),
    b"OUT_OF_MEMORY": (
        BackendFull,
        "has no memory, or no room in its log, for another job: let workers finish jobs, or give the server more",
    ),
    b"BURIED": (BackendFull, "has no memory to make the job ready, and has buried it"),
    b"JOB_TOO_BIG": (BackendError, "finds the body too large: start it with a larger -z"),
    b"INTERNAL_ERROR": (BackendError, "reports an internal error: look at its log"),
    b"UNKNOWN_COMMAND": (
        BackendError,
        "does not know a command: its version is too old, multiq needs beanstalkd 1.8 or newer",
    ),
    b"BAD_FORMAT": (BackendError, "does not understand a command of multiq's: is it beanstalkd 1.8 or newer?"),
}


def classify(exc: Exception) -> Failure:
    """Return the kind of a connection error, for a command that may be repeated.

    A command is repeated only if a second execution does no harm. These commands are reads and ``pause-tube``.
    """
    return Failure.REPLY_LOST if isinstance(exc, ConnectionError) else Failure.FINAL


def explain(exc: Exception, address: Address, timeout: float) -> BackendError:
    """Return multiq's error for a socket error or a malformed reply."""
    server = server_name(address)
    if isinstance(exc, NameTimeoutError):
        return BackendTimeout(
            f"{server} has a name that was not found within {timeout:g} s: look at this machine's DNS"
        )
    if isinstance(exc, TimeoutError):
        return BackendTimeout(
            f"{server} did not answer within {timeout:g} s: it is stopped, overloaded or cut off; ?timeout= "
            "in the URL gives it more time"
        )
    if isinstance(exc, ProtocolError):
        return BackendUnavailable(f"{server} does not speak beanstalkd's protocol: {exc}")
    if isinstance(exc, OSError):
        return BackendUnavailable(f"{server} cannot be reached: {exc.strerror or exc}")
    return BackendUnavailable(f"{server} failed: {exc}")


def reply_error(line: bytes, address: Address) -> BackendError:
    """Return multiq's error for an error reply, with greenstalk's exception as its cause."""
    word, *values = line.split() or [b""]
    error, sentence = _ERRORS.get(word, (BackendUnavailable, "sent an unexpected reply"))
    made = error(f"{server_name(address)} {sentence} ({line[:80].decode('ascii', 'replace')})")
    known: type[greenstalk.Error] | None = greenstalk.ERROR_RESPONSES.get(word)
    made.__cause__ = greenstalk.UnknownResponseError(word, values) if known is None else known(values)
    return made


def is_refusal(line: bytes) -> bool:
    """Whether a reply says that the server did not carry the command out."""
    word, *_ = line.split() or [b""]
    return word in _ERRORS or word in greenstalk.ERROR_RESPONSES


def server_name(address: Address) -> str:
    """Return the server's name for messages."""
    return f"beanstalkd at {address}" if isinstance(address, str) else f"beanstalkd at {address[0]}:{address[1]}"
