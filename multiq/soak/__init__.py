"""The soak: load, faults, and a checker that relies only on the records that the jobs and clients write themselves.

``history`` writes and reads the record, ``stories`` groups it by job, ``invariants`` are the properties that every
history must have, and ``checking`` gives the verdict. Of multiq, these modules import only the errors, so that the code
under test has no part in the check.

``tasks`` and ``clients`` are the load, ``crew`` starts its processes, ``nemesis`` makes the faults, ``site`` describes
the store, and ``campaign`` runs the phases of a soak in order.
"""

from __future__ import annotations


def need_extra() -> None:
    """Raise ``ExtraNotInstalled`` if the package of the extra ``soak`` is missing."""
    from importlib.util import find_spec

    from multiq.errors import ExtraNotInstalled

    if find_spec("psutil") is None:
        raise ExtraNotInstalled("the soak needs psutil, which is not installed: pip install 'multiq[soak]'")
