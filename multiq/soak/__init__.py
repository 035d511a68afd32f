"""The soak: load, faults, and a checker that believes only what the jobs themselves have written down.

``history`` is the record, ``stories`` what it says of each job, ``invariants`` what no history may show, ``checking``
the verdict. None of these imports anything else of multiq but its errors: what is checked has no part in the check.

``tasks`` and ``clients`` are the load, ``crew`` its processes, ``nemesis`` what is done to them, ``site`` the store
that it is about, and ``campaign`` the order of it all.
"""

from __future__ import annotations


def need_extra() -> None:
    """Raise ``ExtraNotInstalled`` if the package of the extra ``soak`` is missing."""
    from importlib.util import find_spec

    from multiq.errors import ExtraNotInstalled

    if find_spec("psutil") is None:
        raise ExtraNotInstalled("the soak needs psutil, which is not installed: pip install 'multiq[soak]'")
