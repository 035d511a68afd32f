"""``multiq bench``: the same work on several backends, with proof that nothing was lost while going fast.

``adapter`` is what a driver brings, ``workloads`` the work, ``verification`` checks it, ``runner`` runs it all,
``report`` what comes out; ``table``, ``html`` and ``compare`` show it. Needs the extra ``bench``.
"""

from __future__ import annotations

from multiq.errors import MultiqError


class BenchNotInstalled(MultiqError, ImportError):
    """The bench needs packages that multiq itself does not."""


def need_extra() -> None:
    """Raise ``BenchNotInstalled`` if the packages of the extra ``bench`` are missing."""
    from importlib.util import find_spec

    for package in ("hdrh", "jinja2", "psutil", "scipy", "vl_convert"):
        if find_spec(package) is None:
            raise BenchNotInstalled(f"the bench needs {package}, which is not installed: pip install 'multiq[bench]'")
