"""A scheduler process with a wrong clock, for ``schedule_losses.py``. It looks for due schedules more often than other
schedulers, and makes fewer jobs in advance."""

from __future__ import annotations

import os
import sys
import time

_SKEW = float(os.environ.get("SKEW", "0"))
_wall_clock = time.time
time.time = lambda: _wall_clock() + _SKEW  # SQLite's clock, time.time_ns, stays: it stands for the server's

import multiq  # noqa: E402
from multiq.ids import new_id  # noqa: E402
from multiq.schedules import occurrence_job  # noqa: E402
from multiq.schedules import scheduler as module  # noqa: E402

_EVERY = 0.5  # seconds between two looks: many schedulers meet the same version of a note
_AHEAD = 4.0  # seconds
_PLANT = os.environ.get("PLANT", "")


def plant(app: multiq.App) -> None:
    """Put the bug into this process that the environment names."""
    backend = app.backend
    carry_out = backend.carry_out
    if _PLANT == "local-clock":
        backend.now = lambda home: time.time()  # type: ignore[method-assign]
    elif _PLANT == "no-condition":
        # An id for each occurrence would hide most effects of the bug.
        for each in (module, occurrence_job):
            vars(each)["occurrence_id"] = lambda _name, _occurrence: new_id()

        def without(steps, *, when=()):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            return carry_out(steps)

        backend.carry_out = without  # type: ignore[method-assign]


def main() -> None:
    module.EVERY = _EVERY
    app = multiq.App()
    plant(app)
    scheduler = module.Scheduler(app, ahead=_AHEAD)
    while True:
        try:
            pause = scheduler.look()
        except multiq.BackendError as exc:
            print(exc, file=sys.stderr)
            pause = _EVERY
        time.sleep(pause)


if __name__ == "__main__":
    main()
