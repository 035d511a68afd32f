"""The soak runs load and faults on a store, and checks the records that the jobs and clients write themselves.

- ``history`` writes and reads the records.
- ``stories`` groups the records by job.
- ``invariants`` holds the properties that every history must have.
- ``checking`` checks a history by all invariants.

The four modules for the check import nothing of multiq except the errors. The tested code therefore has no part in the
check.

- ``tasks`` and ``clients`` are the load.
- ``crew`` starts the processes of the load.
- ``nemesis`` makes the faults.
- ``site`` describes the store.
- ``campaign`` runs the phases of a soak in order.
"""

from __future__ import annotations


def need_extra() -> None:
    """Raise ``ExtraNotInstalled`` if the package of the extra ``soak`` is missing."""
    from importlib.util import find_spec

    from multiq.errors import ExtraNotInstalled

    if find_spec("psutil") is None:
        raise ExtraNotInstalled("the soak needs psutil, which is not installed: pip install 'multiq[soak]'")
