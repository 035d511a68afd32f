"""The interface between multiq and a driver. This package is all that is needed to write one.

A driver deals in bytes, seconds and ids. It owns every atomic state change, its keys or tables, its waiting, its
connections and its clock, and knows nothing of tasks, JSON, retries or events. Names, ranges and types were
checked before a call gets here, so a driver need not check them again.

The states of a job, and the verbs that move it::

            enqueue(delay>0)              release(delay>0)
   --------------------------> DELAYED <------------------.
   enqueue                        | due, or kick_job      |
   --------------------------> READY ----- reserve -----> RESERVED ---- ack ----> gone
                                ^  ^---- lease ended ------'  |  |
                                |  '------ release -----------'  | bury
                                '-- kick, kick_job -- BURIED <---'

What each verb promises is in ``docs/contract.md``, paragraph by paragraph; ``multiq.conformance`` proves a driver
against it; ``multiq.backend.memory`` is the contract as a program; ``docs/writing-a-driver.md`` is the guide.

Errors: a driver raises only ``multiq.errors`` (from the client library's exception): a ``BackendUnavailable`` if
another attempt may succeed, an ``EnqueueUncertain`` for an enqueue that may have been carried out. Each verb must be
safe to repeat after such an error: the caller chooses the ids of jobs, and the driver chooses a fresh token for each
call of ``reserve``, by which it finds out after a lost reply what that call has reserved.
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
