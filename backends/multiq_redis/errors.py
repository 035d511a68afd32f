"""Decides which errors of Redis are retried, and to which ``BackendError`` each other error is converted."""

from __future__ import annotations

import functools
import re
import ssl

import hiredis

from multiq.driverkit.call_retry import Failure
from multiq.driverkit.replies import guarded as _guarded
from multiq.driverkit.resolver import NameTimeoutError
from multiq.errors import BackendCorrupt, BackendError, BackendFull, BackendTimeout, BackendUnavailable

#: temporary errors: a long script runs, a server starts, a slot moves to another node, or there is an election
PASSING = frozenset({"BUSY", "LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS"})

#: another server may accept the call, for instance because this primary has become a replica
ELSEWHERE = frozenset({"READONLY", "MASTERDOWN", "CLUSTERDOWN"})

#: the node of a cluster names another node (cluster.py)
REDIRECTIONS = frozenset({"MOVED", "ASK"})

#: the server accepts reads, but refuses writes
REFUSES_WRITES = frozenset({"MISCONF", "READONLY", "NOREPLICAS", "OOM"})


class CredentialsError(ConnectionError):
    """A credential provider, or a ``redis_connect_func``, raised an error or returned something unusable."""


FAILURES = (OSError, hiredis.ProtocolError)
"""The errors that end a connection."""

guarded = functools.partial(_guarded, server="a Redis", also=(hiredis.HiredisError, StopIteration))
"""The class decorator ``multiq.driverkit.replies.guarded``, for the replies of Redis."""

_ERRORS: dict[str, tuple[type[BackendError], str]] = {
    "OOM": (
        BackendFull,
        "is at its maxmemory, and nothing was stored: wait until workers have finished jobs, or raise maxmemory",
    ),
    "MISCONF": (
        BackendUnavailable,
        "refuses all writes because it cannot save to its disk: look at the disk and the server's log",
    ),
    "READONLY": (BackendUnavailable, "is a replica and takes no writes: name the primary, or use redis+sentinel://"),
    "NOAUTH": (BackendUnavailable, "requires a password: write it into the URL, as in redis://:password@host"),
    "WRONGPASS": (BackendUnavailable, "does not accept this user and password: check both in the URL"),
    "NOPERM": (
        BackendUnavailable,
        "does not allow this user what multiq needs (docs/redis.md lists the commands and keys for ACL SETUSER)",
    ),
    "DENIED": (BackendUnavailable, "is in protected mode: set a password on the server, or bind it to this network"),
    "LOADING": (BackendTimeout, "is still loading its data from the disk: try again later"),
    "BUSY": (BackendTimeout, "runs a script that does not end: find it with SLOWLOG, and end it with SCRIPT KILL"),
    "TRYAGAIN": (BackendTimeout, "is moving the queue to another node, which took too long: try again later"),
    "CLUSTERDOWN": (BackendUnavailable, "reports that its cluster is down: see CLUSTER INFO"),
    "MASTERDOWN": (BackendUnavailable, "is a replica that lost its primary"),
    "NOREPLICAS": (BackendUnavailable, "refuses writes for lack of replicas: see min-replicas-to-write"),
    "WRONGTYPE": (
        BackendCorrupt,
        "has another program's data under a key of multiq's: rename that key, or use another ?prefix= in the URL",
    ),
    "MOVED": (
        BackendUnavailable,
        "is part of a cluster: use redis+cluster:// in the URL, so that multiq follows the queues to their nodes",
    ),
    "ASK": (BackendUnavailable, "is moving the queue to another node"),
    "NOSCRIPT": (BackendUnavailable, "drops scripts as soon as they are loaded: try again later"),
}

_CODE = re.compile(r"-?([A-Z][A-Z]+)\b")
_CODE_INSIDE = re.compile(r"\b(OOM|READONLY|MISCONF|WRONGTYPE|NOPERM|NOREPLICAS|MASTERDOWN|BUSY)\b")
_AUTH = ("invalid password", "without any password configured", "invalid username-password")
_NO_PERMISSION = ("can't run this command", "can't access at least one of the keys")  # inside scripts, without a code
TOO_MANY_CLIENTS = "max number of clients"
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
_IN_SCRIPT = "user_script"


def code_of(error: hiredis.ReplyError) -> str:
    """The error's code, such as ``OOM``. If an error occurs inside a script, Redis 6.2 puts the error's code into the
    text."""
    text = str(error)
    first = _CODE.match(text)
    code = first[1] if first else "ERR"
    if code == "ERR":
        inside = _CODE_INSIDE.search(text)
        code = inside[1] if inside and _IN_SCRIPT in text else code
        if any(words in text for words in _AUTH):
            code = "WRONGPASS"
        if any(words in text for words in _NO_PERMISSION):
            code = "NOPERM"
    return code


def without_arguments(reply: str) -> str:
    """An error reply without the command's arguments.

    If a server does not know a command, its error repeats the command's arguments. The arguments of AUTH contain the
    password.
    """
    return _ARGUMENTS.sub("", reply)


def classify_reply(error: hiredis.ReplyError, *, has_failover: bool) -> Failure:
    """Return whether this server may accept the call later, or whether the server that replaces it after a failover may
    accept the call."""
    code = code_of(error)
    is_passing = code in PASSING or (code in ELSEWHERE and has_failover)
    return Failure.REJECTED if is_passing else Failure.FINAL


def classify_connection_error(error: Exception, *, is_connected: bool) -> Failure:
    """Classifies one of ``FAILURES``. A call without a reply may be repeated, because calls are numbered."""
    if isinstance(error, CredentialsError):
        return Failure.FINAL  # another server would need the same credentials
    if not is_connected:
        return Failure.UNREACHABLE
    return Failure.STALE if getattr(error, "unsent", False) else Failure.REPLY_LOST


def explain(exc: Exception, server: str, timeout: float) -> BackendError:
    """Returns the ``BackendError`` for an error reply or a socket's error. Its message begins with *server*."""
    if isinstance(exc, hiredis.ReplyError):
        return _explain_reply(exc, server)
    if isinstance(exc, TimeoutError):
        return BackendTimeout(f"{server} {_explain_timeout(exc, timeout)}")
    if isinstance(exc, CredentialsError):
        return BackendUnavailable(f"{server} cannot be logged in to: {exc}")
    if isinstance(exc, ssl.SSLError):
        return BackendUnavailable(f"{server} {_explain_tls(exc)}")
    if isinstance(exc, hiredis.ProtocolError):
        return BackendUnavailable(f"{server} does not speak Redis' protocol ({exc}): is it a TLS port, or no Redis?")
    return BackendUnavailable(f"{server} cannot be reached: {getattr(exc, 'strerror', None) or exc}")


def _explain_timeout(exc: TimeoutError, timeout: float) -> str:
    if isinstance(exc, NameTimeoutError):
        return f"has a name that was not found within {timeout:g} s: look at this machine's DNS"
    return (
        f"did not answer within {timeout:g} s: it is stopped, overloaded or cut off; "
        "?timeout= in the URL gives it more time"
    )


def _explain_tls(exc: ssl.SSLError) -> str:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return (
            f"cannot be trusted: {exc.verify_message}; name the authority that signed its certificate with ?ca= in the "
            "URL, and the host as the certificate has it"
        )
    return f"does not speak TLS as expected ({exc.reason}): is it a TLS port?"


def _explain_reply(exc: hiredis.ReplyError, server: str) -> BackendError:
    code = code_of(exc)
    if code in _ERRORS:
        error, sentence = _ERRORS[code]
        return error(f"{server} {sentence} ({_short(exc)})")
    text = str(exc)
    if TOO_MANY_CLIENTS in text:
        return BackendUnavailable(f"{server} has too many clients ({_short(exc)}): raise its maxclients, or close some")
    if _IN_SCRIPT in text:
        return BackendCorrupt(
            f"{server} has data in a queue's keys that another program or a newer multiq wrote: {_short(exc)}"
        )
    return BackendUnavailable(f"{server} refused: {_short(exc)}")


def _short(exc: Exception) -> str:
    text = str(exc)
    return text if len(text) <= 200 else text[:197] + "..."
