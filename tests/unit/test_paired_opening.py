"""``?store=``: which URLs make a pair, which are refused, and how settings name a store."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from multiq.backend.memory import MemoryBackend
from multiq.backend.paired.backend import Paired
from multiq.backend.registry import open_backend
from multiq.errors import BackendNotInstalled, MultiqError, SettingsInvalid, UrlInvalid
from multiq.settings.loader import load_settings
from multiq.settings.model import Settings
from multiq.settings.url import redact, with_store

if TYPE_CHECKING:
    from pathlib import Path

JOBS = "beanstalk://localhost?timeout=2"
STORE = "mysql://me:geheim@db/state"


def test_a_url_with_a_store_opens_a_pair_that_declares_what_the_store_adds() -> None:
    with open_backend(with_store(JOBS, "memory://")) as pair:
        assert isinstance(pair, Paired)
        assert isinstance(pair.store, MemoryBackend)
        declared = type(pair).declared
        assert declared == pair.declared
        assert declared.backend == "beanstalk+store"
        for power in ("outcomes", "memos", "holds", "notes", "reasons"):
            assert declared.claim(power)
        for power in ("one_step", "one_step_everywhere", "client_ids"):
            assert not declared.claim(power)


def test_the_tables_of_a_store_are_those_of_the_pair() -> None:
    with open_backend(with_store(JOBS, STORE)) as pair:
        assert type(pair).declared.schema is True
        assert "multiq_jobs" in pair.schema().sql()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("beanstalk://h?store=", "option store must be a URL, percent-encoded, or the name of a configured connection"),
        ("beanstalk://h?store=state", "must be a URL, percent-encoded, or the name of a configured connection, got"),
        ("beanstalk://h?store=a&store=b", "option 'store' is given twice"),
        (with_store(JOBS, JOBS), "the beanstalk backend cannot be a store, because it lacks outcomes, memos, holds"),
        (with_store(JOBS, with_store(JOBS, "memory://")), "the store must not have a store of its own"),
        (with_store("redis://h", "memory://"), "the redis backend keeps outcomes and flows itself: leave the option"),
        (with_store("memory://", "memory://"), "the memory backend keeps outcomes and flows itself"),
        (with_store(JOBS, "sqlite:///x.db?timeoutt=3"), "unknown option 'timeoutt'"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(UrlInvalid) as refusal:
        open_backend(url)
    assert why in str(refusal.value)


def test_a_store_whose_driver_is_not_installed_is_refused() -> None:
    with pytest.raises(BackendNotInstalled, match="no backend 'kafka' is installed"):
        open_backend(with_store(JOBS, "kafka://h"))


@pytest.mark.parametrize("url", [with_store(JOBS, STORE), with_store("beanstalk://h", STORE), f"{JOBS}&store={STORE}"])
def test_the_password_of_a_store_is_not_shown(url: str) -> None:
    assert "geheim" not in redact(url)
    with pytest.raises(MultiqError) as refusal:
        open_backend(f"{url}&what=1")
    assert "geheim" not in str(refusal.value)
    assert "geheim" not in repr(Settings(url="sqlite://", connections={"a": url}, store=STORE))


def test_a_connection_can_be_named_as_the_store() -> None:
    settings = Settings(connections={"jobs": f"{JOBS}&store=state", "state": STORE})
    assert settings.resolve("jobs") == with_store(JOBS, STORE)
    assert settings.resolve("beanstalk://h?store=state") == with_store("beanstalk://h", STORE)
    with pytest.raises(SettingsInvalid, match="'other' is neither a URL"):
        settings.resolve("beanstalk://h?store=other")


def test_the_setting_store_belongs_to_the_default_connection() -> None:
    settings = Settings(url="jobs", store="state", connections={"jobs": JOBS, "state": STORE})
    assert settings.resolve(None) == with_store(JOBS, STORE)
    assert settings.resolve("jobs") == JOBS
    assert settings.resolve("redis://h") == "redis://h"
    own = Settings(url=with_store(JOBS, "memory://"), store=STORE)
    assert own.resolve(None) == with_store(JOBS, "memory://")


def test_a_file_and_the_environment_name_the_store(tmp_path: Path) -> None:
    file = tmp_path / "multiq.toml"
    file.write_text('url = "beanstalk://h"\nstore = "state"\n[connections]\nstate = "sqlite:///state.db"\n')
    environment = {"MULTIQ_CONFIG": str(file)}
    assert load_settings(tmp_path, environment).resolve(None) == with_store("beanstalk://h", "sqlite:///state.db")
    environment["MULTIQ_STORE"] = "redis://r"
    assert load_settings(tmp_path, environment).resolve(None) == with_store("beanstalk://h", "redis://r")
    environment["MULTIQ_STORE"] = "nowhere"
    with pytest.raises(SettingsInvalid, match="environment: MULTIQ_STORE: 'nowhere' is neither a URL"):
        load_settings(tmp_path, environment)


def test_a_store_with_an_escaped_password_reaches_its_driver_unchanged() -> None:
    store = f"mysql://me:{quote('p/w@%', safe='')}@db/state"
    with open_backend(with_store(JOBS, store)) as pair:
        assert isinstance(pair, Paired)
    assert Settings(url=JOBS, store=store).resolve(None) == with_store(JOBS, store)


def test_a_program_without_a_store_imports_nothing_of_pairs() -> None:
    program = (
        "import sys, multiq\n"
        "from multiq.backend.registry import open_backend\n"
        "backend = open_backend('beanstalk://localhost')\n"
        "backend.consumer(['default'])\n"
        "print([name for name in sys.modules if name.startswith('multiq.backend.paired')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
