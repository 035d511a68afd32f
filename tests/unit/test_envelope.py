"""Bodies and envelopes are decoded as they were encoded. Other values and other bytes are refused with a reason."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import decimal
import enum
import json
import math
import random
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiq.envelope import (
    END_TASK,
    ENVELOPE_VERSION,
    MAX_BODY_DEFAULT,
    Envelope,
    FlowPart,
    Input,
    Tell,
    decode_envelope,
    decode_json,
    encode_envelope,
    encode_json,
)
from multiq.errors import PayloadInvalid, PayloadTooLarge
from multiq.json_check import check_json

GOLDEN = Path(__file__).parent / "golden" / "envelope_v1"
GOLDEN_FLOWS = Path(__file__).parent / "golden" / "envelope_v2"

#: file name -> the envelope whose bytes it holds
ENVELOPES = {
    "plain": Envelope(1, "send_reset_mail", ["ann@example.com", "Ann"]),
    "nothing": Envelope(1, "nightly"),
    "names": Envelope(1, "mail.reset", ["ann@example.com"], {"name": "Ann", "tags": ["a", None, True]}),
    "every_field": Envelope(
        1, "mail.reset", [1], {"name": "Ann"}, 3, 0, 3600.0, 30.5, {"trace": "00-4bf92f35-01", "customer": "ann"}
    ),
    "expires": Envelope(1, "send_code", ["ann@example.com"], expires=300.0),
    "keep": Envelope(1, "thumbnail", ["a.png"], keep=3600.0),
    "numbers": Envelope(1, "n", [0, -1, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 0.1, -0.0, 1e22, 5e-324, 1e300]),
    "text": Envelope(1, "t", ["", "Zoë 日本 🚲", 'quote " and \\', "tab\tline\nnul\x00", "\u2028", "<b>&'/"]),
    "nested": Envelope(1, "deep", [{"a": [{"b": [[], {}]}]}]),
}

#: file name -> the envelope of a flow's job whose bytes it holds
FLOWS = {
    "first": Envelope(
        2,
        "fetch",
        ["a.png"],
        keep=604800.0,
        flow=FlowPart("01a2", [Tell("default", "01a2.1"), Tell("mail", "01a2.9", "catch")]),
    ),
    "last": Envelope(
        2,
        "publish",
        [None],
        {"notes": None},
        flow=FlowPart(
            "01a2",
            [],
            [Input(0, [("default", "01a2.0")]), Input("notes", [("a", "01a2.1"), ("b", "01a2.2")], True)],
            ends=True,
        ),
    ),
    "end": Envelope(2, END_TASK, flow=FlowPart("01a2", ends=True)),
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


# --- golden files ---


@pytest.mark.parametrize("name", ENVELOPES)
def test_an_envelope_is_written_to_the_byte_as_the_golden_file(name: str) -> None:
    assert encode_envelope(ENVELOPES[name]) == (GOLDEN / f"{name}.json").read_bytes()


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_golden_file_is_read_as_the_envelope_it_was(name: str) -> None:
    assert repr(decode_envelope((GOLDEN / f"{name}.json").read_bytes())) == repr(ENVELOPES[name])  # tells -0.0 from 0.0


@pytest.mark.parametrize("name", ENVELOPES)
def test_any_other_program_reads_a_golden_file_as_json(name: str) -> None:
    fields = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    assert (fields["multiq"], fields["task"]) == (1, ENVELOPES[name].task)
    assert fields.get("args", []) == ENVELOPES[name].args


@pytest.mark.parametrize("name", FLOWS)
def test_the_envelope_of_a_flow_is_written_and_read_as_the_golden_file(name: str) -> None:
    body = (GOLDEN_FLOWS / f"{name}.json").read_bytes()
    assert encode_envelope(FLOWS[name]) == body
    assert decode_envelope(body) == FLOWS[name]


def test_every_golden_file_is_tested() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(ENVELOPES)
    assert {path.stem for path in GOLDEN_FLOWS.iterdir()} == set(FLOWS)


def test_a_flow_in_an_envelope_of_version_1_is_ignored() -> None:
    assert decode_envelope(b'{"multiq":1,"task":"t","flow":{"id":"01a2"}}') == Envelope(1, "t")


# --- envelopes from others ---


@pytest.mark.parametrize(
    "body",
    [
        b'{"task":"t","multiq":1}',
        b' {\n "multiq" : 1 ,\t"task": "t" } \n',
        b'{"multiq":1,"task":"\\u0074"}',
        b'{"multiq":1,"task":"t","unknown":{"deep":[1,2]},"multiq2":9}',
        b'{"multiq":1,"task":"t","args":[],"kwargs":{},"headers":{},"max_attempts":null,"timeout":null}',
    ],
)
def test_order_white_space_escapes_and_unknown_fields_do_not_matter(body: bytes) -> None:
    assert decode_envelope(body) == Envelope(1, "t")


def test_a_whole_number_of_seconds_is_a_number_of_seconds() -> None:
    assert decode_envelope(b'{"multiq":1,"task":"t","retry_for":60,"timeout":5}').retry_for == 60.0


@pytest.mark.parametrize("version", [0, 4, -1, 10**30])
@pytest.mark.parametrize("task", [b'"t"', b'{"name":"t"}', b"null"])
def test_another_version_is_refused_as_such_whatever_its_fields_are(version: int, task: bytes) -> None:
    body = b'{"multiq":%d,"task":%s}' % (version, task)
    with pytest.raises(
        PayloadInvalid, match=f"is an envelope of version {version}, but this multiq reads versions 1 and 2"
    ):
        decode_envelope(body)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"not json", "malformed"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "got `null`"),
        (b"{}", "missing required field `multiq`"),
        (b'{"multiq":1}', "missing required field `task`"),
        (b'{"task":"t"}', "missing required field `multiq`"),
        (b'{"multiq":"1","task":"t"}', "Expected `int`, got `str`"),
        (b'{"multiq":true,"task":"t"}', "Expected `int`, got `bool`"),
        (b'{"multiq":1,"task":7}', "Expected `str`, got `int`"),
        (b'{"multiq":1,"task":"t","args":{}}', "Expected `array`"),
        (b'{"multiq":1,"task":"t","args":null}', "Expected `array`"),
        (b'{"multiq":1,"task":"t","kwargs":[]}', "Expected `object`"),
        (b'{"multiq":1,"task":"t","headers":{"a":1}}', "Expected `str`"),
        (b'{"multiq":1,"task":"t","max_attempts":-1}', "Expected `int` >= 0"),
        (b'{"multiq":1,"task":"t","max_attempts":1.5}', "Expected `int"),
        (b'{"multiq":1,"task":"t","max_crashes":-1}', "Expected `int` >= 0"),
        (b'{"multiq":1,"task":"t","retry_for":-0.5}', "Expected `float` >= 0"),
        (b'{"multiq":1,"task":"t","timeout":-1}', "Expected `float` >= 0"),
        (b'{"multiq":1,"task":"t","timeout":1e999}', "out of range"),
        (b'{"multiq":1,"task":"t","keep":-1}', "Expected `float` >= 0"),
        (b'{"multiq":1,"task":"t","keep":null}', "Expected `float`"),
        (b'{"multiq":1,"task":"t","args":[NaN]}', "malformed"),
        (b'{"multiq":1,"task":"t","args":["\\ud800"]}', "truncated"),
        (b'{"multiq":1,"task":"\xff"}', "UTF-8|utf-8"),
        (b'{"multiq":1,"task":"t","args":[' + b"1" * 5000 + b"]}", "out of range"),
        (b'{"multiq":1,"task":"t","args":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "recursion"),
    ],
)
def test_a_body_that_is_not_an_envelope_is_refused_with_the_reason(body: bytes, complaint: str) -> None:
    with pytest.raises(PayloadInvalid, match=f"the body is not a task's envelope: .*({complaint})"):
        decode_envelope(body)


def test_a_body_over_the_limit_is_not_even_decoded() -> None:
    body = encode_envelope(Envelope(1, "t", ["x" * 100]))
    assert decode_envelope(body, max_body=len(body)).task == "t"
    with pytest.raises(PayloadTooLarge, match="not decoded; raise max_body") as refused:
        decode_envelope(body, max_body=len(body) - 1)
    assert (refused.value.size_bytes, refused.value.limit_bytes) == (len(body), len(body) - 1)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_whatever_make_decoding_fail_in_another_way(body: bytes) -> None:
    decode_json(body)
    try:
        envelope = decode_envelope(body)
    except PayloadInvalid:
        return
    assert envelope.multiq == ENVELOPE_VERSION


def test_a_damaged_envelope_is_read_or_refused() -> None:
    luck = random.Random(7)
    whole = encode_envelope(ENVELOPES["every_field"])
    for _ in range(2000):
        body = bytearray(whole)
        for _ in range(luck.randint(1, 3)):
            body[luck.randrange(len(body))] = luck.randrange(256)
        with contextlib.suppress(PayloadInvalid):
            assert isinstance(decode_envelope(bytes(body)), Envelope)


# --- encoding and decoding ---


@given(json_values)
def test_a_json_value_comes_back_as_it_went_in(value: Any) -> None:
    assert repr(decode_json(encode_json(value))) == repr(value)  # repr tells 1 from 1.0 from True, and -0.0 from 0.0


@given(st.lists(json_values, max_size=3), st.dictionaries(st.text(min_size=1), json_values, max_size=3))
def test_arguments_come_back_as_they_went_in(args: list[Any], kwargs: dict[str, Any]) -> None:
    envelope = Envelope(ENVELOPE_VERSION, "t", args, kwargs)
    assert repr(decode_envelope(encode_envelope(envelope))) == repr(envelope)


@given(json_values)
def test_every_json_parser_reads_what_multiq_writes(value: Any) -> None:
    assert json.loads(encode_json(value)) == value


@pytest.mark.parametrize(
    "value", [2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**4000, 1e308, 5e-324, 0.1 + 0.2]
)
def test_a_number_keeps_every_digit(value: float) -> None:
    assert decode_json(encode_json(value)) == value


def test_minus_zero_keeps_its_sign() -> None:
    assert math.copysign(1, decode_json(encode_json(-0.0))) == -1


def test_a_tuple_comes_back_as_a_list() -> None:
    point = collections.namedtuple("point", "x y")  # noqa: PYI024 - the plain kind, as users have it
    assert decode_json(encode_json({"a": (1, (2,)), "b": point(3, 4)})) == {"a": [1, [2]], "b": [3, 4]}


class Safe(str):
    """A string class as in web frameworks, whose methods return the class itself."""

    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


class Celsius(float):
    """A float of a numeric library."""


class Level(enum.IntEnum):
    HIGH = 3


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Safe("<b>"), "<b>"),
        (Celsius(36.6), 36.6),
        (Level.HIGH, 3),
        (Colour.RED, "red"),
        ({Safe("k"): [Safe("v")]}, {"k": ["v"]}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(int, a=1), {"a": 1}),
    ],
)
def test_a_kind_of_text_number_or_dict_goes_in_as_its_plain_value(value: Any, plain: Any) -> None:
    assert decode_json(encode_json(value)) == plain
    assert decode_envelope(encode_envelope(Envelope(1, "t", [value]))).args == [plain]


# --- what is not JSON ---


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (math.nan, "value is nan, which JSON cannot hold"),
        ([1, math.inf], r"value\[1\] is inf"),
        ({"a": {"b": -math.inf}}, r"value\.a\.b is -inf"),
        ([Celsius("nan")], r"value\[0\] is nan"),
        (b"bytes", "value is of type bytes"),
        ([bytearray(b"x")], r"value\[0\] is of type bytearray"),
        ({"a": [1, {2, 3}]}, r"value\.a\[1\] is of type set"),
        (frozenset(), "of type frozenset"),
        (dt.datetime(2030, 1, 1, tzinfo=dt.UTC), "of type datetime"),
        (dt.date(2030, 1, 1), "of type date"),
        (dt.timedelta(1), "of type timedelta"),
        (decimal.Decimal("1.5"), "of type Decimal"),
        (uuid.UUID(int=1), "of type UUID"),
        (1j, "of type complex"),
        (range(3), "of type range"),
        (object(), "of type object"),
        (int, "of type type"),
        ({1: "a"}, "value has the key 1: JSON's keys are strings"),
        ({"a": [{None: 1}]}, r"value\.a\[0\] has the key None"),
        ({True: 1}, "has the key True"),
        ({(1, 2): 1}, r"has the key \(1, 2\)"),
        ({"k": ["fine", "\ud800"]}, r"value\.k\[1\] cannot be written as JSON: .*surrogates not allowed"),
        ({"\ud800": 1}, r"value's key \\ud800 cannot be written as JSON"),
        ([10**5000], r"value\[0\] cannot be written as JSON: .*4300 digits"),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_with_its_path(value: Any, complaint: str) -> None:
    with pytest.raises(PayloadInvalid, match=complaint) as refused:
        encode_json(value)
    assert str(refused.value).encode("utf-8")  # the message itself can be printed


def test_a_refusal_stays_short_however_deep_the_place_is() -> None:
    value: Any = {1}
    for _ in range(50):
        value = {"a rather long key": value}
    with pytest.raises(PayloadInvalid, match=r"value\.a rather long key.*\.\.\. is of type set") as refused:
        encode_json(value)
    assert len(str(refused.value)) < 200


def test_a_part_of_an_envelope_that_cannot_be_written_is_named_as_the_argument_it_is() -> None:
    for envelope, place in [
        (Envelope(1, "t", [1, "\ud800"]), r"args\[1\]"),
        (Envelope(1, "t", [], {"name": ["\ud800"]}), r"name\[0\]"),
        (Envelope(1, "t", headers={"trace": "\ud800"}), r"headers\.trace"),
    ]:
        with pytest.raises(PayloadInvalid, match=f"^{place} cannot be written as JSON"):
            encode_envelope(envelope)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def test_nesting_is_taken_up_to_a_hundred_levels() -> None:
    assert decode_json(encode_json(nested(100))) == nested(100)
    with pytest.raises(PayloadInvalid, match="nested more than 100 deep, or contains itself"):
        encode_json(nested(101))


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(PayloadInvalid, match="contains itself"):
        encode_json(loop)


def test_the_largest_body_is_taken_and_one_byte_more_is_not() -> None:
    assert len(encode_json("x" * (MAX_BODY_DEFAULT - 2))) == MAX_BODY_DEFAULT
    with pytest.raises(PayloadTooLarge, match=r"262,145 bytes is over the limit of 262,144 bytes: store the data else"):
        encode_json("x" * (MAX_BODY_DEFAULT - 1))
    assert len(encode_json("x" * 10_000_000, max_body=2**24)) == 10_000_002
    with pytest.raises(PayloadTooLarge):
        encode_envelope(Envelope(1, "t", ["x" * 100]), max_body=100)


@pytest.mark.parametrize("value", [None, True, 1, "text"])
def test_plain_values_pass_the_check(value: Any) -> None:
    check_json(value)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"{", b"hello", b"1" * 5000, b"[" * 20_000, b'"\\ud800"', b"1e999", b"NaN"]
)
def test_a_body_that_is_not_json_is_returned_as_bytes(body: bytes) -> None:
    assert decode_json(body) is body
