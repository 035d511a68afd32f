"""The interface between multiq and a driver. To write a driver, you need only this package.

A driver gets and returns bytes, seconds and ids. It is responsible for every atomic state change, for its keys or
tables, its waiting, its connections and its clock. It knows nothing of tasks, JSON, retries or events. multiq's core
checks names, ranges and types before it calls a driver, so a driver need not check them again.

The states of a job, and the verbs that move it::

            enqueue(delay>0)              release(delay>0)
   --------------------------> DELAYED <------------------.
   enqueue                        | due, or kick_job      |
   --------------------------> READY ----- reserve -----> RESERVED ---- ack ----> gone
                                ^  ^---- lease ended ------'  |  |
                                |  '------ release -----------'  | bury
                                '-- kick, kick_job -- BURIED <---'

Where to read on:

- ``docs/contract.md``: what each verb promises, paragraph by paragraph;
- ``multiq.conformance``: tests whether a driver keeps the contract;
- ``multiq.backend.memory``: the contract as a program;
- ``docs/writing-a-driver.md``: the guide.

Errors: a driver raises only ``multiq.errors`` (from the client library's exception). It raises ``BackendUnavailable``
if another attempt may succeed, and ``EnqueueUncertain`` for an enqueue that may have been carried out. Each verb must
be safe to repeat after such an error. An enqueue is, because the caller chooses the ids of jobs. For ``reserve`` the
driver chooses a fresh token for each call: by this token it finds out, after a lost reply, what the call has reserved.
"""

from __future__ import annotations

from .base import (
    OPTIONAL_PARTS,
    Backend,
    Consumer,
    Diagnosis,
    Inspection,
    Management,
    Migrations,
    Pausing,
    Purging,
)
from .capabilities import POWERS, Capabilities, Claim, Gap
from .diagnostics import Finding, Schema, SchemaState
from .types import (
    DELAY_MAX,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    STORED_STATES,
    TTR_DEFAULT,
    TTR_MIN,
    Abandon,
    Ack,
    Bury,
    GiveBack,
    JobRecord,
    Lease,
    NewJob,
    Page,
    QueueStats,
    Release,
    State,
    Touch,
    Verdict,
    check_state,
    check_states,
)

__all__ = [
    "DELAY_MAX", "OPTIONAL_PARTS", "POWERS", "PRIORITY_DEFAULT", "PRIORITY_MAX", "STORED_STATES", "TTR_DEFAULT",
    "TTR_MIN", "Abandon", "Ack", "Backend", "Bury", "Capabilities", "Claim", "Consumer", "Diagnosis", "Finding",
    "Gap", "GiveBack", "Inspection", "JobRecord", "Lease", "Management", "Migrations", "NewJob", "Page", "Pausing",
    "Purging", "QueueStats", "Release", "Schema", "SchemaState", "State", "Touch", "Verdict", "check_state",
    "check_states",
]  # fmt: skip
