"""The backend ``null://``, which drops the jobs that an app enqueues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import NewJob, Step, Version


class NullBackend(MemoryBackend):
    """``null://``: drops the jobs that an app enqueues. All other calls work as on the memory backend."""

    declared = msgspec.structs.replace(MemoryBackend.declared, backend="null")

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:  # noqa: ARG002
        if connection is not None:
            raise self.unsupported("transactional_enqueue")
        return [job.id for job in jobs]

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:  # noqa: ARG002
        return True
