"""``python -m multiq``."""

from .cli import main

main()
