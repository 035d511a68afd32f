"""Unique jobs. The module has the option *unique* of a task or a call, and makes the key that the backend gets."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Sequence  # noqa: TC003 - the documentation shows the types of the fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from .backend.unique import UniqueKey, UniqueUntil
from .errors import OptionInvalid
from .formatting import shown
from .json_check import check_json
from .validation import check_timeout

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Mapping

OnConflict: TypeAlias = Literal["keep", "replace", "follow", "error"]

# The first bytes of every hashed text. With another number in ``_PURPOSE``, all new keys would differ from the stored
# keys.
_PURPOSE = b"multiq unique 1\0"
_encoder = msgspec.json.Encoder(order="sorted")


class Unique(msgspec.Struct, frozen=True, kw_only=True):
    """Makes jobs unique. While one job of a queue has a key, no other job with the same key is added to the queue.

    - *by*: names of the task's parameters. Jobs of the task have the same key if the arguments named in *by* are equal.
      With None, all arguments must be equal. With an empty list, all jobs of the task have the same key.
    - *until*: how long a job has its key. ``"gone"``: until the job is done or deleted. ``"buried"``: until the job is
      done, deleted or buried. ``"reserved"``: until the job's first start. Default: ``"gone"``.
    - *on_conflict*: what an enqueue does if another job has the key. ``"keep"``: the enqueue returns the handle of the
      other job, and ``JobHandle.was_new`` is False. ``"replace"``: like ``"keep"``, but a waiting job gets the new
      arguments, options and due time. A running or failed job does not change. ``"follow"``: one job with the key runs,
      and at most one job with the key waits. The waiting job gets the new arguments, as with ``"replace"``.
      ``"error"``: the enqueue raises ``JobExists``. Default: ``"keep"``.
    - *hold*: seconds, or a timedelta. The key stays taken for at least *hold* after the enqueue, even if the job is
      done earlier.
    - *max_wait*: seconds, or a timedelta. A job that is replaced again and again becomes due within *max_wait* after
      its first enqueue.

    Raises ``OptionInvalid``.
    """

    by: Sequence[str] | None = None
    until: UniqueUntil = "gone"
    on_conflict: OnConflict = "keep"
    hold: float | dt.timedelta = 0.0
    max_wait: float | dt.timedelta | None = None

    def __post_init__(self) -> None:
        if self.by is not None and (isinstance(self.by, str) or not _are_names(self.by)):
            raise OptionInvalid(f"by must be a list with names of the task's parameters, got {shown(self.by)}")
        _check_word("until", self.until, get_args(UniqueUntil))
        _check_word("on_conflict", self.on_conflict, get_args(OnConflict))
        _seconds(self.hold, "hold")
        if self.on_conflict == "follow" and (self.until != "gone" or self.hold):
            raise OptionInvalid(
                "on_conflict='follow' must be given without until and hold: with 'follow', a job has its key only "
                "until the job starts, so that a second job with this key can wait"
            )
        if self.max_wait is None:
            return
        _seconds(self.max_wait, "max_wait")
        if self.on_conflict not in {"replace", "follow"}:
            raise OptionInvalid(
                f"max_wait must be given with on_conflict='replace' or 'follow', got {shown(self.on_conflict)}: only a "
                "replaced job gets another due time"
            )

    @property
    def follows(self) -> bool:
        """Whether a job waits while another job with the same key runs. Waiting for another job with the same key needs
        the capability ``limits``."""
        return self.on_conflict == "follow"

    def check(self, task: str, signature: inspect.Signature) -> Unique:
        """Return this object. Raises ``OptionInvalid`` if ``by`` has a name that is not a parameter of the task."""
        for name in self.by or ():
            if name not in signature.parameters:
                raise OptionInvalid(f"by must name parameters of task {task}{signature}, got {shown(name)}")
        return self

    def key_of(
        self,
        task: str,
        signature: inspect.Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        encode: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]] | None = None,
    ) -> UniqueKey:
        """Return the key of a call with checked arguments. *encode* converts the arguments to JSON.

        An argument that is left out has its default. For example, ``f(1)`` and ``f(1, b=0)`` may have the same key.
        Raises ``PayloadInvalid`` for an argument or a default that is not JSON.
        """
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if encode is not None:
            bound = signature.bind(*(encoded := encode(bound.args, bound.kwargs))[0], **encoded[1])
        chosen = bound.arguments if self.by is None else {name: bound.arguments[name] for name in self.by}
        for name, value in chosen.items():
            check_json(value, name)
        text = _encoder.encode([task, chosen])
        return UniqueKey(
            hashlib.sha256(_PURPOSE + text).digest(),
            "reserved" if self.follows else self.until,
            "replace" if self.on_conflict in {"replace", "follow"} else "keep",
            _seconds(self.hold, "hold"),
            None if self.max_wait is None else _seconds(self.max_wait, "max_wait"),
        )


def check_unique(unique: Unique | Literal[False] | None) -> Unique | None:
    """Check the option *unique* of a task or a call. For False, return None. Raises ``OptionInvalid``."""
    if unique is None or unique is False:
        return None
    if not isinstance(unique, Unique):
        raise OptionInvalid(f"unique must be a multiq.Unique(...), or False, got {shown(unique)}")
    return unique


def _are_names(names: Sequence[str]) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)


def _check_word(name: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise OptionInvalid(f"{name} must be one of {', '.join(words)}, got {shown(word)}")


def _seconds(value: float | dt.timedelta, name: str) -> float:
    if isinstance(value, dt.timedelta):
        return check_timeout(value.total_seconds(), name)
    return check_timeout(value, name)
