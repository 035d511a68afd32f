"""Ids are UUIDs of version 7: unique, and in the order in which they were made."""

from __future__ import annotations

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiq.ids import new_id, new_ids


@given(st.integers(min_value=0, max_value=200))
def test_new_ids_are_as_many_as_asked_for_and_all_differ(count: int) -> None:
    ids = new_ids(count)
    assert len(ids) == len(set(ids)) == count


@pytest.mark.parametrize("number", range(20))
def test_an_id_is_a_uuid_of_version_7(number: int) -> None:
    text = new_ids(20)[number]
    parsed = uuid.UUID(text)
    assert str(parsed) == text
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)


def test_an_id_begins_with_the_milliseconds_of_its_making() -> None:
    before = time.time_ns() // 1_000_000
    made = uuid.UUID(new_id()).int >> 80
    assert before <= made <= time.time_ns() // 1_000_000


def test_ids_made_together_and_ids_made_later_ascend() -> None:
    first = new_ids(10_000)  # more than a millisecond's counter holds
    assert first == sorted(first)
    time.sleep(0.005)
    assert new_id() > first[0]


def test_threads_never_make_the_same_id() -> None:
    with ThreadPoolExecutor(8) as threads:
        ids = [made for batch in threads.map(new_ids, [500] * 40) for made in batch]
    assert len(set(ids)) == 20_000


def test_a_forked_child_makes_other_ids_than_its_parent() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, " ".join(new_ids(50)).encode())
        os._exit(0)
    mine = set(new_ids(50))
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        theirs = set(pipe.read().split())
    assert len(theirs) == 50
    assert not mine & theirs


def test_most_of_an_id_cannot_be_guessed() -> None:
    tails = {made[19:] for made in new_ids(2000)}
    assert len(tails) == 2000
    assert {tail[0] for tail in tails} == set("89ab")
