"""The entry point of the command ``multiq``: outside of the package, whose import alone takes a tenth of a second.

A Ctrl-C in that time ends the process as it ends any program, and not with a traceback out of the middle of an import.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under nohup
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from multiq.cli import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
