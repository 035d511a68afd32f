"""``multiq`` on the folder driver, installed like an outside driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import multiq_folder
import pytest
from shell import Shell
from stevedore import ExtensionManager

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """``multiq`` in a new folder, with the queues in a subfolder. This process and its children find the driver."""
    site = tmp_path / "site" / "multiq_folder-1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: multiq-folder\nVersion: 1\n")
    (site / "entry_points.txt").write_text("[multiq.backends]\nfolder = multiq_folder:FolderBackend\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(site.parent))
    # jobs that were enqueued before the driver was installed
    monkeypatch.setattr(ExtensionManager, "ENTRY_POINT_CACHE", {})
    shell = Shell(tmp_path)
    paths = str(site.parent), str(Path(multiq_folder.__file__).parent)
    shell.url = f"folder:///{tmp_path}/jobs"
    shell.environment = {"MULTIQ_URL": shell.url, "PYTHONPATH": os.pathsep.join(paths)}
    shell.app.connect(shell.url)
    yield shell
    shell.app.close()
