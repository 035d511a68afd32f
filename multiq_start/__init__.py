"""The entry point of the command ``multiq``: outside of the package, whose import alone takes a tenth of a second.

A Ctrl-C in that time ends the process as it ends any program, and not with a traceback out of the middle of an import.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module signal imports enum, which alone takes some of that time


def main() -> None:
    """Run the command line."""
    is_default = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler  # else it is ignored, as under nohup
    if is_default:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from multiq.cli import main as run

    if is_default:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    run()
