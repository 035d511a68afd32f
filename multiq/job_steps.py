"""The steps of a job (``JobContext.step``): returns the value that an earlier attempt has stored, or calls the function
and stores its value.

The values are a part of the job's memo. The worker stores the memo (``multiq.worker.execution.running_memos``).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from . import timeout_notices
from .envelope import decode_json, encode_json
from .errors import ArgumentsInvalid, OptionInvalid
from .formatting import shown
from .json_check import check_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .memo import RunningMemo

_NAME_MAX = 200  # characters
_VALUE_MAX = 2**31  # bytes


def run_step(memo: RunningMemo, name: str, function: Callable[[], Any]) -> Any:
    """Return the value of a step. ``JobContext.step`` lists the errors."""
    name = _checked(name)
    stored = memo.find_step(name)
    if stored is None:
        if inspect.iscoroutinefunction(function):
            raise ArgumentsInvalid(f"step {name!r} must have a plain function: await astep(...) for a coroutine")
        stored = _encode(name, function())
        memo.store_step(name, stored)
        if timeout_notices.pending:
            timeout_notices.raise_if_pending()
    return decode_json(stored)


async def arun_step(memo: RunningMemo, name: str, function: Callable[[], Awaitable[Any]]) -> Any:
    """``run_step`` for a coroutine function, without blocking the event loop."""
    import asyncio

    name = _checked(name)
    stored = memo.find_step(name)
    if stored is None:
        value = function()
        stored = _encode(name, await value if inspect.isawaitable(value) else value)
        await asyncio.to_thread(memo.store_step, name, stored)
    return decode_json(stored)


def _checked(name: Any) -> str:
    """Check the name of a step. Raises ``OptionInvalid``."""
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_MAX or not name.isprintable():
        raise OptionInvalid(f"a step's name must be printable text of 1 to {_NAME_MAX} characters, got {shown(name)}")
    return str.__str__(name)


def _encode(name: str, value: Any) -> bytes:
    check_json(value, f"the value of step {name}")
    return encode_json(value, max_body=_VALUE_MAX)  # in effect no limit, because the memo's limit is smaller
