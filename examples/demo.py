"""``make demo``: runs all three examples at once, with one worker. Exits with 1 if a check of an example fails."""

from __future__ import annotations

import sys

from .stage import run

if __name__ == "__main__":
    sys.exit(run("reset_mail", "order_timeout", "alarm"))
