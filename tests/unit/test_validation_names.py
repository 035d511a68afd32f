"""The one rule for names."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import multiq
from multiq import cancellation
from multiq.control.flags import CONTROL_QUEUES
from multiq.errors import NameInvalid
from multiq.flows import record as flows
from multiq.schedules import record as schedules
from multiq.validation import KEPT_QUEUES, check_name

GOOD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)


@pytest.mark.parametrize("name", ["mail", "_", "0", "a" * 128, "mail.reset-2", "Mail", "a--b..c"])
def test_a_good_name_comes_back_as_it_is(name: str) -> None:
    assert check_name(name) is name
    assert check_name(name) is name  # the second call uses the cache


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


def test_the_queues_of_multiq_itself_are_the_refused_ones() -> None:
    homes = {flows.HOME, schedules.HOME, cancellation.HOME}
    assert CONTROL_QUEUES | homes == KEPT_QUEUES


@pytest.mark.parametrize("name", sorted(KEPT_QUEUES))
def test_no_job_of_a_user_enters_a_queue_of_multiq_itself(name: str) -> None:
    with multiq.App("memory://") as app:
        task, text = app.task(name="note")(print), f"multiq keeps {name!r} for itself"
        for use in (
            lambda: app.queue(name).enqueue(1),
            lambda: app.queue(name).enqueue_many([1]),
            lambda: asyncio.run(app.queue(name).aenqueue(1)),
            lambda: asyncio.run(app.queue(name).aenqueue_many([1])),
            lambda: task.options(queue=name),
            lambda: app.task(name="other", queue=name)(print),
            lambda: multiq.Worker(app, queues=[name]),
        ):
            with pytest.raises(NameInvalid, match=text):
                use()
        # and an operator can look at it
        assert app.queue(name).stats().ready == 0


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
