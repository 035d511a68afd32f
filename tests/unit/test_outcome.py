"""The JSON of an outcome, which other programs may read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multiq.backend import Outcome
from multiq.errors import PayloadInvalid
from multiq.outcome import AttemptError, decode_outcome, encode_outcome, encode_value

TIMES: dict[str, Any] = {"started": 10.5, "finished": 12.0, "worker": "host:7", "attempt": 3}


def stored(body: bytes) -> Outcome:
    return Outcome(queue="q", id="1", kind="done", body=body, attempt=3, age=0.0, expires_in=60.0)


@pytest.mark.parametrize(
    ("value", "omitted", "errors", "expected"),
    [
        (b"7", None, [], b'{"v":1,"value":7,"started":10.5,"finished":12.0,"worker":"host:7","attempt":3}'),
        (b"null", None, [], b'{"v":1,"value":null,"started":10.5,"finished":12.0,"worker":"host:7","attempt":3}'),
        (None, "why", [], b'{"v":1,"omitted":"why","started":10.5,"finished":12.0,"worker":"host:7","attempt":3}'),
        (
            b"[]",
            None,
            [AttemptError(2, "ValueError: no", 9.0, "host:6")],
            b'{"v":1,"value":[],"started":10.5,"finished":12.0,"worker":"host:7","attempt":3,"errors":[%s]}'
            % b'{"attempt":2,"error":"ValueError: no","at":9.0,"worker":"host:6"}',
        ),
    ],
    ids=["value", "none", "omitted", "errors"],
)
def test_an_outcome_is_written_to_the_byte_and_read_again(
    value: bytes | None, omitted: str | None, errors: list[AttemptError], expected: bytes
) -> None:
    body, left_out = encode_outcome(value, omitted, errors=errors, **TIMES)
    assert (body, left_out) == (expected, omitted)
    decoded = decode_outcome(stored(body))
    assert (decoded.omitted, decoded.errors) == (omitted, errors)
    assert decoded.value == (None if value is None else json.loads(value))
    assert (decoded.started, decoded.finished, decoded.worker, decoded.attempt) == (10.5, 12.0, "host:7", 3)


@pytest.mark.parametrize("most", [None, 10_000, 700, 300, 150])
def test_an_outcome_keeps_to_the_backend_s_limit(most: int | None) -> None:
    errors = [AttemptError(number, "x" * 20, 9.0, "host:6") for number in range(5)]
    body, left_out = encode_outcome(b'"' + b"x" * 300 + b'"', None, errors=errors, most=most, **TIMES)
    decoded = decode_outcome(stored(body))
    assert most is None or len(body) <= most or most == 150  # 150 bytes are less than the other fields need
    assert (left_out is None) == (decoded.omitted is None) == (most is None or most >= 10_000)


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    assert decode_outcome(stored(b'{"v":1,"value":7,"trace":[1]}')).value == 7


@pytest.mark.parametrize(
    "body", [b"", b"7", b"{}", b'{"v":"1"}', b'{"v":1,"value":', b'{"v":1,"attempt":"x"}', b"\xff"]
)
def test_bytes_that_are_not_an_outcome_are_refused(body: bytes) -> None:
    with pytest.raises(PayloadInvalid, match="the outcome of job 1 cannot be read"):
        decode_outcome(stored(body))


def test_a_later_version_is_named() -> None:
    with pytest.raises(PayloadInvalid, match="is of version 2, but this multiq reads version 1"):
        decode_outcome(stored(b'{"v":2}'))


def test_code_of_a_value_s_class_may_raise_anything() -> None:
    class Rude(dict[str, int]):
        def items(self) -> Any:
            raise SystemExit

    assert encode_value(Rude(a=1), 1000) == (None, "the value cannot be read: SystemExit")


def test_a_value_that_has_no_json_has_a_reason() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (loop, object(), {1: 2}, 10**5000, "\ud800"):
        encoded, reason = encode_value(value, 1000)
        assert encoded is None
        assert reason
