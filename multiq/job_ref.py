"""The text ``JobHandle.ref``, which names a job's queue and id and needs no escaping in a URL."""

from __future__ import annotations

import re

from .errors import OptionInvalid
from .formatting import shown
from .ids import check_id
from .validation import check_name

_PLAIN = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)


def make_ref(queue: str, job_id: str) -> str:
    """Return ``queue~id``. If the id has a character that a URL would escape, return ``queue~~`` and the id in
    base64."""
    if _PLAIN.fullmatch(job_id):
        return f"{queue}~{job_id}"
    import base64

    return f"{queue}~~{base64.urlsafe_b64encode(job_id.encode()).decode().rstrip('=')}"


def read_ref(ref: str) -> tuple[str, str]:
    """Return the queue and the id of a ``JobHandle.ref``. Raises ``OptionInvalid``."""
    if isinstance(ref, str):
        queue, _, job_id = ref.partition("~")
        try:
            if job_id.startswith("~"):
                import base64

                encoded = job_id[1:]
                job_id = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True).decode()
            return check_name(queue), check_id(job_id)
        except ValueError:  # wrong names, ids, base64 and UTF-8 raise subclasses of ValueError
            pass
    raise OptionInvalid(f"ref must be the text that JobHandle.ref returned, got {shown(ref)}")
