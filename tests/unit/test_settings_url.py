"""URLs: what is read, what is refused, and that a password is never shown."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multiq.errors import UrlInvalid
from multiq.settings.password_sources import password_of_file
from multiq.settings.url import Option, choice, parse_url, redact, seconds

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "S3CR3T-canary"
OPTIONS = {
    "timeout": Option(seconds(0, 60), 10.0, "seconds to wait"),
    "mode": Option(choice("fast", "safe"), "safe", "how"),
    "password": Option(str, None, "a secret"),
}


def told(text: str) -> str:
    """Return all texts that show a URL: its repr and str if it is valid, otherwise the traceback."""
    try:
        url = parse_url(text, OPTIONS)
    except UrlInvalid as exc:
        return "".join(traceback.format_exception_only(exc)) + repr(exc.__cause__)
    return f"{url}{url!r}"


def test_a_url_is_read_into_its_parts() -> None:
    url = parse_url("redis+sentinel://ann:p%40ss@Example.org:6379/0?timeout=2.5&mode=FAST", OPTIONS)
    assert (url.scheme, url.driver, url.host, url.port, url.path) == (
        "redis+sentinel",
        "redis",
        "example.org",
        6379,
        "/0",
    )
    assert (url.username, url.password) == ("ann", "p@ss")
    assert url.options == {"timeout": 2.5, "mode": "fast", "password": None}


def test_missing_options_have_their_defaults() -> None:
    assert parse_url("memory://", OPTIONS).options == {"timeout": 10.0, "mode": "safe", "password": None}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sqlite:///jobs.db", "/jobs.db"),
        ("sqlite:////var/lib/jobs.db", "//var/lib/jobs.db"),
        ("sqlite:///with%20space%23and%3Fmarks.db", "/with space#and?marks.db"),
        ("sqlite:///my jobs.db", "/my jobs.db"),
        ("sqlite:///%E2%82%AC.db", "/€.db"),
    ],
)
def test_a_path_is_unquoted_once(text: str, path: str) -> None:
    assert parse_url(text, {}).path == path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("jobs.db", "a backend's URL must be like"),
        ("", "a backend's URL must be like"),
        ("sqlite:/jobs.db", "a backend's URL must be like"),
        ("sq lite:///jobs.db", "a backend's URL must be like"),
        ("redis://host:port/0", "port must be a number"),
        ("redis://host:70000/0", "port must be a number"),
        ("redis://[::1/0", "malformed"),
        ("sqlite:///jobs.db\n", "begins or ends with"),
        (" sqlite:///jobs.db", "begins or ends with"),
        ("sqlite:///jo\tbs.db", "control character"),
        ("sqlite:///jobs%00.db", "control character"),
        ("sqlite:///jobs#1.db", "write %23"),
        ("sqlite:///jobs%ff.db", "not UTF-8"),
        ("sqlite:///jobs\udcff.db", "not UTF-8"),
        ("redis://host?timeout=soon", "must be a number of seconds, got 'soon'"),
        ("redis://host?timeout=nan", "must be from 0 to 60"),
        ("redis://host?timeout=-1", "must be from 0 to 60"),
        ("redis://host?mode=brave", "must be one of fast, safe"),
        ("redis://host?timeuot=1", "did you mean 'timeout'?"),
        ("redis://host?zebra=1", "it takes mode, password, timeout"),
        ("redis://host?timeout=1&timeout=2", "given twice"),
        ("redis://host?client=a@b", "write / ? # @"),
    ],
)
def test_an_unusable_url_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(UrlInvalid) as caught:
        parse_url(text, OPTIONS)
    assert says in str(caught.value)


def test_all_mistakes_in_the_options_are_reported_at_once() -> None:
    with pytest.raises(UrlInvalid) as caught:
        parse_url("redis://host?timeout=soon&mode=brave&zebra=1", OPTIONS)
    assert all(word in str(caught.value) for word in ("soon", "brave", "zebra"))


def test_a_driver_without_options_says_so() -> None:
    with pytest.raises(UrlInvalid, match="takes none"):
        parse_url("memory://?timeout=1", {})


def test_a_url_prints_itself_masked() -> None:
    url = parse_url(f"redis://ann:{CANARY}@host/0?password={CANARY}", OPTIONS)
    assert str(url) == "redis://ann:***@host/0?password=***"
    assert CANARY not in repr(url)
    assert url.password == CANARY
    assert url.options["password"] == CANARY


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://ann@host/0", "redis://ann@host/0"),
        (f"redis://:{CANARY}@host/0", "redis://:***@host/0"),
        (f"mysql://ann:{CANARY}@[::1]:3306/db", "mysql://ann:***@[::1]:3306/db"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://[::1]/0", "redis://[::1]/0"),
        ("sqlite:///a:b.db", "sqlite:///a:b.db"),
        ("no url at all", "no url at all"),
    ],
)
def test_unmasked_parts_of_a_url_stay_readable(text: str, masked: str) -> None:
    assert redact(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        f"redis://ann:a/{CANARY}@host/0",
        f"redis://ann:a@{CANARY}@host/0",
        f"redis://ann:a#{CANARY}@host/0",
        f"redis://ann:a?{CANARY}@host/0",
        f"redis://ann:a?x={CANARY}@host/0",
        f"redis://ann:a@b?{CANARY}@host/0",
        f"redis://ann:{CANARY}",
        f"redis://ann:{CANARY}/0",
        f"redis://:{CANARY}#x",
        f"redis:/:{CANARY}@host",
        f"redis//:{CANARY}@host",
        f"ann:{CANARY}@host",
        f"redis://host:6379/0?password=p@{CANARY}",
        f"redis://host/0?password=p@{CANARY}",
        f"redis://host/0?pass%77ord={CANARY}",
        f"redis://host/0?PASSWORD={CANARY}",
        f"redis://host/0?auth_token={CANARY}&x=1",
        f"['redis://ann:{CANARY}@host', 'redis://bob:{CANARY}@host']",
        f"redis://ann:{CANARY}\n@host",
        f"redis://ann@host:{CANARY}/0",
        f"redis://ann@host:{CANARY}%25x",
        f"redis://ann@host:[{CANARY}]/0",
        f"redis://ann@host:1:{CANARY}/0",
        f"redis://ann:{CANARY}@ho\u2100st/0",  # a host that NFKC turns into one with a slash: urlsplit quotes it all
    ],
)
def test_no_mistyped_url_shows_a_password(text: str) -> None:
    assert CANARY not in redact(text)
    assert CANARY not in told(text)


@pytest.mark.parametrize(
    "text",
    [
        f"redis://ann@host:{CANARY}/0",
        f"redis://ann:[{CANARY}@host",
        f"redis://ann:{CANARY}%ff@host",
        f"r://a:{CANARY}/@",
    ],
)
def test_no_error_carries_a_password_that_another_one_quoted(text: str) -> None:
    """Programs that collect errors follow ``__context__`` also where a traceback leaves it out."""
    with pytest.raises(UrlInvalid) as caught:
        parse_url(text, {})
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_a_password_file_that_is_not_utf8_is_in_no_error(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(CANARY.encode() + b"\xff")
    with pytest.raises(UrlInvalid, match="not UTF-8") as caught:
        password_of_file(str(path))
    assert caught.value.__context__ is None


def test_a_password_file_loses_its_last_line_end(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes("gr\u00fcn\ufffd\r\n".encode())
    assert password_of_file(str(path)) == "gr\u00fcn\ufffd"


# --- for all passwords and all texts ---------------------------------------------------------------------

anything = st.text(max_size=40)
utf8 = st.text(st.characters(codec="utf-8"), max_size=40)


@given(utf8, utf8)
def test_a_quoted_password_arrives_unchanged_and_is_never_shown(before: str, after: str) -> None:
    password = before + CANARY + after
    text = f"redis://ann:{quote(password, safe='')}@host:1/0"
    assert CANARY not in told(text)
    url = parse_url(text, {})
    assert url.password == password
    assert (url.host, url.port) == ("host", 1)


@given(anything, anything)
@example("/?", "@")
@example("@?", "")
@example("1?", "=1")
@example("", "?x=y@")
def test_an_unquoted_password_is_never_shown(before: str, after: str) -> None:
    text = f"redis://ann:{before}{CANARY}{after}@host/0"
    assert CANARY not in redact(text)
    assert CANARY not in told(text)


@given(st.one_of(anything, anything.map("redis://".__add__), anything.map("sqlite:///".__add__)))
def test_any_text_is_read_or_refused_with_one_error(text: str) -> None:
    shown = told(text)
    assert len(shown) < 3000
    assert "\r" not in shown
