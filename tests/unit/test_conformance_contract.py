"""The suite has a test for each paragraph of the contract, and each test names a paragraph."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.backend.capabilities import POWERS
from multiq.conformance.paragraphs import ELSEWHERE, PARAGRAPHS
from multiq.conformance.requirements import PROMISES, REQUIRES, WITHOUT, declared, promise, requires, without
from multiq.conformance.suites import TOPICS, suite, topic_name

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTRACT = Path(__file__, "../../../docs/contract.md").resolve()
TOPIC_FILES = Path(__file__, "../../../multiq/conformance/topics").resolve()


def all_tests() -> Iterator[tuple[str, object]]:
    """Return each test of the suite, with its name."""
    for topic in TOPICS:
        for name, value in vars(topic).items():
            if name.startswith("test_"):
                yield f"{topic_name(topic)}.{name}", value


def numbers_of_the_contract() -> list[str]:
    return re.findall(r"^- \*\*(\d+\.\d+)\*\* ", CONTRACT.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_ledger_has_the_contracts_paragraphs_in_its_order() -> None:
    assert list(PARAGRAPHS) == numbers_of_the_contract()


def test_every_test_names_a_paragraph() -> None:
    assert [name for name, test in all_tests() if not declared(test, PROMISES)] == []


def test_every_paragraph_has_a_test() -> None:
    proved = {number for _, test in all_tests() for number in declared(test, PROMISES)}
    assert set(PARAGRAPHS) - proved == set()


def test_a_promise_tested_elsewhere_is_a_part_of_a_paragraph_with_a_reason() -> None:
    assert set(ELSEWHERE) <= set(PARAGRAPHS)
    assert all(len(reason) > 20 for reason in ELSEWHERE.values())


@pytest.mark.parametrize("power", POWERS)
def test_every_power_has_a_test(power: str) -> None:
    by_topic = any(power in declared(topic, REQUIRES) for topic in TOPICS)
    assert by_topic or [name for name, test in all_tests() if power in declared(test, REQUIRES)]


def test_no_test_requires_a_power_and_its_lack() -> None:
    assert [name for name, test in all_tests() if set(declared(test, REQUIRES)) & set(declared(test, WITHOUT))] == []


def test_the_suite_has_enough_tests_for_the_contract() -> None:
    assert len(list(all_tests())) >= 150


def test_every_test_in_a_topics_file_is_in_the_suite() -> None:
    written = sum(
        len(re.findall(r"^    def test_", path.read_text(encoding="utf-8"), re.MULTILINE))
        for path in TOPIC_FILES.glob("*.py")
    )
    assert written == len(list(all_tests()))


def test_no_two_tests_of_the_suite_have_one_name() -> None:
    # a second definition would silently replace the first
    for path in TOPIC_FILES.glob("*.py"):
        names = re.findall(r"^class (\w+)|^    def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(set(names)) == len(names), path.name


def test_a_suite_has_a_class_for_each_topic() -> None:
    from multiq.conformance import ManualHarness

    classes = suite(ManualHarness)
    assert len(classes) == len(TOPICS)
    assert set(classes) == {f"Test{topic_name(topic)}" for topic in TOPICS}
    assert all(cls.harness_class is ManualHarness for cls in classes.values())


def test_a_function_can_make_the_harnesses() -> None:
    from multiq.conformance import UrlHarness

    def harness() -> UrlHarness:
        return UrlHarness("memory://")

    assert suite(harness)["TestAck"].harness_class().prefix != harness().prefix


@pytest.mark.parametrize("decorator", [promise, requires, without])
def test_a_misspelt_paragraph_or_power_is_refused(decorator: object) -> None:
    with pytest.raises(ValueError, match=r"unknown: 99\.9"):
        decorator("99.9")  # type: ignore[operator]
    with pytest.raises(ValueError, match="at least one name must be given"):
        decorator()  # type: ignore[operator]
