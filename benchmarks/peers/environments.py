"""A separate environment for each library, with pinned versions. Each environment is made once and kept in
``.envs``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_KEPT = HERE / ".envs"
_SHOWN = 600  # the largest number of characters of pip's output


class NotInstalledError(Exception):
    """A library's environment could not be made. The message shows the end of pip's output."""


def interpreter(library: str) -> Path:
    """The Python interpreter of a library's environment. The environment is made first if it is missing. Raises
    ``NotInstalledError``.

    multiq runs in the environment of this process.
    """
    if library == "multiq":
        return Path(sys.executable)
    pins = HERE / "requirements" / f"{library}.txt"
    folder = _KEPT / library
    stamp = folder / "installed.txt"
    if not (stamp.exists() and stamp.read_text() == pins.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        python = str(folder / "bin" / "python")
        _run([sys.executable, "-m", "venv", str(folder)], library)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--requirement", str(pins)], library)
        stamp.write_text(pins.read_text())
    return folder / "bin" / "python"


def _run(command: list[str], library: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)  # noqa: S603 - pip
    if done.returncode:
        raise NotInstalledError(f"{library} could not be installed: ...{done.stdout.strip()[-_SHOWN:]}")
