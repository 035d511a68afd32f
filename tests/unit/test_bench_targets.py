"""The bench's targets: names, URLs, backends without a bench, and targets that are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from multiq.backend.registry import open_backend
from multiq.bench import targets
from multiq.bench.adapter import Counters, Durability
from multiq.bench.targets import FolderVolatile, load_bench, open_targets
from multiq.errors import BackendNotInstalled, UrlInvalid

if TYPE_CHECKING:
    from pathlib import Path


def test_a_name_twice_is_numbered_and_a_password_is_masked(tmp_path: Path) -> None:
    url = "redis://ann:secret@localhost:1"
    with open_targets(["memory", "sqlite", "memory", url, url], "fast", tmp_path) as targets:
        names = [target.name for target in targets]
        assert names == ["memory", "sqlite", "memory 2", "redis://ann:***@localhost:1", "redis://ann:***@localhost:1 2"]
        assert [target.is_ours for target in targets] == [True, True, True, False, False]
        assert targets[0].url != targets[2].url, "each has jobs of its own"


def test_a_run_has_queues_that_no_other_run_has(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with open_targets(["memory"], "fast", tmp_path) as (one,), open_targets(["memory"], "fast", other) as (two,):
        assert one.queue("drain.1") == one.queue("drain.1") != two.queue("drain.1")
        assert one.queue("drain.1").startswith("multiq.bench.")
        with open_backend(one.url) as backend:
            assert backend.queues() == []


def test_memory_keeps_nothing_and_counts_nothing(tmp_path: Path) -> None:
    with open_targets(["memory"], "durable", tmp_path) as (target,):
        assert target.adapter.durability() == Durability("nothing", {})
        assert target.adapter.counters() == Counters()
        assert target.adapter.baseline(b"x") is None


def test_a_backend_without_a_bench_can_be_measured_by_its_url_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "GROUP", "multiq.bench.of.none")
    assert load_bench("memory") is None
    with open_targets(["memory://shared"], "fast", tmp_path) as (target,):
        assert (target.backend, target.url, target.is_ours) == ("memory", "memory://shared", False)
        assert target.adapter.durability().survives == "unknown"
        assert target.adapter.counters() == Counters()
        with open_backend("memory://shared") as backend:
            target.queue("q")
            backend.pause(target.queue("q"), 60)
            target.remove_queues()
            assert backend.queues() == []
    with pytest.raises(BackendNotInstalled, match=r"cannot start a server for the .*give the URL"):
        open_targets(["memory"], "fast", tmp_path).__enter__()


@pytest.mark.parametrize("given", ["reddis", "reddis://localhost"])
def test_a_missing_backend_is_reported_as_everywhere(given: str, tmp_path: Path) -> None:
    with pytest.raises(BackendNotInstalled, match="did you mean 'redis'"), open_targets([given], "fast", tmp_path):
        pytest.fail("it began")


def test_a_url_that_cannot_be_used_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with (
        pytest.raises(UrlInvalid, match="syncronous"),
        open_targets(["sqlite:///x.db?syncronous=full"], "fast", tmp_path),
    ):
        pytest.fail("it began")


def test_no_durable_store_is_measured_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_volatile", lambda _: True)
    with pytest.raises(FolderVolatile, match="TMPDIR=/var/tmp"), open_targets(["sqlite"], "durable", tmp_path):
        pytest.fail("it began")
    with open_targets([f"sqlite:///{tmp_path}/theirs.db"], "durable", tmp_path):
        pass  # opens the backend with the user's own settings
    with open_targets(["sqlite"], "fast", tmp_path):
        pass


def test_a_setting_that_a_server_does_not_report_makes_no_difference() -> None:
    before = Counters(commands=10, sent=5, memory=700, cpu=0.5)
    after = Counters(commands=14, received=3, sent=5, memory=600, cpu=2.0)
    assert after.since(before) == Counters(commands=4, received=None, sent=0, memory=600, cpu=1.5)
