"""The entry point of the command ``multiq``.

This module is outside of the package ``multiq``, because importing that package takes a tenth of a second. A Ctrl-C
during the import ends the process without a traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module signal is slower, because it imports enum


def main() -> None:
    """Run the command line."""
    is_default = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler  # False under nohup, for example
    if is_default:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from multiq.cli import main as run

    if is_default:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    run()
