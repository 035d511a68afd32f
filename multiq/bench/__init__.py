"""``multiq bench`` runs the same work on several backends, measures it, and verifies that no job was lost.

- ``adapter`` is the interface that a driver implements for the bench.
- ``workloads`` defines the work.
- ``runner`` runs the workloads.
- ``verification`` checks the jobs of a workload.
- ``report`` defines the results.
- ``table``, ``html`` and ``compare`` show the results.

The bench needs the extra ``bench``.
"""

from __future__ import annotations

from multiq.errors import MultiqError


class BenchNotInstalled(MultiqError, ImportError):
    """A package of the extra ``bench`` is not installed."""


def need_extra() -> None:
    """Raise ``BenchNotInstalled`` if the packages of the extra ``bench`` are missing."""
    from importlib.util import find_spec

    for package in ("hdrh", "jinja2", "psutil", "scipy", "vl_convert"):
        if find_spec(package) is None:
            raise BenchNotInstalled(f"the bench needs {package}, which is not installed: pip install 'multiq[bench]'")
