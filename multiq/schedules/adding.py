"""New schedules are added by one process at a time, because their names are unique over all queues.

The note of a schedule is in the home of its queue, and the condition of a step can name notes of one home only. So two
processes could add the same name in two queues. A note in ``HOME`` is the lock. If its holder dies, the note expires.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from multiq.backend import Drop, Put, Version
from multiq.errors import BackendError, OptionInvalid
from multiq.ids import new_id

from .record import HOME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.backend import Backend

_ADDING = "adding"
_HELD = 10.0  # seconds; a process that adds schedules takes much less
_POLL = 0.05  # seconds
_TRIES = 400


@contextlib.contextmanager
def alone(backend: Backend, is_needed: Callable[[], bool] = lambda: True) -> Iterator[Callable[[], bool]]:
    """Wait until no other process adds schedules, and keep other processes from it for ten seconds.

    Yields a function that returns whether the ten seconds are not over. If they are, another process may have added
    schedules meanwhile. Does nothing, and waits no longer, if *is_needed* returns False. Raises ``OptionInvalid`` after
    20 seconds.
    """
    token = new_id().encode()

    def is_alone() -> bool:
        note = backend.note(HOME, _ADDING)
        return note is not None and bytes(note.value) == token

    for _ in range(_TRIES):
        if not is_needed():
            yield lambda: True
            return
        if backend.carry_out([Put(HOME, _ADDING, token, ttl=_HELD)], when=[Version(HOME, _ADDING, "")]):
            break
        time.sleep(_POLL)
    else:
        raise OptionInvalid(
            "other processes have added schedules for 20 seconds, so this process got no turn: try again"
        )
    try:
        yield is_alone
    finally:
        with contextlib.suppress(BackendError):  # the note expires
            note = backend.note(HOME, _ADDING)
            if note is not None and bytes(note.value) == token:
                backend.carry_out([Drop(HOME, _ADDING)], when=[Version(HOME, _ADDING, note.version)])
