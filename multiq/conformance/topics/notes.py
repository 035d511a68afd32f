"""Notes: stored, read, listed, expired, and changed by compare-and-set."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, After, Arrive, Drop, Enqueue, Put, State, Version
from multiq.conformance.case import BODIES, BOUNDARIES, IDS, LONG, SLEEP_GRACE, Topic, promise, requires
from multiq.conformance.threads import together

if TYPE_CHECKING:
    from multiq.backend import Backend, Note, NotePage, Step

CONTENDERS = 16  # callers that change one note at the same time
#: Keys. If a prefix were a pattern, or if case were ignored, some of the keys would match other keys.
KEYS = [
    "!", "%", "%a", "*", "*a", "-", ".", "/", "0", "10", "2", "?", "A", "AB", "[", "[a]", "[ab]", "\\", "\\%", "_",
    "_a", "a", "a%b", "a*b", "a?b", "aB", "a[b", "a\\b", "a_b", "ab", "abc", "axb", "b", "{", "{a}", "|", "~",
]  # fmt: skip


class _Notes(Topic):
    """The helpers of this file's topics."""

    def put(self, key: str, value: bytes = b"x", ttl: float | None = None, *, home: str | None = None) -> None:
        assert self.backend.carry_out([Put(home or self.queue, key, value, ttl)]) is True

    def drop(self, key: str) -> None:
        assert self.backend.carry_out([Drop(self.queue, key)]) is True

    def note(self, key: str, *, home: str | None = None, backend: Backend | None = None) -> Note:
        found = (backend or self.backend).note(home or self.queue, key)
        assert found is not None, f"there is no note {key!r}"
        return found

    def is_there(self, key: str) -> bool:
        return self.backend.note(self.queue, key) is not None

    def keys(self, prefix: str = "", *, home: str | None = None) -> list[str]:
        page = self.backend.notes(home or self.queue, prefix)
        assert page.after is None
        return [note.key for note in page.notes]

    def change(self, *steps: Step, when: dict[str, str], backend: Backend | None = None) -> bool:
        """Carry out steps if the notes of the test's queue have the given versions."""
        conditions = [Version(self.queue, key, version) for key, version in when.items()]
        return (backend or self.backend).carry_out(steps, when=conditions)


@requires("notes", "holds", "inspection")
class NotesTests(_Notes):
    # --- stored ---

    @promise("16.1", "16.3")
    def test_a_note_is_stored_and_read(self) -> None:
        # Given a queue without notes
        assert self.backend.note(self.queue, "key") is None
        # When a note is stored, then every client reads it
        self.put("key", b"value")
        for backend in (self.backend, self.another_backend()):
            note = self.note("key", backend=backend)
            assert (note.key, note.value, note.expires_in) == ("key", b"value", None)
            assert note.version

    @promise("16.1", "16.3")
    @pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
    def test_a_note_has_its_bytes_unchanged(self, body: bytes) -> None:
        self.put("key", body)
        assert self.note("key").value == body
        assert [note.value for note in self.backend.notes(self.queue).notes] == [body]

    @promise("16.1")
    def test_notes_around_64_kib_are_stored_whole(self) -> None:
        sizes = sorted({min(size, self.can.max_body or size) for size in BOUNDARIES})
        values = {f"key-{at}": bytes([65 + at]) * size for at, size in enumerate(sizes)}
        assert self.backend.carry_out([Put(self.queue, key, value) for key, value in values.items()])
        assert {note.key: note.value for note in self.backend.notes(self.queue).notes} == values

    @promise("16.1")
    def test_a_note_replaces_the_one_of_the_same_key(self) -> None:
        self.put("key", b"old")
        before = self.note("key")
        self.put("key", b"new")
        after = self.note("key")
        assert after.value == b"new"
        assert after.version != before.version
        assert self.keys() == ["key"]

    @promise("16.1")
    def test_a_note_that_is_dropped_is_gone(self) -> None:
        self.put("key")
        self.put("other")
        self.drop("key")
        assert self.backend.note(self.queue, "key") is None
        assert self.keys() == ["other"]
        # And a second drop changes nothing, and a drop of an unknown key changes nothing
        self.drop("key")
        self.drop("never")
        assert self.keys() == ["other"]

    @promise("16.1", "16.2")
    def test_each_put_gives_another_version_also_of_the_same_bytes(self) -> None:
        # Given a note that is stored, replaced, dropped and stored again, and that then expires
        seen = []
        for number in range(12):
            self.put("key", b"same", ttl=self.short_delay if number == 8 else None)
            note = self.backend.note(self.queue, "key")
            seen += [note.version] if note is not None else []
            assert note is not None or number == 8, "there is no note"
            if number % 3 == 1:
                self.drop("key")
            if number == 8:
                self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
                assert not self.is_there("key")
        # Then all versions are different
        assert len(set(seen)) == len(seen)
        assert "" not in seen

    @promise("16.1", "15.4")
    def test_of_several_changes_of_a_note_in_one_call_the_last_one_stays(self) -> None:
        steps: list[Step] = [
            Put(self.queue, "put", b"1"), Drop(self.queue, "put"), Put(self.queue, "put", b"2"),
            Put(self.queue, "dropped", b"1"), Drop(self.queue, "dropped"),
            Put(self.queue, "twice", b"1"), Put(self.queue, "twice", b"2"),
        ]  # fmt: skip
        assert self.backend.carry_out(steps) is True
        assert {note.key: note.value for note in self.backend.notes(self.queue).notes} == {"put": b"2", "twice": b"2"}

    @promise("16.1")
    def test_keys_that_differ_are_keys_of_different_notes(self) -> None:
        # Given keys that a store might mix up, and keys of the greatest length
        keys = list(dict.fromkeys([*KEYS, *IDS, "x" * 199 + "y"]))
        for key in keys:
            self.put(key, key.encode())
        # Then each key has its own note
        assert {key: self.note(key).value for key in keys} == {key: key.encode() for key in keys}
        assert self.keys() == sorted(keys)

    @promise("16.1", "11.5")
    def test_notes_of_different_homes_are_different_notes(self) -> None:
        # Given queues of similar names, with notes of one key
        homes = [self.queue, self.another_queue(), self.another_queue(".A"), self.another_queue(".a")]
        for home in homes:
            self.put("key", home.encode(), home=home)
        # When one note is dropped, then the other notes stay
        self.drop("key")
        assert [self.note("key", home=home).value for home in homes[1:]] == [home.encode() for home in homes[1:]]
        assert not self.is_there("key")

    # --- listed ---

    @promise("16.3")
    def test_notes_are_listed_by_their_keys(self) -> None:
        # Given notes that are stored in an order other than the order of their keys
        for key in reversed(KEYS):
            self.put(key, key.encode())
        # Then the notes are listed in the order of their keys' characters, with the same values that ``note`` returns
        page = self.backend.notes(self.queue)
        assert [note.key for note in page.notes] == sorted(KEYS)
        assert page.notes == [self.note(key) for key in sorted(KEYS)]

    @promise("16.3")
    @pytest.mark.parametrize(
        "prefix", ["a", "A", "ab", "a_", "a%", "a*", "a?", "[", "[a", "_", "%", "*", "\\", "{", "~", "zz"]
    )
    def test_a_prefix_means_nothing_but_itself(self, prefix: str) -> None:
        assert self.backend.carry_out([Put(self.queue, key, b"x") for key in KEYS]) is True
        assert self.keys(prefix) == sorted(key for key in KEYS if key.startswith(prefix))

    @promise("16.3")
    def test_an_empty_home_has_one_empty_page(self) -> None:
        page = self.backend.notes(self.queue)
        assert (page.notes, page.after) == ([], None)
        self.put("key")
        assert self.keys("other") == []
        assert self.keys(home=self.another_queue()) == []

    @promise("16.3")
    @pytest.mark.parametrize("prefix", ["", "k/"])
    def test_pages_follow_each_other_without_gap_or_overlap(self, prefix: str) -> None:
        # Given more notes than fit on a page, and some notes with other keys
        keys = [f"k/{number:02}" for number in range(11)]
        others = ["a", "k.", "k0", "z"]
        assert self.backend.carry_out([Put(self.queue, key, key.encode()) for key in (*keys, *others)])
        expected = sorted([*keys, *others]) if not prefix else keys
        # When the pages are read one after the other
        pages = self._pages(prefix, 4)
        # Then all pages except the last are full, and the pages together have all notes
        assert [len(page) for page in pages] == [4] * (len(expected) // 4) + [len(expected) % 4]
        assert [note.key for page in pages for note in page] == expected
        assert all(note.value == note.key.encode() for page in pages for note in page)

    @promise("16.3")
    def test_a_page_that_has_all_remaining_entries_is_the_last(self) -> None:
        assert self.backend.carry_out([Put(self.queue, f"key-{number}", b"x") for number in range(6)])
        assert [len(page) for page in self._pages("", 3)] == [3, 3]

    @promise("16.3")
    def test_a_note_that_stays_is_listed_once_while_others_come_and_go(self) -> None:
        # Given a listing whose first page was read
        keys = [f"{number}" for number in range(8)]
        assert self.backend.carry_out([Put(self.queue, key, b"x") for key in keys])
        page = self.backend.notes(self.queue, limit=3)
        seen = [note.key for note in page.notes]
        # When notes before, at and after the cursor are dropped, stored and changed
        gone = [Drop(self.queue, keys[at]) for at in (0, 2, 4)]
        assert self.backend.carry_out([*gone, Put(self.queue, "00", b"x"), Put(self.queue, "6", b"new")])
        # Then the next pages list the other notes
        page = self.backend.notes(self.queue, after=page.after)
        assert seen == ["0", "1", "2"]
        assert [(note.key, note.value) for note in page.notes] == [("3", b"x"), ("5", b"x"), ("6", b"new"), ("7", b"x")]

    @promise("16.3")
    def test_a_thousand_notes_are_listed(self) -> None:
        keys = [f"key-{number:04}" for number in range(1200)]
        for start in (0, 600):
            assert self.backend.carry_out([Put(self.queue, key, b"x") for key in keys[start : start + 600]])
        assert [note.key for page in self._pages("key-", 500) for note in page] == keys

    # --- expired ---

    @promise("16.4")
    def test_a_note_expires_after_its_ttl_and_not_before(self) -> None:
        # Given a note with a ttl
        moment = self.in_(self.short_delay)
        self.put("key", ttl=self.short_delay)
        over = self.in_(self.short_delay + self.can.delay_resolution)
        # When almost all of the ttl has passed, then the note still exists
        self.harness.nearly(moment)
        found, listed, now = self.is_there("key"), self.keys(), self.harness.now()
        assert (found and listed == ["key"]) or now >= moment
        # And when the whole ttl has passed, then no call returns the note
        self.harness.past(over)
        assert not self.is_there("key")
        assert self.keys() == []

    @promise("16.4")
    def test_a_look_shows_the_time_that_is_left(self) -> None:
        self.put("key", ttl=LONG)
        self.put("other", ttl=2 * LONG)
        self.harness.advance(2 * self.short_delay)
        assert self.about(self.note("key").expires_in, LONG - 2 * self.short_delay)
        assert [round((note.expires_in or 0) / LONG) for note in self.backend.notes(self.queue).notes] == [1, 2]

    @promise("16.4")
    def test_a_note_without_a_ttl_stays(self) -> None:
        self.put("key")
        self.harness.past(self.in_(2 * self.short_delay))
        self.put("other")  # a change of the home queue, during which a store may delete expired notes
        assert self.keys() == ["key", "other"]

    @promise("16.4")
    @pytest.mark.parametrize("ttl", [None, LONG])
    def test_the_last_put_decides_how_long_a_note_stays(self, ttl: float | None) -> None:
        # Given a note whose short ttl is replaced by a long ttl, and a note with the reverse change
        self.put("long", b"old", ttl=self.short_delay)
        self.put("long", b"new", ttl=ttl)
        self.put("short", b"old", ttl=ttl)
        self.put("short", b"new", ttl=self.short_delay)
        # When the short ttl has passed
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        # Then the first note is kept, and the second note is gone
        assert self.keys() == ["long"]
        note = self.note("long")
        assert note.value == b"new"
        assert note.expires_in is None if ttl is None else self.about(note.expires_in, ttl - self.short_delay)

    @promise("16.4", "16.2")
    def test_an_expired_note_counts_as_none(self) -> None:
        # Given a note that has expired
        self.put("key", b"old", ttl=self.short_delay)
        note = self.backend.note(self.queue, "key")
        # None if this machine has stalled for so long that the note has expired
        version = "1" if note is None else note.version
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        # Then a condition with the expired note's version does not hold, and a condition with the empty version holds
        assert not self.change(Put(self.queue, "key", b"wrong"), when={"key": version})
        assert self.change(Put(self.queue, "key", b"new"), when={"key": ""})
        assert self.note("key").value == b"new"
        assert self.note("key").version != version

    @promise("16.4", "16.3")
    def test_pages_leave_out_expired_notes(self) -> None:
        # Given notes, every second of which has expired
        steps = [Put(self.queue, f"{number}", b"x", self.short_delay if number % 2 else None) for number in range(8)]
        assert self.backend.carry_out(steps)
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        # Then the listing has only the notes that have not expired, in full pages
        assert [[note.key for note in page] for page in self._pages("", 2)] == [["0", "2"], ["4", "6"]]

    @promise("16.4")
    def test_expired_notes_go_and_the_others_stay_while_notes_are_stored(self) -> None:
        # Given many notes that have expired, and some notes that have not expired
        doomed = [Put(self.queue, f"doomed-{number}", b"x", self.short_delay) for number in range(20)]
        assert self.backend.carry_out([*doomed, Put(self.queue, "kept", b"x"), Put(self.queue, "long", b"x", LONG)])
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        # When more notes are stored, one under the key of an expired note, then all notes that have not expired still
        # exist
        new = [f"new-{number}" for number in range(12)]
        for key in (*new, "doomed-7"):
            self.put(key)
        assert self.keys() == sorted(["doomed-7", "kept", "long", *new])

    # --- not jobs ---

    @promise("16.5", "9.4", "9.5")
    def test_a_home_that_has_only_notes_is_no_queue_in_use(self) -> None:
        self.put("key")
        self.put("other", ttl=LONG)
        assert self.queue not in self.backend.queues()
        assert (self.counts(), self.held_count()) == ((0, 0, 0, 0), 0)
        assert self.reserve() == []
        if self.can.lists_jobs:
            assert [self.backend.jobs(self.queue, state).jobs for state in (State.READY, State.HELD)] == [[], []]

    @promise("16.5", "10.1", "10.4", "8.1")
    @requires("pausing", "purging", "management")
    def test_the_verbs_for_jobs_leave_notes_alone(self) -> None:
        # Given a queue with notes and jobs
        self.put("key", b"value")
        before = self.note("key")
        job_id = self.enqueue()
        self.held()
        # When the queue is paused, resumed and purged, one job is deleted, and one job is acked
        self.backend.pause(self.queue, LONG)
        self.put("paused")
        self.backend.resume(self.queue)
        self.backend.delete(self.queue, job_id)
        self.enqueue()
        self.settle(Ack(self.take()))
        self.enqueue()
        assert self.backend.purge(self.queue, [State.READY, State.DELAYED, State.BURIED, State.HELD]) == 2
        # Then the notes are as before
        assert self.note("key") == before
        assert self.keys() == ["key", "paused"]

    @promise("16.5", "1.3")
    @requires("client_ids", "management")
    def test_a_note_and_a_job_of_one_name_are_two_things(self) -> None:
        # Given a job whose id is the key of a note
        job_id = self.enqueue(b"job")
        self.put(job_id, b"note")
        self.backend.delete(self.queue, job_id)
        assert self.note(job_id).value == b"note"
        self.enqueue(b"again", id=job_id)
        self.drop(job_id)
        assert self.take().body == b"again"

    @promise("16.5", "3.2")
    def test_a_note_gives_a_waiting_consumer_nothing(self) -> None:
        consumer = self.another_consumer()
        waiting = self.waiting(consumer)
        self.put("key")
        time.sleep(SLEEP_GRACE)
        assert waiting.is_alive()
        consumer.interrupt()
        assert self.woken(waiting) == []

    @promise("16.1", "11.7")
    @requires("persistent")
    def test_notes_outlive_all_clients(self) -> None:
        # Given notes
        self.put("key", b"\0value")
        self.put("ttl", ttl=LONG)
        before = self.note("key")
        # When all backends are closed, and the store is restarted
        for backend in self._backends:
            backend.close()
        self._worker = None
        self.harness.restart()
        self.backend = self.another_backend()
        # Then the notes still exist, and new versions differ from the old versions
        assert self.note("key") == before
        assert self.about(self.note("ttl").expires_in, LONG)
        assert self.change(Put(self.queue, "key", b"new"), when={"key": before.version})
        assert self.note("key").version != before.version

    def _pages(self, prefix: str, limit: int) -> list[list[Note]]:
        pages: list[list[Note]] = []
        after = None
        while not pages or after is not None:
            assert len(pages) < 100, "the listing does not come to an end"
            page: NotePage = self.backend.notes(self.queue, prefix, limit=limit, after=after)
            pages.append(page.notes)
            after = page.after
        return pages


@requires("notes", "holds", "inspection")
class CompareAndSetTests(_Notes):
    # --- conditions ---

    @promise("16.2")
    def test_a_condition_that_holds_lets_the_steps_be_carried_out(self) -> None:
        # Given a note
        self.put("key", b"old")
        # When the note is changed under the condition that its version is unchanged, then the change succeeds
        assert self.change(Put(self.queue, "key", b"new"), when={"key": self.note("key").version}) is True
        assert self.note("key").value == b"new"

    @promise("16.2")
    def test_a_condition_that_does_not_hold_lets_no_step_be_carried_out(self) -> None:
        # Given a note that was changed since it was read, a held job, and another note
        self.put("key", b"old")
        version = self.note("key").version
        self.put("key", b"new")
        self.put("other", b"old")
        before = self.backend.notes(self.queue)
        job_id = self.held()
        new = [self.new(), self.new()]
        elsewhere = self.another_queue()
        # When steps of all kinds are to be carried out under the condition that the note is unchanged
        steps: list[Step] = [
            Put(self.queue, "key", b"wrong"), Put(self.queue, "third", b"wrong"), Drop(self.queue, "other"),
            Arrive(self.queue, job_id, "a"), Enqueue(self.queue, new[0]), Enqueue(elsewhere, new[1]),
            Put(elsewhere, "key", b"wrong"),
        ]  # fmt: skip
        assert self.change(*steps, when={"key": version}) is False
        # Then no step is carried out
        assert self.backend.notes(self.queue) == before
        assert self.keys(home=elsewhere) == []
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        assert [self.counts(queue) for queue in (self.queue, elsewhere)] == [(0, 0, 0, 0)] * 2
        assert self.backend.relay([self.queue]) == 0
        assert self.counts(elsewhere) == (0, 0, 0, 0)

    @promise("16.2")
    def test_the_empty_version_means_that_there_is_no_note(self) -> None:
        # When a note is stored under the condition that the note does not exist, then the call succeeds once
        assert self.change(Put(self.queue, "key", b"first"), when={"key": ""}) is True
        assert self.change(Put(self.queue, "key", b"second"), when={"key": ""}) is False
        assert self.note("key").value == b"first"
        # And after a drop, the same call succeeds again
        self.drop("key")
        assert self.change(Put(self.queue, "key", b"third"), when={"key": ""}) is True

    @promise("16.2")
    def test_a_note_that_was_dropped_does_not_have_its_version_any_more(self) -> None:
        self.put("key", b"old")
        version = self.note("key").version
        self.drop("key")
        assert self.change(Put(self.queue, "key", b"wrong"), when={"key": version}) is False
        assert not self.is_there("key")
        # And after the note is stored again with the same bytes, a condition with the old version does not hold
        self.put("key", b"old")
        assert self.change(Put(self.queue, "key", b"wrong"), when={"key": version}) is False
        assert self.change(Drop(self.queue, "key"), when={"key": version}) is False
        assert self.note("key").value == b"old"

    @promise("16.2")
    @pytest.mark.parametrize("version", ["0", "no-such-version", "-1", " ", "None"])
    def test_a_version_that_the_note_never_had_does_not_hold(self, version: str) -> None:
        self.put("key")
        for key in ("key", "never"):
            assert self.change(Put(self.queue, key, b"wrong"), when={key: version}) is False
        assert self.note("key").value == b"x"
        assert not self.is_there("never")

    @promise("16.2")
    def test_the_version_of_another_note_does_not_hold(self) -> None:
        # Given notes of two keys and two queues
        home = self.another_queue()
        self.put("key")
        self.put("other")
        self.put("key", home=home)
        # When a note is changed under a condition with the other note's version, then the note is not changed
        for version in (self.note("other").version, self.note("key", home=home).version):
            if version != self.note("key").version:  # versions need not differ between notes
                assert self.change(Put(self.queue, "key", b"wrong"), when={"key": version}) is False
        assert self.note("key").value == b"x"

    @promise("16.2")
    def test_all_conditions_must_hold(self) -> None:
        # Given three notes
        for key in "abc":
            self.put(key)
        right = {key: self.note(key).version for key in "abc"}
        # When any one of the conditions does not hold, then no step is carried out
        for wrong in "abc":
            assert self.change(Put(self.queue, "d", b"wrong"), when={**right, wrong: ""}) is False
        assert self.change(Put(self.queue, "d", b"wrong"), when={**right, "none": "1"}) is False
        assert not self.is_there("d")
        # And when all conditions hold, then the step is carried out
        assert self.change(Put(self.queue, "d", b"right"), when={**right, "d": ""}) is True

    @promise("16.2")
    def test_a_condition_can_be_about_a_note_that_the_steps_leave(self) -> None:
        self.put("flag")
        version = self.note("flag").version
        job = self.new()
        for expected in (True, True):
            assert self.change(Enqueue(self.queue, job), when={"flag": version}) is expected
        assert self.counts() == (1, 0, 0, 0)
        self.drop("flag")
        assert self.change(Enqueue(self.queue, self.new()), when={"flag": version}) is False
        assert self.counts() == (1, 0, 0, 0)

    @promise("16.2", "15.5")
    def test_conditions_are_checked_before_the_first_step(self) -> None:
        # Given several steps, the first of which would make the condition hold
        assert self.change(Put(self.queue, "other", b"x"), Put(self.queue, "key", b"x"), when={"key": "1"}) is False
        self.put("key")
        steps: list[Step] = [Drop(self.queue, "key"), Put(self.queue, "key", b"wrong")]
        # Then the condition does not hold
        assert self.change(*steps, when={"key": ""}) is False
        assert self.note("key").value == b"x"

    @promise("16.2", "14.3")
    def test_steps_of_all_kinds_are_carried_out_under_a_condition(self) -> None:
        # Given a held job and a note
        self.put("key")
        job_id, job = self.held(), self.new(delay=LONG)
        elsewhere = self.another_queue()
        waiting = self.waiting(self.another_consumer())
        # When the job, the note, and notes and jobs in other queues are changed under one condition
        steps: list[Step] = [
            Drop(self.queue, "key"), Put(self.queue, "new", b"x"), Arrive(self.queue, job_id, "a"),
            Enqueue(self.queue, job), Put(elsewhere, "new", b"x"), Enqueue(elsewhere, self.new()),
        ]  # fmt: skip
        assert self.change(*steps, when={"key": self.note("key").version}) is True
        # Then the job and the notes are changed, and a waiting consumer has the released job
        assert [lease.id for lease in self.woken(waiting)] == [job_id]
        assert self.state(job.id) is State.DELAYED
        assert (self.keys(), self.keys(home=elsewhere)) == (["new"], ["new"])
        assert self.counts(elsewhere) == (1, 0, 0, 0)
        assert self.backend.relay([self.queue]) == 0

    @promise("16.2", "15.1", "16.1")
    def test_a_change_by_a_verdict_changes_the_version(self) -> None:
        # Given a note that was read
        self.put("key", b"old")
        version = self.note("key").version
        # When a verdict's step stores the note again
        self.enqueue()
        self.settle(Ack(self.take(), After(steps=(Put(self.queue, "key", b"by an ack"),))))
        # Then a condition with the version that was read does not hold any more
        assert self.change(Put(self.queue, "key", b"wrong"), when={"key": version}) is False
        assert self.note("key").value == b"by an ack"

    # --- several at the same time ---

    @promise("16.2", "11.4")
    @pytest.mark.parametrize("is_new", [False, True], ids=["a note", "no note"])
    def test_of_many_that_change_a_note_at_once_one_succeeds(self, is_new: bool) -> None:
        backends = [self.another_backend() for _ in range(CONTENDERS)]
        for number in range(self.harness.rounds):
            # Given a note that many callers have read, or no note
            key = f"key-{number}" if is_new else "key"
            if not is_new and number == 0:
                self.put(key)
            version = "" if is_new else self.note(key).version
            jobs = [self.new(b"%d" % at) for at in range(CONTENDERS)]
            works = [
                partial(self.change, Put(self.queue, key, b"%d" % at), Enqueue(self.queue, jobs[at]),
                        when={key: version}, backend=backend)
                for at, backend in enumerate(backends)
            ]  # fmt: skip
            # When all callers change the note at the same time, then one call succeeds, and the other calls have
            # changed nothing
            (winner,) = [at for at, has_won in enumerate(together(works)) if has_won]
            assert self.note(key).value == b"%d" % winner
            assert [lease.id for lease in self.reserve()] == [jobs[winner].id]
            self.settle(*map(Ack, list(self.worker.held.values())))

    @promise("16.2", "11.4")
    def test_no_change_of_a_counter_is_lost(self) -> None:
        # Given a counter, which several callers increment by compare-and-set
        self.put("count", b"0")
        each = 10

        def increment(backend: Backend) -> None:
            done = 0
            while done < each:
                note = self.note("count", backend=backend)
                new = Put(self.queue, "count", b"%d" % (int(note.value) + 1))
                done += self.change(new, when={"count": note.version}, backend=backend)

        backends = [self.another_backend() for _ in range(self.harness.threads)]
        together([partial(increment, backend) for backend in backends])
        # Then each increment counts
        assert self.note("count").value == b"%d" % (each * len(backends))
