"""The interface between multiq and a driver. To write a driver, you need only this package.

A driver gets and returns bytes, seconds and ids. It makes atomic state changes, and has its own keys or tables,
connections and clock. It does not use tasks, JSON, retries or events. multiq's core checks names, ranges and types
before it calls a driver, so a driver need not check them again.

The states of a job, and the operations that change the state::

            enqueue(delay>0)              release(delay>0)
   --------------------------> DELAYED <------------------.
   enqueue                        | due, or kick_job      |
   --------------------------> READY ----- reserve -----> RESERVED ---- ack ----> gone
                             ^  ^  ^---- lease ended ------'  |  |
                             |  |  '------ release -----------'  | bury
                             |  '-- kick, kick_job -- BURIED <---'
   enqueue(awaits=n)         |
   ----------------> HELD ---' the last of n arrivals, or kick_job

Where to read on:

- ``docs/contract.md``: the guarantees of each operation;
- ``multiq.conformance``: tests whether a driver keeps the contract;
- ``multiq.backend.memory``: the reference implementation;
- ``docs/writing-a-driver.md``: the guide.

A driver raises only errors of ``multiq.errors``, with the client library's exception as their cause. It raises
``BackendUnavailable`` if another attempt may succeed, and ``EnqueueUncertain`` for an enqueue that may have been
carried out. After either error, it must be safe to repeat the operation. An enqueue is safe to repeat, because the
caller chooses the ids of jobs. For ``reserve`` the driver makes a new token for each call. After a lost reply, the
driver finds the reserved jobs by this token.
"""

from __future__ import annotations

from .base import (
    OPTIONAL_PARTS,
    Backend,
    Consumer,
    Diagnosis,
    Holds,
    Inspection,
    Limits,
    Management,
    Migrations,
    Notes,
    Outcomes,
    Pausing,
    Purging,
)
from .capabilities import POWERS, Capabilities, Claim, Gap
from .diagnostics import Finding, Schema, SchemaState
from .effects import (
    MAX_STEPS,
    After,
    Arrive,
    Drop,
    Enqueue,
    Note,
    NotePage,
    Outcome,
    OutcomeKind,
    OutcomePage,
    Put,
    Step,
    Version,
)
from .limits import MAX_GATE_TEXT, MAX_GATES, Gate, LimitState, Quota
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
    Terms,
    Touch,
    Verdict,
    check_state,
    check_states,
)
from .unique import MAX_KEY, UniqueKey, UniqueUntil

__all__ = [
    "DELAY_MAX", "MAX_GATES", "MAX_GATE_TEXT", "MAX_KEY", "MAX_STEPS", "OPTIONAL_PARTS", "POWERS",
    "PRIORITY_DEFAULT", "PRIORITY_MAX", "STORED_STATES", "TTR_DEFAULT", "TTR_MIN", "Abandon", "Ack", "After",
    "Arrive", "Backend", "Bury", "Capabilities", "Claim", "Consumer", "Diagnosis", "Drop", "Enqueue", "Finding",
    "Gap", "Gate", "GiveBack", "Holds", "Inspection", "JobRecord", "Lease", "LimitState", "Limits", "Management",
    "Migrations", "NewJob", "Note", "NotePage", "Notes", "Outcome", "OutcomeKind", "OutcomePage", "Outcomes",
    "Page", "Pausing", "Purging", "Put", "QueueStats", "Quota", "Release", "Schema", "SchemaState", "State", "Step",
    "Terms", "Touch", "UniqueKey", "UniqueUntil", "Verdict", "Version", "check_state", "check_states",
]  # fmt: skip
