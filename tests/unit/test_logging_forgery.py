"""Texts of jobs and errors cannot forge or break a line of the log, or send codes to a terminal."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from multiq.logging import JsonFormatter, TextFormatter

FORGED = "2027-01-31 12:00:01.234 info    done      forged"
RUDE = ["\x9b31m", "\u202e", "\x7f", "\ud800", "\x00", "\x1b[2J", "\u2028", "\u2066"]


def record(message: str, error: BaseException | None = None, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("multiq.worker", logging.WARNING, __file__, 1, message, (), None)
    made.__dict__["multiq"] = fields
    if error is not None:
        try:
            raise error
        except BaseException:
            made.exc_info = sys.exc_info()
    return made


def test_a_line_end_in_an_error_or_a_message_begins_no_record() -> None:
    text = TextFormatter().format(record(f"failed\n{FORGED}", ValueError(f"x\n{FORGED}\r{FORGED}\x85{FORGED}")))
    first, *rest = text.splitlines()
    assert first.count("forged") == 1
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert "\r" not in text
    assert "\x85" not in text


@pytest.mark.parametrize("rude", RUDE, ids=ascii)
def test_neither_format_writes_a_control_character(rude: str) -> None:
    made = record(f"a{rude}b", ValueError(f"c{rude}d"), reason=f"e{rude}f", job_id=rude, what=ValueError(rude))
    for formatter in (TextFormatter(), JsonFormatter()):
        text = formatter.format(made)
        assert rude not in text
        text.encode()  # halves of surrogates cannot be written
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert json.loads(line)["reason"] == "e" + rude.encode("unicode_escape").decode() + "f"


def test_a_line_has_a_limited_length() -> None:
    made = record("x" * 200_000, ValueError("y" * 200_000), reason="z" * 200_000)
    assert len(TextFormatter().format(made)) < 40_000
    assert len(JsonFormatter().format(made)) < 50_000


def test_text_in_any_language_stays_as_it_is() -> None:
    made = record("fertig: grün 緑 😀", reason="a\tb\nc")
    assert "fertig: grün 緑 😀" in TextFormatter().format(made)
    fields = json.loads(JsonFormatter().format(made))
    assert (fields["message"], fields["reason"]) == ("fertig: grün 緑 😀", "a\tb\nc")
