"""The sidecar: a process that calls the backend on behalf of the whole worker.

- The sidecar settles the jobs of dead children (``dead_children``), and renews the leases of stuck children
  (``stuck_process_leases``).
- The sidecar polls the control flags (``multiq down``, ``multiq restart``), and writes them to the shared state.
- The sidecar carries out the steps in other queues that dead processes have left behind (``flow_upkeep``).
- The sidecar makes the occurrences of schedules (``scheduling``).
- A thread of the sidecar's process enqueues the jobs of outboxes (``outbox_relaying``).
- The sidecar decides how many processes a worker that scales needs (``scaling``).
- The sidecar writes the health file, serves the HTTP pages, and answers viewers (``multiq top``).
- When the supervisor dies, the sidecar declares the tables of ended children dead, kills children that do not end
  (``orphans``), and ends last.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
import zlib
from typing import TYPE_CHECKING

from multiq.control.flags import Control
from multiq.control.presence import Responder
from multiq.errors import MultiqError
from multiq.worker.execution.hanging_calls import run_in_thread

from .dead_children import Recovery
from .flow_upkeep import FlowUpkeep
from .inflight import FREE
from .orphans import OrphanedChildren
from .scheduling import Scheduling
from .stored_limits import StoredLimits
from .stuck_process_leases import StuckProcesses

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from multiq.app import App
    from multiq.control.flags import ControlState
    from multiq.worker.monitoring.health import Health
    from multiq.worker.monitoring.health_file import HealthFile
    from multiq.worker.monitoring.http_server import Server

    from .lifeline import Lifeline
    from .scaling import Scaling
    from .shared_state import SharedState

_log = logging.getLogger("multiq.sidecar")

_POLL = 0.25  # seconds; short enough for a lease with the shortest ttr of one second
_CONTROL_EVERY = 5.0  # seconds
_ANSWER_EVERY = 1.0  # seconds between two answers to viewers
_LAST_EVENTS = 2.0  # seconds that coroutine subscribers get at the end
_LAST_CALLS = 2.0  # seconds that the last calls get, all together; the supervisor waits for longer


class Sidecar:
    """Runs until the supervisor has ended and all jobs of the children are settled.

    - *app*: the app with the backend and the subscribers of ``JobCrashed``.
    - *notifications*: the socket on which the supervisor reports dead children. The socket closes when the supervisor
      ends.
    - *lifeline*: is cut when the children must end. In a reload, the new program cuts it when it takes over.
    - *patience*: seconds after the lifeline is cut until remaining children are killed.
    - *force*: whether the worker works even if the connection is down.
    - *shares_loop*: see ``Recovery``.
    - *schedules*: whether the sidecar makes the occurrences of schedules.
    - *queues*: the worker's queues. The sidecar relays the steps that dead processes have left in them.
    - *scaling*: decides how many processes are needed. None: their number is fixed.
    - *health*: the source of the health file and of the answers to viewers.
    """

    def __init__(
        self,
        app: App,
        shared_state: SharedState,
        notifications: socket.socket,
        lifeline: Lifeline,
        patience: float,
        *,
        force: bool,
        shares_loop: bool,
        schedules: bool,
        queues: Sequence[str],
        scaling: Scaling | None,
        health: Health,
        health_file: HealthFile | None,
        server: Server | None,
    ) -> None:
        self._tables = shared_state.tables
        self._worker_row = shared_state.worker
        self._notifications = notifications
        self._lifeline = lifeline
        self._patience = patience
        self._events = app.events
        self._recovery = Recovery(app, shared_state, shares_loop=shares_loop)
        self._stuck_processes = StuckProcesses(app, shared_state, self._recovery)
        self._orphaned_children = OrphanedChildren(shared_state)
        self._control = Control(app.backend)
        self._flow_upkeep = FlowUpkeep(app, queues)
        self._stored_limits = StoredLimits(app)
        self._scheduling = Scheduling(app) if schedules else None
        self._scaling = scaling
        self._obeys_down = not force
        self._poll_at = 0.0
        self._health = health
        self._responder = Responder(app.backend)
        self._answer_at = 0.0
        self._health_file = health_file
        self._server = server
        self._kill_requested = False

    def run(self) -> int:
        is_alone, kill_at = False, float("inf")
        if self._scaling is not None:
            self._scaling.start()
        while True:
            if not is_alone and not self._is_supervisor_alive():
                is_alone = True
                if self._scaling is not None:
                    self._scaling.stop()
                if self._server is not None:
                    self._server.close()  # after a reload, the new program uses the address
            if is_alone and kill_at == float("inf") and self._lifeline.is_cut():
                kill_at = time.monotonic() + self._patience
            self._worker_row.sidecar_beat = time.monotonic()
            self._watch_children()
            self._recovery.settle_dead()
            self._stuck_processes.touch()
            if is_alone:
                self._orphaned_children.end(killing=self._kill_requested or time.monotonic() >= kill_at)
                if all(table.state == FREE for table in self._tables):
                    self._events.finish(_LAST_EVENTS)
                    self._make_last_calls()
                    return 0
                time.sleep(_POLL)
            else:
                self._poll_control(time.monotonic())
                self._flow_upkeep.relay_if_due()
                if self._scheduling is not None:
                    self._scheduling.look_if_due()
                self._flow_upkeep.tidy_if_due()
                self._stored_limits.store_if_due()

    def kill(self) -> None:
        """Kill the children when the supervisor has ended. Signal handlers may call this method."""
        self._kill_requested = True

    def _make_last_calls(self) -> None:
        """Let telemetry send what it has about the sidecar's own work, such as the jobs of schedules."""
        give_up_at = time.monotonic() + _LAST_CALLS
        for is_done in [run_in_thread(call) for call in self._events.last_calls]:
            is_done.wait(max(0.0, give_up_at - time.monotonic()))

    def _poll_control(self, now: float) -> None:
        is_time = now >= self._poll_at
        with contextlib.suppress(MultiqError):  # the children report the outage
            if is_time:
                self._poll_at = now + _CONTROL_EVERY
                state, down = self._control.read(), self._control.read_down()
                self._worker_row.contact = time.monotonic()
                self._worker_row.has_cancels = down.are_cancels_asked
                self._publish_down(is_down=self._obeys_down and down.is_down)
                self._publish_restart(state, uptime=now - self._worker_row.started_at)
                # This is written last: a reader who sees this time knows that the other values were read after it.
                self._worker_row.asked_at = now
                if state.has_schedules and self._scheduling is not None:
                    self._scheduling.notice()
                if state.is_presence_asked:
                    self._responder.find_viewers()
            if now >= self._answer_at and not self._responder.is_idle:
                self._answer_at = now + _ANSWER_EVERY
                self._responder.answer(self._health.answer())
        if is_time and self._health_file is not None:
            self._health_file.write(self._health.report())

    def _publish_down(self, *, is_down: bool) -> None:
        if is_down != bool(self._worker_row.is_down):
            _log.warning("the connection is %s", "down: no more jobs are taken" if is_down else "up again")
            self._worker_row.is_down = is_down

    def _publish_restart(self, state: ControlState, *, uptime: float) -> None:
        """Count the request if it is younger than the worker. *uptime* is the worker's age before the call."""
        mark = 1.0 if state.last_restart is None else 2.0 + zlib.crc32(state.last_restart.encode())
        # the mark survives this sidecar, so its successor knows the last request
        before, self._worker_row.restart_mark = self._worker_row.restart_mark, mark
        # The first reads of the control state can fail. So the first state that is read can already have a request,
        # which counts if it is younger than the worker. An age of 0 is not trusted: after the backend's clock was set
        # back, every old request has this age.
        if mark not in {1.0, before} if before else 0 < state.restart_age < uptime:
            _log.warning("a restart of all workers of this connection was requested: this worker ends")
            self._worker_row.restarts += 1

    def _is_supervisor_alive(self) -> bool:
        """Wait up to a quarter of a second for a notification of the supervisor. Returns False if the supervisor has
        ended."""
        poll = select.poll()
        poll.register(self._notifications, select.POLLIN)
        return not poll.poll(_POLL * 1000) or bool(self._notifications.recv(64))

    def _watch_children(self) -> None:
        for ended in self._orphaned_children.watch():
            self._stuck_processes.forget(ended)
