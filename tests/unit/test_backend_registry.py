"""Drivers are found by their entry point. A driver that cannot be found or imported raises an error with advice."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from multiq import UrlInvalid, open_backend
from multiq.backend.memory import MemoryBackend
from multiq.backend.registry import backends_with, installed, load_driver
from multiq.errors import BackendNotInstalled

if TYPE_CHECKING:
    from pathlib import Path


def test_the_installed_drivers_are_known_by_name() -> None:
    assert {"memory", "sqlite"} <= set(installed())
    assert installed() == sorted(installed())
    assert load_driver("memory") is MemoryBackend


def test_a_url_opens_the_backend_of_its_scheme() -> None:
    assert isinstance(open_backend("memory://"), MemoryBackend)
    assert open_backend("sqlite:///x.db").declared.backend == "sqlite"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        (
            "sqllite:///x.db",
            r"no backend 'sqllite' is installed \(there are: .*memory.*sqlite.*\); did you mean 'sqlite'\?",
        ),
        ("kafka://localhost", r"no backend 'kafka' is installed \(there are: "),
    ],
)
def test_an_unknown_scheme_is_refused_with_a_list_of_the_known_ones(url: str, complaint: str) -> None:
    with pytest.raises(BackendNotInstalled, match=complaint):
        open_backend(url)


@pytest.mark.parametrize("text", ["", "jobs.db", "sqlite:", "/jobs.db", "://x", "localhost:6379"])
def test_text_that_is_not_a_url_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UrlInvalid, match=r"a backend's URL must be like 'sqlite:///jobs.db'"):
        open_backend(text)


def test_a_password_never_shows_in_an_error() -> None:
    with pytest.raises(BackendNotInstalled) as refused:
        open_backend("kafka://ann:S3CR3T@localhost")
    assert "S3CR3T" not in str(refused.value)


def test_backends_are_asked_for_their_powers() -> None:
    assert "sqlite" in backends_with("transactional_enqueue")
    assert "memory" not in backends_with("transactional_enqueue")


# --- drivers of third parties, as an installation would bring them ---


def install(folder: Path, package: str, entry_points: str, **modules: str) -> None:
    """Create what pip would install: a dist-info folder, and the modules."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[multiq.backends]\n{entry_points}\n")
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)


def ask(folder: Path, code: str) -> str:
    """Return what a new interpreter prints that has this folder on its path."""
    program = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\nimport multiq\nfrom multiq.backend.registry import *\n{code}"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


OPEN = """
try:
    print(open_backend("kafka://localhost").declared.backend)
except multiq.MultiqError as error:
    print(type(error).__name__, error)
"""


def test_a_third_party_s_driver_is_found_like_any_other(tmp_path: Path) -> None:
    driver = "from multiq.backend.memory import MemoryBackend\nclass KafkaBackend(MemoryBackend): pass\n"
    install(tmp_path, "multiq-kafka", "kafka = kafka_driver:KafkaBackend", kafka_driver=driver)
    assert ask(tmp_path, OPEN) == "memory\n"
    assert ask(tmp_path, "print('kafka' in installed())") == "True\n"


def test_a_driver_whose_client_library_is_missing_says_which(tmp_path: Path) -> None:
    install(tmp_path, "multiq-kafka", "kafka = kafka_driver:KafkaBackend", kafka_driver="import no_such_client\n")
    said = ask(tmp_path, OPEN)
    assert said.startswith("BackendNotInstalled the kafka backend cannot be imported: No module named 'no_such_client'")
    assert "kafka" not in ask(tmp_path, "print(backends_with('client_ids'))")


CONTRADICTION = """
from multiq.backend import Backend
from multiq.backend.memory import MemoryBackend
class KafkaBackend(MemoryBackend):
    declared = MemoryBackend.declared
    peek = Backend.peek
"""

REFUSED = """
try:
    multiq.App("memory://").queue("mail").enqueue(b"x", connection=object())
except multiq.MultiqError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.long
@pytest.mark.one_row
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise RuntimeError('boom')", "BackendNotInstalled the kafka backend cannot be imported: RuntimeError: boom"),
        pytest.param(
            "raise KeyError('kafka')",
            "BackendNotInstalled the kafka backend cannot be imported: KeyError: 'kafka'",
            marks=pytest.mark.long,
        ),
        ("raise SystemExit(3)", "BackendNotInstalled the kafka backend cannot be imported: SystemExit: 3"),
        pytest.param(
            "def (",
            "BackendNotInstalled the kafka backend cannot be imported: SyntaxError: invalid syntax",
            marks=pytest.mark.long,
        ),
        ("", "BackendNotInstalled the kafka backend cannot be imported: AttributeError: "),
        pytest.param(
            "KafkaBackend = 7",
            "DriverInvalid the kafka backend must be a subclass of multiq.backend.Backend",
            marks=pytest.mark.long,
        ),
        (CONTRADICTION, "DriverInvalid KafkaBackend declares inspection and does not implement peek"),
    ],
)
def test_a_broken_driver_is_reported_and_spoils_no_other(tmp_path: Path, code: str, error: str) -> None:
    # Given a package whose driver cannot be imported, or is not a driver
    install(tmp_path, "multiq_kafka", "kafka = kafka_driver:KafkaBackend", kafka_driver=code + "\n")
    # Then opening it raises an error, and the other drivers work as before
    assert ask(tmp_path, OPEN).startswith(error)
    assert ask(tmp_path, "print('kafka' in backends_with('inspection'))") == "False\n"
    assert ask(tmp_path, REFUSED).startswith("Unsupported the memory backend does not support transactional_enqueue")
    # And the list of backends has a line for the broken driver
    listed = ask(tmp_path, "sys.argv = ['multiq', 'backends', 'kafka', 'memory', '--json']\nimport multiq.__main__")
    assert f'"error": "{error.partition(" ")[2]}' in listed


def test_two_packages_with_one_name_are_reported(tmp_path: Path) -> None:
    driver = "from multiq.backend.memory import MemoryBackend as KafkaBackend\n"
    install(tmp_path / "multiq-kafka", "multiq-kafka", "kafka = one:KafkaBackend", one=driver)
    install(tmp_path / "other-kafka", "other-kafka", "kafka = other:KafkaBackend", other=driver)
    other = f"sys.path.insert(0, {str(tmp_path / 'other-kafka')!r})\n"
    said = ask(tmp_path / "multiq-kafka", other + OPEN)
    assert said.startswith("BackendNotInstalled two installed packages bring a backend 'kafka': uninstall one")


def test_a_missing_driver_is_reported_by_the_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BackendNotInstalled, match="did you mean 'redis'"):
        load_driver("reddis")
    assert caplog.records == []
