"""Settings made in code: defaults, rules, and how a connection's name leads to its URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiq.errors import SettingsInvalid
from multiq.settings.model import KEYS, LogSettings, PayloadSettings, Settings, WorkerSettings, check_setting

CANARY = "S3CR3T-canary"


def test_the_defaults_are_an_embedded_store_and_one_job_at_a_time() -> None:
    settings = Settings()
    assert settings.url == "sqlite:///multiq.db"
    assert settings.worker == WorkerSettings(queues=None, policy=None, processes=None, threads=1, concurrency=0)
    assert settings.log == LogSettings(level="info", format="text")


def test_every_key_is_a_field_and_every_field_a_key() -> None:
    sections = {"worker": WorkerSettings, "payload": PayloadSettings, "log": LogSettings}
    fields = {name for name in Settings.__struct_fields__ if name not in {*sections, "connections"}}
    fields |= {f"{name}.{field}" for name, struct in sections.items() for field in struct.__struct_fields__}
    assert fields == set(KEYS)


def test_values_are_kept_as_their_rules_make_them() -> None:
    assert LogSettings(level="WARNING").level == "warning"
    worker = WorkerSettings(queues=["high", "low"], grace=3)  # type: ignore[arg-type]  # what a caller may do
    assert worker.queues == ("high", "low")
    assert isinstance(worker.grace, float)


def test_all_bad_values_of_a_section_are_reported_at_once() -> None:
    with pytest.raises(SettingsInvalid) as caught:
        WorkerSettings(processes=-1, threads=True, grace=float("nan"), queues=("a b",))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "worker.queues",
        "worker.processes",
        "worker.threads",
        "worker.grace",
    ]


def test_a_bad_value_is_reported_with_its_rule() -> None:
    with pytest.raises(SettingsInvalid, match="max_body: must be a whole number from 1 to 2147483648, got 0"):
        Settings(max_body=0)


def test_a_password_in_a_bad_value_is_masked() -> None:
    with pytest.raises(SettingsInvalid) as caught:
        Settings(url=[f"redis://:{CANARY}@host"])  # type: ignore[arg-type]  # a mistake that people make
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("key", ["payload.compress", "payload.accept_unsigned"])
def test_a_key_of_payloads_in_another_setting_is_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        check_setting(key, "a:c2VjcmV0LXNlY3JldC1zZWNyZXQ=")
    assert "c2Vj" not in str(caught.value)


def test_a_connection_is_a_url_or_a_name_or_the_default() -> None:
    settings = Settings(url="main", connections={"main": "redis://a", "spare": "redis://b"})
    assert settings.resolve("sqlite:///x.db") == "sqlite:///x.db"
    assert settings.resolve("spare") == "redis://b"
    assert settings.resolve(None) == "redis://a"


def test_an_unknown_connection_is_refused_with_a_list_of_the_known_ones() -> None:
    with pytest.raises(SettingsInvalid, match=r"'mian' is neither a URL .* \(there are: main, spare\)"):
        Settings(connections={"main": "redis://a", "spare": "redis://b"}).resolve("mian")


def test_text_like_a_url_without_its_scheme_is_shown_masked() -> None:
    with pytest.raises(SettingsInvalid) as caught:
        Settings().resolve(f"ann:{CANARY}@host")
    assert CANARY not in str(caught.value)
    assert "ann:***@host" in str(caught.value)


def test_a_connection_that_is_not_text_is_refused_with_the_way_out() -> None:
    with pytest.raises(SettingsInvalid, match="is not text: pass a URL"):
        Settings().resolve(Path("jobs.db"))  # type: ignore[arg-type]
