"""``make demo``: all three examples at once and one worker. Exits with 1 if anything is not as it should be."""

from __future__ import annotations

import sys

from .stage import run

if __name__ == "__main__":
    sys.exit(run("reset_mail", "order_timeout", "alarm"))
