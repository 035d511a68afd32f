"""The entry point of the command ``multiq``.

It is outside of the package ``multiq``, because the import of that package takes a tenth of a second. A Ctrl-C in that
time ends the process without a traceback from the middle of an import.
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
