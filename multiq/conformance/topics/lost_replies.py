"""Lost replies: wherever the connection is cut, the operation is carried out once, and the caller's last answer is
correct.

A caller whose connection ends cannot know whether the server has received the call. So the tests cut requests, too.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from multiq.backend import Ack, Bury, Release, State
from multiq.conformance.case import ALL, LONG, VERDICTS, Topic, TrackedConsumer, promise, requires, without
from multiq.conformance.proxy import CutReply, CutRequest
from multiq.errors import BackendError, BackendUnavailable, EnqueueUncertain, JobNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import Backend, Lease, Verdict
    from multiq.conformance.proxy import Fault, Proxy
    from multiq.errors import LeaseLost

T = TypeVar("T")

TRIES = 5  # the number of times that a call is made if it raises BackendUnavailable each time
AGAIN_AFTER = 0.05  # seconds between two such calls


_LIMITS: dict[str, dict[str, int]] = {"jobs": {"limit": 1}}
_SEEN: dict[str, Callable[[Any, str, str], bool]] = {
    "peek": lambda job, _, job_id: (job.id, job.state, job.body) == (job_id, State.READY, b"x"),
    "jobs": lambda page, _, job_id: [job.id for job in page.jobs] == [job_id] and page.after is not None,
    "stats": lambda stats, *_: (stats.ready, stats.paused_for) == (3, None),
    "queues": lambda names, queue, _: queue in names,
}


class Cut:
    """One cut. A call that is made while ``armed`` loses its reply after *at* bytes.

    With ``CutRequest`` as *fault*, the call loses its request after *at* bytes instead.
    """

    def __init__(self, proxy: Proxy, far: Backend, at: int | None, fault: type[Fault] = CutReply) -> None:
        self.proxy = proxy
        self.far = far
        self.at = at
        """None: nothing is cut, and the length of the reply is measured."""
        self.fault = fault
        self.size = 0
        self.sent = 0

    @contextlib.contextmanager
    def armed(self, times: int = 1) -> Iterator[None]:
        before, sent_before = self.proxy.replied, self.proxy.sent
        if self.at is not None:
            self.proxy.arm(self.fault(at=self.at, times=times))
        try:
            yield
        finally:
            self.proxy.disarm()
            self.size, self.sent = self.proxy.replied - before, self.proxy.sent - sent_before


class LostRepliesTests(Topic):
    # --- producing and consuming ---

    @promise("11.9", "2.4")
    @requires("client_ids")
    def test_an_enqueue_whose_reply_is_lost_adds_its_jobs_once(self) -> None:
        for cut in self._cuts():
            jobs = [self.new(b"a"), self.new(b"b"), self.new(b"late", delay=LONG)]
            with cut.armed():
                ids = self._insist(cut.far.enqueue, self.queue, jobs)
            assert ids == [job.id for job in jobs]
            assert self.counts() == (2, 1, 0, 0)

    @promise("2.9", "2.4", "11.9")
    @requires("client_ids")
    def test_an_enqueue_whose_replies_are_all_lost_names_the_jobs_whose_outcome_is_unknown(self) -> None:
        is_uncertain = False
        for cut in self._cuts():
            # Given a batch, while the replies to the call and to its repetitions are lost
            jobs = [self.new(b"a"), self.new(b"b"), self.new(b"late", delay=LONG)]
            error: BackendError | None = None
            try:
                with cut.armed(times=1000):
                    cut.far.enqueue(self.queue, jobs)
            except (EnqueueUncertain, BackendUnavailable) as exc:
                error = exc
            if isinstance(error, EnqueueUncertain):
                # Then each job's id is in one of the error's three lists: uncertain, accepted or unsent
                is_uncertain = True
                assert error.ids == tuple(job.id for job in error.jobs), "the ids of the jobs that may be stored"
                named = [*error.ids, *error.accepted.values(), *(job.id for job in error.unsent)]
                assert sorted(named) == sorted(job.id for job in jobs), "each job is in one of the three lists"
            elif error is not None:
                assert self.counts() == (0, 0, 0, 0), "the error says that nothing was stored, but jobs are there"
            # And when the same batch is enqueued again, then only the missing jobs are added
            assert self._insist(cut.far.enqueue, self.queue, jobs) == [job.id for job in jobs]
            assert self.counts() == (2, 1, 0, 0)
        assert is_uncertain, "no enqueue raised EnqueueUncertain"

    @promise("2.9", "11.9")
    @without("client_ids")
    def test_an_enqueue_whose_reply_is_lost_and_that_cannot_know_says_so(self) -> None:
        for cut in self._cuts():
            jobs = [self.new(b"a"), self.new(b"b"), self.new(b"late", delay=LONG)]
            there, perhaps, unsent = len(jobs), 0, 0
            named: tuple[str, ...] = ()
            try:
                with cut.armed():
                    cut.far.enqueue(self.queue, jobs)
            except EnqueueUncertain as exc:
                there, perhaps, unsent, named = len(exc.accepted), len(exc.jobs), len(exc.unsent), exc.ids
            except BackendUnavailable:  # no job was sent
                there, unsent = 0, len(jobs)
            assert there + perhaps + unsent == len(jobs)
            assert named == (), "the ids are the backend's, so no client knows them"
            ready, delayed, *_ = self.counts()
            assert there <= (ready or 0) + (delayed or 0) <= there + perhaps

    @promise("11.9", "3.1")
    def test_a_reserve_whose_reply_is_lost_hands_out_no_more_than_was_asked_and_loses_none(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                ids = self._put(3)
                with cut.armed():
                    leases = self._insist(consumer.reserve, 2, 0)
                assert len({lease.id for lease in leases}) == len(leases) == 2, "2 jobs of 3 were asked for"
                self._eventually_counts(1, 0, 2, 0)
                assert self._all_done(consumer, leases) == sorted(ids)

    @promise("11.9", "4.5", "4.6", "4.9")
    def test_a_reserve_whose_reply_is_lost_counts_one_attempt(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                ids = self._put(3)
                with cut.armed():
                    leases = self._insist(consumer.reserve, 2, 0)
                assert [lease.body for lease in leases] == [b"x"] * 2
                if not self.can.disconnect_ends_lease:  # otherwise an attempt may have ended with its connection
                    assert [(lease.attempt, lease.crashes) for lease in leases] == [(1, 0)] * 2
                    assert [lease.id for lease in leases] == ids[:2] or not self.can.total_order
                self._all_done(consumer, leases)

    @promise("11.9", "3.7")
    def test_a_waiting_reserve_whose_reply_is_lost_gets_the_job_that_comes(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                with cut.armed():
                    waiting = self.background(partial(self._insist, consumer.reserve, 1, self.harness.patience))
                    time.sleep(AGAIN_AFTER)
                    job_id = self.enqueue(ttr=LONG)
                    leases = waiting.result(3 * self.harness.patience)
                assert self._all_done(consumer, leases) == [job_id]

    @promise("11.9", "5.9")
    def test_an_exchange_whose_reply_is_lost_settles_once_and_loses_no_job(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                ids = self._put(5)
                held = consumer.reserve(2, 0)
                with cut.armed():
                    answers, leases = self._insist(consumer.exchange, [Ack(lease) for lease in held], 2, 0)
                assert len(leases) <= 2, "2 jobs were asked for"
                done = self._answered(held, answers)
                left = self._all_done(consumer, leases)
                assert not {*done} & {*left}, "a job that was acked is handed out again"
                perhaps = {lease.id for lease in held} - {*done}  # acks that were reported as lost with the connection
                assert {*ids} - perhaps <= {*done, *left}, "a job is lost"

    # --- verdicts ---

    @promise("11.9", "5.1")
    def test_an_ack_whose_reply_is_lost_is_answered_as_it_was_carried_out(self) -> None:
        self._settled("ack", lambda _: None)

    @promise("11.9", "5.2")
    def test_a_release_whose_reply_is_lost_is_carried_out_once(self) -> None:
        def released(job_id: str) -> None:
            job = self.peek(job_id)
            assert (job.state, job.priority, job.attempt) == (State.READY, 7, 1)
            assert self.tells(job.reason, "stale", "reasons")

        self._settled("release", released)

    @promise("11.9", "3.5")
    @requires("total_order")
    def test_a_release_whose_reply_is_lost_leaves_the_job_in_its_place(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                ids = self._put(3)
                held = consumer.reserve(2, 0)
                with cut.armed():
                    self._insist(consumer.settle, [Release(lease) for lease in held])
                self._eventually_counts(3, 0, 0, 0)
                assert [lease.id for lease in self.reserve(3, by=self.another_consumer())] == ids

    @promise("11.9", "5.2", "2.5")
    def test_a_delayed_release_whose_reply_is_lost_is_carried_out_once(self) -> None:
        def delayed(job_id: str) -> None:
            job = self.peek(job_id)
            assert job.state is State.DELAYED
            assert self.about(job.due_in, LONG)

        self._settled("release", delayed, lambda lease: Release(lease, delay=LONG))

    @promise("11.9", "5.3")
    def test_a_bury_whose_reply_is_lost_is_carried_out_once(self) -> None:
        def buried(job_id: str) -> None:
            job = self.peek(job_id)
            assert job.state is State.BURIED
            assert self.tells(job.kicks, 0, "durable_attempts")
            assert self.tells(job.reason, "stale", "reasons")

        self._settled("bury", buried)

    @promise("11.9", "5.4")
    def test_a_touch_whose_reply_is_lost_leaves_the_lease_alive(self) -> None:
        self._settled("touch", lambda _: None, then=Ack)

    @promise("11.9", "5.5")
    @requires("give_back")
    def test_a_job_given_back_whose_reply_is_lost_has_not_been_attempted(self) -> None:
        def given_back(job_id: str) -> None:
            job = self.peek(job_id)
            assert (job.state, job.attempt, job.crashes) == (State.READY, 0, 0)

        self._settled("give_back", given_back)

    @promise("11.9", "5.10")
    @requires("portable_leases")
    def test_an_abandoned_job_whose_reply_is_lost_counts_one_crash(self) -> None:
        def abandoned(job_id: str) -> None:
            job = self.peek(job_id)
            assert (job.state, job.attempt, job.crashes) == (State.READY, 1, 1)

        self._settled("abandon", abandoned)

    @promise("11.9", "4.4", "5.8")
    @requires("portable_leases")
    def test_a_verdict_whose_reply_is_lost_counts_once_when_another_consumer_has_the_job(self) -> None:
        carried_out = 0
        for cut in self._cuts():
            # Given a release, while the replies to the call and to its repetitions are lost
            consumer, rival = self.another_consumer(backend=cut.far), self.another_consumer()
            job_id = self.enqueue(ttr=LONG)
            (lease,) = consumer.reserve(1, 0)
            try:
                with cut.armed(times=1000):
                    assert consumer.settle([Release(lease)]) == [None], "a verdict that was carried out is called lost"
            except BackendUnavailable:
                if self.state(job_id) is not State.READY:
                    continue
            else:
                carried_out += cut.at is not None
                continue
            # When the release was carried out, and the holder repeats it after another consumer has reserved the job
            carried_out += 1
            theirs = self.take(by=rival)
            (answer,) = self._insist(consumer.settle, [Release(lease)])
            # Then the answer says that the release was carried out, and the other consumer keeps its lease
            assert answer is None, "a verdict that was carried out is called lost"
            self.settle(Ack(theirs), by=rival)
        assert carried_out, "no release of which the reply was lost was carried out"

    # --- managing ---

    @promise("11.9", "8.1")
    @requires("management")
    def test_a_delete_whose_reply_is_lost_does_not_say_that_there_was_no_job(self) -> None:
        for cut in self._cuts():
            first, doomed, last = self._put(3)
            is_known, _ = self._managed(cut, cut.far.delete, self.queue, doomed)
            left = [job_id for job_id in (first, doomed, last) if self._is_there(job_id)]
            assert left == [first, last] or (not is_known and left == [first, doomed, last])

    @promise("11.9", "7.1", "7.2")
    @requires("management")
    def test_a_reschedule_whose_reply_is_lost_moves_its_job_once(self) -> None:
        for cut in self._cuts():
            _, moved, _ = self._put(3)
            is_known, answer = self._managed(cut, cut.far.reschedule, self.queue, moved, LONG)
            if is_known:
                job = self.peek(answer)
                assert job.state is State.DELAYED
                assert self.about(job.due_in, LONG)
                assert self.counts() == (2, 1, 0, 0)
                assert not self.can.stable_ids or answer == moved
            elif self.can.stable_ids:
                assert self.counts() in {(2, 1, 0, 0), (3, 0, 0, 0)}

    @promise("11.9", "6.1")
    def test_a_kick_whose_reply_is_lost_counts_what_it_kicked(self) -> None:
        for cut in self._cuts():
            ids = self._put_buried(3)
            is_known, answer = self._managed(cut, cut.far.kick, self.queue, 2)
            kicked = [job_id for job_id in ids if self.state(job_id) is State.READY]
            assert kicked == ids[: len(kicked)] or not self.can.total_order
            assert len(kicked) <= 2, "2 jobs of 3 were to be kicked"
            assert not is_known or answer == len(kicked) == 2

    @promise("11.9", "6.2")
    @requires("management")
    def test_a_kick_of_one_job_whose_reply_is_lost_kicks_it_once(self) -> None:
        for cut in self._cuts():
            _, kicked, _ = self._put_buried(3)
            is_known, _ = self._managed(cut, cut.far.kick_job, self.queue, kicked)
            job = self.peek(kicked)
            assert job.state is State.READY or not is_known
            assert job.state is not State.READY or self.tells(job.kicks, 1, "durable_attempts")
            ready, _, _, buried = self.counts()
            assert (ready, buried) == ((1, 2) if job.state is State.READY else (0, 3))

    @promise("11.9", "10.4")
    @requires("purging")
    def test_a_purge_whose_reply_is_lost_counts_what_it_deleted(self) -> None:
        for cut in self._cuts():
            self._put(3)
            self.enqueue(delay=LONG)
            is_known, answer = self._managed(cut, cut.far.purge, self.queue, [State.READY, State.BURIED])
            ready, delayed, _, _ = self.counts()
            assert delayed == 1
            assert not is_known or (answer, ready) == (3, 0)

    @promise("11.9", "10.1", "10.2")
    @requires("pausing")
    def test_a_pause_and_a_resume_whose_replies_are_lost_can_be_said_again(self) -> None:
        for cut in self._cuts():
            self._put(1)
            with cut.armed():
                self._insist(cut.far.pause, self.queue, LONG)
            assert self.about(self.backend.stats(self.queue).paused_for, LONG)
            with cut.armed():
                self._insist(cut.far.resume, self.queue)
            assert self.backend.stats(self.queue).paused_for is None
            assert len(self.reserve(1, by=self.another_consumer())) == 1

    # --- reading ---

    @promise("11.9", "9.1", "9.2", "9.4", "9.5")
    @pytest.mark.parametrize("verb", ["peek", "jobs", "stats", "queues"])
    def test_a_look_whose_reply_is_lost_sees_what_is_there(self, verb: str) -> None:
        used: set[str] = set()
        for cut in self._cuts():
            job_id, *_ = self._put(3)
            used.add(self.queue)
            arguments = {"peek": (self.queue, job_id), "jobs": (self.queue, State.READY), "stats": (self.queue,)}
            with cut.armed():
                answer: Any = self._insist(getattr(cut.far, verb), *arguments.get(verb, ()), **_LIMITS.get(verb, {}))
            assert _SEEN[verb](answer, self.queue, job_id)
            assert verb != "queues" or used <= set(answer)

    # --- internals ---

    def _cuts(self) -> Iterator[Cut]:
        """Yield cuts, each with its own queue.

        The first has no fault. Then come cuts of the reply at several bytes, then cuts of the request.
        """
        proxy, far = self.proxied()
        whole = Cut(proxy, far, None)
        yield whole
        size = whole.size
        assert size > 0, "the call went round the proxy of Harness.proxied()"
        cuts: list[tuple[int, type[Fault]]] = [
            (at, CutReply) for at in sorted({0, size // 4, size // 2, 3 * size // 4, size - 2, size - 1} - {-1})
        ]
        cuts += [(0, CutRequest), (whole.sent // 2, CutRequest)]
        for at, fault in cuts:
            self.queue = self.another_queue()
            far.stats(self.queue)  # opens a connection that can be cut
            yield Cut(proxy, far, at, fault)

    @staticmethod
    def _insist(call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        for _ in range(TRIES - 1):
            try:
                return call(*arguments, **options)
            except (BackendUnavailable, EnqueueUncertain):
                time.sleep(AGAIN_AFTER)
        return call(*arguments, **options)

    @contextlib.contextmanager
    def _consumer(self, cut: Cut) -> Iterator[TrackedConsumer]:
        """A consumer behind the proxy. The consumer is connected already, as in a running worker."""
        consumer = self.another_consumer(backend=cut.far)
        consumer.reserve(1, 0)
        yield consumer
        consumer.close()

    def _put(self, count: int) -> list[str]:
        return self.enqueue_all(*[b"x"] * count, ttr=LONG)

    def _put_buried(self, count: int) -> list[str]:
        ids = self._put(count)
        consumer = self.another_consumer()
        for _ in ids:
            self.settle(Bury(self.take(by=consumer)), by=consumer)
        return ids

    def _is_there(self, job_id: str) -> bool:
        try:
            self.peek(job_id)
        except JobNotFound:
            return False
        return True

    @staticmethod
    def _managed(cut: Cut, call: Callable[..., Any], *arguments: object) -> tuple[bool, Any]:
        """Returns whether the call succeeded, and its answer. False: the call raised ``BackendUnavailable``."""
        try:
            with cut.armed():
                return True, call(*arguments)
        except BackendUnavailable:
            assert cut.at is not None, "nothing was cut"
            return False, None

    def _eventually_counts(self, *expected: int) -> None:
        self.eventually(lambda: self.counts() == expected)

    def _all_done(self, consumer: TrackedConsumer, leases: Sequence[Lease]) -> list[str]:
        """Ack these leases and all leases that this consumer gets afterwards. Returns the ids of the acked jobs."""
        done: list[str] = []
        give_up_at = time.monotonic() + self.harness.patience
        while True:
            answers = consumer.settle([Ack(lease) for lease in leases])
            done += [lease.id for lease, answer in zip(leases, answers, strict=True) if answer is None]
            ready, _, reserved, _ = self.counts()
            if not ready and not reserved:
                return sorted(done)
            assert time.monotonic() < give_up_at, f"{reserved} jobs stay reserved, and no call has raised an error"
            leases = consumer.reserve(ALL, 0)

    def _answered(self, held: Sequence[Lease], answers: Sequence[LeaseLost | None]) -> list[str]:
        """The ids of the jobs whose verdicts were accepted.

        A verdict may be refused only if the job's lease ended with the connection.
        """
        if not self.can.disconnect_ends_lease:
            assert list(answers) == [None] * len(held), "a verdict that was carried out is called lost"
        return [lease.id for lease, answer in zip(held, answers, strict=True) if answer is None]

    def _settled(
        self,
        kind: str,
        holds: Callable[[str], None],
        verdict: Callable[[Lease], Verdict] | None = None,
        then: Callable[[Lease], Verdict] | None = None,
    ) -> None:
        """Settle two jobs in one call whose reply is lost. *holds* checks a job whose verdict was accepted."""
        make = verdict or VERDICTS[kind]
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                self._put(2)
                held = consumer.reserve(2, 0)
                with cut.armed():
                    answers = self._insist(consumer.settle, [make(lease) for lease in held])
                done = self._answered(held, answers)
                if cut.at is None:
                    assert len(done) == 2, "a verdict was refused while its lease was alive"
                for lease in held:
                    if lease.id in done:
                        assert kind != "ack" or not self._is_there(lease.id), "a job that was acked is still there"
                        holds(lease.id)
                        assert then is None or self._insist(consumer.settle, [then(lease)]) == [None]
