"""The interface between multiq and a driver. To write a driver, you need only this package.

A driver gets and returns bytes, seconds and ids. It makes atomic state changes, and has its own keys or tables,
connections and clock. It does not use tasks, JSON, retries or events. multiq's core checks names, ranges and types
before it calls a driver, so a driver need not check them again.

The states of a job, and the operations that change the state::

            enqueue(delay>0)              release(delay>0)
   --------------------------> DELAYED <------------------.
   enqueue                        | due, or kick_job      |
   --------------------------> READY ----- reserve -----> RESERVED ---- ack ----> gone
                                ^  ^---- lease ended ------'  |  |
                                |  '------ release -----------'  | bury
                                '-- kick, kick_job -- BURIED <---'

Where to read on:

- ``docs/contract.md``: the guarantees of each operation;
- ``multiq.conformance``: tests whether a driver keeps the contract;
- ``multiq.backend.memory``: the reference implementation;
- ``docs/writing-a-driver.md``: the guide.

A driver raises only errors of ``multiq.errors``, from the client library's exception. It raises ``BackendUnavailable``
if another attempt may succeed, and ``EnqueueUncertain`` for an enqueue that may have been carried out. Each operation
must be safe to repeat after such an error. An enqueue is safe to repeat, because the caller chooses the ids of jobs.
For ``reserve`` the driver makes a new token for each call. After a lost reply, the driver finds the reserved jobs by
this token.
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
