"""An enqueue inside the caller's own transaction."""

from __future__ import annotations

import pytest

from multiq.backend import State
from multiq.conformance.case import LONG, Topic, promise, requires
from multiq.errors import MultiqError


class TransactionTests(Topic):
    @promise("2.7")
    @requires("transactional_enqueue")
    def test_a_job_exists_once_the_caller_commits(self) -> None:
        # Given a caller's transaction in which a job is enqueued
        self.counts()
        with self.transaction() as connection:
            (job_id,) = self.backend.enqueue(self.queue, [self.new(b"inside")], connection=connection)
            # When the transaction commits
            connection.commit()
        # Then the job exists, with the id that the enqueue returned
        assert self.peek(job_id).body == b"inside"
        assert self.bodies() == [b"inside"]

    @promise("2.7")
    @requires("transactional_enqueue")
    def test_a_job_never_was_if_the_caller_rolls_back(self) -> None:
        # Given a caller's transaction in which jobs are enqueued
        self.counts()
        with self.transaction() as connection:
            self.backend.enqueue(self.queue, [self.new(b"a"), self.new(b"b", delay=LONG)], connection=connection)
            # When the transaction rolls back
            connection.rollback()
        # Then no job was enqueued
        assert self.counts() == (0, 0, 0, 0)
        assert self.reserve() == []

    @promise("2.7", "3.6")
    @requires("transactional_enqueue")
    def test_a_job_is_not_handed_out_before_the_commit(self) -> None:
        # Given a caller's transaction that is still open
        self.counts()
        with self.transaction() as connection:
            self.backend.enqueue(self.queue, [self.new(b"inside")], connection=connection)
            # When other connections read, then they see no job, and do not wait
            looking = self.background(lambda: self.another_backend().stats(self.queue).ready)
            assert self.woken(looking) == 0
            connection.commit()
        assert self.bodies() == [b"inside"]

    @promise("2.7", "2.2")
    @requires("transactional_enqueue")
    def test_several_enqueues_in_one_transaction_keep_their_order_and_options(self) -> None:
        # Given two enqueues in one transaction
        self.counts()
        with self.transaction() as connection:
            self.backend.enqueue(self.queue, [self.new(b"1"), self.new(b"2")], connection=connection)
            late, _ = self.backend.enqueue(
                self.queue, [self.new(b"late", delay=LONG), self.new(b"3")], connection=connection
            )
            connection.commit()
        # Then the order and the options are the same as without a transaction
        assert self.stands(late, State.DELAYED)
        assert self.bodies() == [b"1", b"2", b"3"]

    @promise("2.7", "3.7")
    @requires("transactional_enqueue")
    def test_the_commit_wakes_a_waiting_consumer(self) -> None:
        # Given a consumer that waits, and a caller's transaction with an enqueue
        waiting = self.waiting(self.worker)
        with self.transaction() as connection:
            self.backend.enqueue(self.queue, [self.new(b"inside")], connection=connection)
            # When the transaction commits, then the consumer wakes
            connection.commit()
            assert [lease.body for lease in self.woken(waiting)] == [b"inside"]

    @promise("2.7", "2.4")
    @requires("transactional_enqueue", "client_ids")
    def test_a_known_id_changes_nothing_inside_a_transaction_either(self) -> None:
        # Given a job, and a transaction that enqueues the same job again
        job = self.new(b"first")
        self.backend.enqueue(self.queue, [job])
        with self.transaction() as connection:
            again = self.backend.enqueue(self.queue, [self.new(b"again", id=job.id)], connection=connection)
            connection.commit()
        # Then only the first job exists
        assert again == [job.id]
        assert self.bodies() == [b"first"]

    @promise("2.7", "11.2")
    @requires("transactional_enqueue")
    def test_an_object_that_is_not_a_connection_is_refused(self) -> None:
        # Given an object that is not a connection
        with pytest.raises(MultiqError):
            self.backend.enqueue(self.queue, [self.new()], connection=object())
        # Then the enqueue is refused, and no job is stored through another connection instead
        assert self.counts() == (0, 0, 0, 0)
