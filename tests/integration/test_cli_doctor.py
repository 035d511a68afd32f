"""``multiq doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shell import Shell


def test_a_fit_backend_is_reported_line_by_line_and_exits_with_0(shell: Shell) -> None:
    shell.app.queue("mail").enqueue(b"x")
    done = shell("doctor")
    assert done.code == 0
    assert "synchronous" in done.out
    assert shell.url in done.err


def test_a_url_a_name_and_the_option_all_name_the_backend(shell: Shell) -> None:
    (shell.folder / "multiq.toml").write_text('[connections]\nother = "memory://"\n')
    for arguments in (["memory://"], ["-c", "memory://"], ["other"]):
        done = shell("doctor", "--json", *arguments)
        assert done.code == 0
        assert {finding["what"]: finding["level"] for finding in done.json["findings"]} == {
            "reachable": "ok",
            "persistent": "warn",
            "durable_attempts": "warn",
            "shared": "warn",
            "schedules": "ok",
        }


def test_something_bad_exits_with_1_and_says_what_to_do(shell: Shell) -> None:
    done = shell("doctor", "sqlite:////no/such/folder/jobs.db")
    assert done.code == 1
    assert "there is no folder /no/such/folder; make it" in done.out
    assert done.err.startswith("1 bad, ")  # a warning of an old library may follow
    assert "1 unknown" in done.err
    document = shell("doctor", "--json", "sqlite:////no/such/folder/jobs.db").json
    assert document["fit"] is False


def test_a_backend_that_cannot_be_opened_is_an_error(shell: Shell) -> None:
    done = shell("doctor", "nonesuch://host")
    assert done.code == 2
    assert "nonesuch" in done.err
