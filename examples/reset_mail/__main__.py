"""``python -m examples.reset_mail``: this example alone, with a worker of its own."""

from __future__ import annotations

import sys

from examples.stage import run

if __name__ == "__main__":
    sys.exit(run("reset_mail"))
