"""The one rule for names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiq.errors import NameInvalid
from multiq.validation import check_name

GOOD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)


@pytest.mark.parametrize("name", ["mail", "_", "0", "a" * 128, "mail.reset-2", "Mail", "a--b..c"])
def test_a_good_name_comes_back_as_it_is(name: str) -> None:
    assert check_name(name) is name
    assert check_name(name) is name  # and again, once it is known


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 129,
        ".a",
        "-a",
        "a b",
        " a",
        "a ",
        "a\r\n",
        "a\n",
        "a\0",
        "a/b",
        "a{b}",
        "a:b",
        "ä",
        "\u0661",
        "a\u200b",
        "*",
    ],
)
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(NameInvalid, match="a queue name must have"):
        check_name(name)


@pytest.mark.parametrize("value", [None, 1, b"mail", ["mail"], float("nan")])
def test_a_name_that_is_not_text_is_refused(value: object) -> None:
    with pytest.raises(NameInvalid):
        check_name(value)


def test_a_name_of_a_kind_of_text_is_refused_too() -> None:
    class Text(str):
        __slots__ = ()

    with pytest.raises(NameInvalid):
        check_name(Text("mail"))


def test_the_message_shows_the_name_on_one_short_line_of_plain_characters() -> None:
    with pytest.raises(NameInvalid) as caught:
        check_name("delete 1\r\n\x1b[31m" + "x" * 5000)
    message = str(caught.value)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 250


def test_the_message_says_what_kind_of_name_it_is() -> None:
    with pytest.raises(NameInvalid, match="a task name must have"):
        check_name("no such", "task")


@given(st.text(max_size=140))
def test_exactly_the_names_of_the_rule_pass(name: str) -> None:
    try:
        check_name(name)
    except NameInvalid:
        assert not GOOD.fullmatch(name)
    else:
        assert GOOD.fullmatch(name)
