"""The soak: load, faults, and a checker that believes only what the jobs themselves have written down.

``history`` is the record, ``stories`` what it says of each job, ``invariants`` what no history may show, ``checking``
the report. None of them imports anything else of multiq: what is checked has no part in the check.
"""
