"""Errors, refusals and names. Each failure is reported, and two queues or ids are never confused."""

from __future__ import annotations

import pytest

from multiq.backend import NewJob, State
from multiq.conformance.case import LONG, Topic, promise, requires, without
from multiq.errors import JobNotFound, JobReserved, MultiqError, Unsupported
from multiq.ids import new_id

STRANGE_IDS = {
    "empty": "",
    "a word": "no-such-job",
    "a number": "0",
    "a large number": "18446744073709551616",
    "minus one": "-1",
    "quotes": "'; DROP TABLE jobs; --",
    "a line end": "1\r\nput 0 0 1 1",
    "a NUL": "a\0b",
    "no ASCII": "naïve ☃",
    "long": "x" * 1000,
    "a pattern": "*",
    "an upper-case id": new_id().upper(),
}
SCREEN = 20 * 100  # characters that fit on one screen

_NAMES_GONE_AND_STORED_STATES = r"^(?=.*'gone')(?=.*ready, delayed, reserved, buried)"


class ErrorsTests(Topic):
    @promise("11.2", "1.3")
    @requires("inspection", "management")
    @pytest.mark.parametrize("job_id", STRANGE_IDS.values(), ids=STRANGE_IDS.keys())
    def test_a_strange_id_is_an_id_that_is_not_there(self, job_id: str) -> None:
        # Given a queue with a job, and an id that no job in the queue has
        self.enqueue()
        # When an operation on one job gets the unknown id, then the call raises JobNotFound
        for verb in (self.backend.peek, self.backend.delete, self.backend.kick_job):
            with pytest.raises(JobNotFound) as missing:
                verb(self.queue, job_id)
            assert (missing.value.queue, missing.value.job_id) == (self.queue, job_id)
        with pytest.raises(JobNotFound):
            self.backend.reschedule(self.queue, job_id, 0)
        # And the existing job is unchanged
        assert self.counts() == (1, 0, 0, 0)

    @promise("9.2", "10.4", "11.2")
    @requires("inspection", "purging")
    def test_a_state_in_which_no_job_is_kept_is_refused_by_its_name(self) -> None:
        # Given a queue with a job
        self.enqueue()
        # When jobs are listed in a state that cannot be listed, then the error names the states that can be listed
        with pytest.raises(MultiqError, match=_NAMES_GONE_AND_STORED_STATES):
            self.backend.jobs(self.queue, State.GONE, limit=1)
        with pytest.raises(MultiqError, match=_NAMES_GONE_AND_STORED_STATES):
            self.backend.purge(self.queue, [State.READY, State.GONE])
        # And the job is unchanged
        assert self.counts() == (1, 0, 0, 0)

    @promise("8.2", "7.4", "6.4", "11.2")
    @requires("management")
    def test_a_refusal_of_a_reserved_job_names_it(self) -> None:
        # Given a job that is reserved
        job_id = self.given(State.RESERVED, ttr=LONG)
        # When operations of management are called on the job, then each error names the job
        for verb in (
            self.backend.delete,
            self.backend.kick_job,
            lambda queue, job_id: self.backend.reschedule(queue, job_id, 0),
        ):
            with pytest.raises(JobReserved) as refusal:
                verb(self.queue, job_id)
            assert (refusal.value.queue, refusal.value.job_id) == (self.queue, job_id)
            assert len(str(refusal.value)) < SCREEN

    @promise("11.2")
    @requires("management")
    def test_an_error_leaves_the_backend_usable(self) -> None:
        # Given a backend that has refused several calls
        for _ in range(5):
            with pytest.raises(MultiqError):
                self.backend.delete(self.queue, "no-such-job")
        # Then the backend still works as before
        self.enqueue(b"next")
        assert self.bodies() == [b"next"]

    @promise("2.7", "11.3")
    @without("transactional_enqueue")
    def test_a_connection_that_cannot_be_used_is_refused_and_nothing_is_stored(self) -> None:
        # Given a backend that cannot join a caller's transaction
        with pytest.raises(Unsupported) as refusal:
            self.backend.enqueue(self.queue, [NewJob(b"x", new_id())], connection=object())
        # Then the call raises Unsupported, and no job was enqueued outside of the transaction
        assert refusal.value.capability == "transactional_enqueue"
        assert self.counts() == (0, 0, 0, 0)


class NamesTests(Topic):
    """Two queues are separate, even if their names are almost the same."""

    @promise("11.5")
    @requires("pausing")
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (".jobs", ".Jobs"),
            (".a.b", ".a-b"),
            (".a_b", ".a.b"),
            (".a", ".a."),
            (".a", ".a.ready"),
            (".1", ".01"),
            (".x", ".x" + "y" * 80),
        ],
        ids=["case", "dot and dash", "dot and underscore", "a dot more", "one begins the other", "numbers", "length"],
    )
    def test_queues_with_similar_names_do_not_mix(self, one: str, other: str) -> None:
        # Given two queues whose names are easily confused
        first, second = self.another_queue(one), self._alike(one, other)
        self.enqueue_all(b"first", b"first", queue=first)
        self.enqueue(b"second", queue=second)
        self.backend.pause(second, LONG)
        # Then each queue has its own jobs, its own pause and its own counts
        assert self.counts(first) == (2, 0, 0, 0)
        assert self.counts(second) == (1, 0, 0, 0)
        assert self.bodies(by=self.another_consumer(first)) == [b"first", b"first"]
        self.backend.resume(second)
        assert self.bodies(by=self.another_consumer(second)) == [b"second"]

    @promise("11.5")
    def test_a_name_of_the_full_length_is_used_to_its_last_letter(self) -> None:
        # Given two names of 128 letters that differ only in the last letter
        room = 128 - len(self.another_queue())
        first = self.another_queue("." + "n" * (room - 3) + "a")
        second = first[:-1] + "b"
        self.harness.handed_out.append(second)
        self.enqueue(b"a", queue=first)
        self.enqueue(b"b", queue=second)
        # Then the names are two queues
        assert self.bodies(by=self.another_consumer(second)) == [b"b"]
        assert set(self.backend.queues()) >= {first, second}

    def _alike(self, one: str, other: str) -> str:
        """Return the name of the last queue, but with the ending *other* in place of the ending *one*.

        The harness will also empty the queue with the returned name.
        """
        name = self.harness.handed_out[-1].removesuffix(one) + other
        self.harness.handed_out.append(name)
        return name
