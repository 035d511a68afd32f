"""Opening and closing: the jobs that survive the end of an object, a process or a server."""

from __future__ import annotations

import os

from multiq.backend import PRIORITY_DEFAULT, Ack, Bury, Release, State
from multiq.conformance.case import LONG, Topic, promise, requires
from multiq.conformance.forks import ended_well, fork
from multiq.conformance.threads import HANGS, Background
from multiq.errors import BackendUnavailable


class LifecycleTests(Topic):
    @promise("11.6")
    def test_a_closed_backend_can_be_used_again(self) -> None:
        # Given a backend that was used, and closed twice
        self.enqueue(b"before")
        for _ in range(2):
            self.backend.close()
        # When the backend is used, then it reconnects
        self.enqueue(b"after")
        assert self.counts() == (2, 0, 0, 0)
        assert self.in_line(self.bodies(by=self.another_consumer()), [b"before", b"after"])

    @promise("11.6")
    def test_a_closed_backend_leaves_its_consumers_alone(self) -> None:
        # Given a backend with two consumers. One consumer holds a lease, and the other consumer waits
        theirs = self.another_backend()
        holder, sleeper = (self.another_consumer(backend=theirs) for _ in range(2))
        self.enqueue()
        lease = self.take(by=holder)
        waiting = self.waiting(sleeper)
        # When the backend is closed
        theirs.close()
        # Then the waiting consumer gets the next job. If the consumer gets BackendUnavailable before the job, it tries
        # again.
        job_id = self.enqueue()
        try:
            leases = self.woken(waiting)
        except BackendUnavailable:
            leases = sleeper.reserve(1, self.harness.patience)
        ids = {lease.id, job_id} if self.can.disconnect_ends_lease else {job_id}
        assert len(leases) == 1
        assert leases[0].id in ids
        # And the other consumer can settle its job, except if the lease ended with the connection
        (answer,) = holder.settle([Ack(lease)])
        assert answer is None or self.can.disconnect_ends_lease

    @promise("11.6")
    def test_a_backend_that_was_never_used_can_be_closed(self) -> None:
        # Given a new backend
        backend = self.another_backend()
        # When the backend is closed immediately, then it can still be used
        backend.close()
        assert backend.stats(self.queue).ready == 0

    @promise("11.6")
    def test_a_backend_closes_at_the_end_of_a_with_statement(self) -> None:
        # Given a backend in a with statement
        with self.another_backend() as backend:
            backend.enqueue(self.queue, [self.new(b"inside")])
        # Then the jobs remain after the ``with`` statement
        assert self.bodies() == [b"inside"]

    @promise("11.6")
    def test_a_consumer_can_be_closed_twice(self) -> None:
        # Given a consumer without leases
        with self.another_consumer() as consumer:
            assert consumer.reserve(1, 0) == []
        # Then a second close raises no error, and the close of an unused consumer raises no error
        consumer.close()
        self.another_consumer().close()

    @promise("11.6", "11.1")
    def test_one_backends_end_is_not_the_others(self) -> None:
        # Given two backends on one store, each with a consumer
        other = self.another_backend()
        consumer = self.another_consumer(backend=other)
        self.enqueue_all(b"a", b"b", ttr=LONG)
        lease = self.take(by=consumer)
        # When one backend is closed
        self.backend.close()
        # Then the leases and jobs of the other backend are unchanged
        self.settle(Ack(lease), by=consumer)
        assert self.in_line([lease.body, self.take(by=consumer).body], [b"a", b"b"])

    @promise("11.7", "11.1")
    @requires("persistent")
    def test_jobs_outlive_all_clients_of_the_store(self) -> None:
        # Given a ready, a delayed and a buried job, with options and a reason other than the defaults
        buried = self.enqueue(b"buried")
        self.settle(Bury(self.take(), reason="why"))
        priority = 4 if self.can.priorities else PRIORITY_DEFAULT
        ready = self.enqueue(b"\0ready", priority=priority, ttr=90)
        delayed = self.enqueue(b"delayed", delay=LONG)
        # When all backends are closed and the store is restarted
        self._start_anew()
        # Then the jobs are unchanged
        states = {ready: State.READY, delayed: State.DELAYED, buried: State.BURIED}
        assert all(self.stands(job_id, state) for job_id, state in states.items())
        if self.can.inspection:
            assert self.about(self.peek(delayed).due_in, LONG)
            assert self.tells(self.peek(buried).reason, "why", "reasons")
        lease = self.take()
        assert (lease.id, lease.body, lease.priority, lease.ttr) == (ready, b"\0ready", priority, 90)
        assert self.reserve() == []

    @promise("11.7", "4.5", "4.6")
    @requires("durable_attempts")
    def test_attempts_and_crashes_outlive_all_clients_of_the_store(self) -> None:
        # Given a job that was abandoned once and released once
        self.abandoned()
        self.settle(Release(self.take()))
        # When all backends are closed and the store is restarted
        self._start_anew()
        # Then the next reservation is the third, and one crash is counted
        lease = self.take()
        assert (lease.attempt, lease.crashes) == (3, 1)

    @promise("11.7", "2.8")
    @requires("shared")
    def test_a_job_outlives_the_process_that_enqueued_it(self) -> None:
        # Given another process that enqueues a job and ends
        if not hasattr(os, "fork"):
            self.does_not_apply("this system cannot fork")
        read, write = os.pipe()
        child = fork(lambda: os.write(write, self.enqueue(b"from a child").encode()))
        os.close(write)
        assert ended_well(child)
        with os.fdopen(read) as pipe:
            job_id = pipe.read()
        # Then this process can read and reserve the job
        assert self.peek(job_id).body == b"from a child"
        assert self.take().id == job_id

    @promise("11.4", "11.1", "3.7")
    @requires("shared")
    def test_another_processs_job_wakes_a_consumer_that_waits_here(self) -> None:
        # Given a consumer that waits in this process
        if not hasattr(os, "fork"):
            self.does_not_apply("this system cannot fork")
        consumer = self.another_consumer(backend=self.another_backend())
        waiting: Background[list[bytes]] = self.background(
            lambda: [lease.body for lease in consumer.reserve(1, 3 * self.harness.patience)]
        )
        # When another process enqueues, then the consumer wakes
        child = fork(lambda: self.enqueue(b"from a child"))
        assert ended_well(child)
        assert waiting.result(HANGS) == [b"from a child"]

    def _start_anew(self) -> None:
        for consumer in self._consumers:
            consumer.close()
        for backend in self._backends:
            backend.close()
        self._worker = None
        self.harness.restart()
        self.backend = self.another_backend()
