"""The interpreters of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def python_of_django_6() -> str:
    """The newest Python on this machine that Django 6 supports. The test is skipped if there is none."""
    for name in ("python3.14", "python3.13", "python3.12"):
        for folder in [*os.environ["PATH"].split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]:
            path = Path(folder, name)
            if path.is_file() and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode:
                return str(path)
    if sys.version_info >= (3, 12):
        return sys.executable
    pytest.skip("Django 6, which has tasks and tests of them, needs Python 3.12, and there is none")
