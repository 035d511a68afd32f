"""Fair share: the order in which a worker reserves from its queues, and the share of jobs of each queue."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq.backend import Ack, NewJob
from multiq.backend.memory import MemoryBackend
from multiq.errors import NameInvalid, OptionInvalid
from multiq.ids import new_id
from multiq.settings.queue_order import read_queues
from multiq.worker.execution.queue_shares import FairShare, FairShareConsumer, fair_share

if TYPE_CHECKING:
    from collections.abc import Iterable

JOBS = 10_000


def seeded(weights: dict[str, int], seed: int = 7) -> FairShare:
    return FairShare(weights, random.Random(seed))


def fill(backend: MemoryBackend, counts: dict[str, int]) -> None:
    for queue, count in counts.items():
        backend.enqueue(queue, [NewJob(b"x", new_id()) for _ in range(count)])


def taken(consumer: FairShareConsumer, limits: Iterable[int]) -> Counter[str]:
    """Return how many jobs came from each queue, in reserves of these sizes."""
    counts: Counter[str] = Counter()
    verdicts: list[Ack] = []
    for limit in limits:
        _, leases = consumer.exchange(verdicts, limit, 0)
        counts.update(lease.queue for lease in leases)
        verdicts = [Ack(lease) for lease in leases]
    return counts


@pytest.mark.parametrize("limit", [1, 7, 100])
@pytest.mark.parametrize("weights", [{"high": 3, "low": 1}, {"a": 1, "b": 1}, {"a": 5, "b": 2, "c": 1}])
@pytest.mark.long
def test_each_queue_gives_its_share_of_the_jobs_whatever_the_size_of_batches(
    weights: dict[str, int], limit: int
) -> None:
    # Given queues that have jobs all the time
    backend = MemoryBackend()
    fill(backend, dict.fromkeys(weights, JOBS))
    consumer = FairShareConsumer(backend.consumer(list(weights)), seeded(weights))
    # When many jobs are taken
    counts = taken(consumer, [limit] * (JOBS // limit))
    # Then each queue's share agrees with its weight, to within two batches
    for queue, weight in weights.items():
        assert abs(counts[queue] - counts.total() * weight / sum(weights.values())) <= 2 * limit


def test_shares_hold_when_batches_are_of_all_sizes() -> None:
    weights = {"high": 3, "low": 1}
    backend = MemoryBackend()
    fill(backend, dict.fromkeys(weights, JOBS))
    rng = random.Random(3)
    counts = taken(
        FairShareConsumer(backend.consumer(list(weights)), seeded(weights)),
        [rng.randint(1, 100) for _ in range(JOBS // 50)],
    )
    assert 0.72 < counts["high"] / counts.total() < 0.78


def test_an_empty_queue_leaves_its_share_to_the_others() -> None:
    # Given an empty queue with a large weight
    weights = {"empty": 100, "high": 3, "low": 1}
    backend = MemoryBackend()
    fill(backend, {"high": JOBS, "low": JOBS})
    # Then the other queues share all jobs by their weights
    counts = taken(FairShareConsumer(backend.consumer(list(weights)), seeded(weights)), [1] * 4000)
    assert counts.total() == 4000
    assert abs(counts["high"] - 3000) <= 2


def test_a_queue_that_was_empty_gets_no_more_than_its_share_later() -> None:
    # Given a queue that was empty while another one gave a thousand jobs
    weights = {"late": 1, "always": 1}
    backend = MemoryBackend()
    fill(backend, {"always": JOBS})
    consumer = FairShareConsumer(backend.consumer(list(weights)), seeded(weights))
    taken(consumer, [10] * 100)
    # When the first queue has jobs, too
    fill(backend, {"late": JOBS})
    # Then from then on each queue gives equally many jobs
    assert abs(taken(consumer, [10] * 20)["late"] - 100) <= 20


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1, 2, 3, 5])
def test_many_workers_that_take_a_few_jobs_each_give_each_queue_its_share_too(jobs: int) -> None:
    # Given many workers that have just started
    weights = {"high": 3, "low": 1}
    rng = random.Random(5)
    backend = MemoryBackend()
    fill(backend, dict.fromkeys(weights, 4000 * jobs))
    counts: Counter[str] = Counter()
    # When each worker takes a few jobs, one by one
    for _ in range(4000):
        counts += taken(FairShareConsumer(backend.consumer(list(weights)), FairShare(weights, rng)), [1] * jobs)
    # Then all workers together keep the shares
    assert 0.73 < counts["high"] / counts.total() < 0.77


@pytest.mark.long
def test_chance_changes_the_share_of_a_queue_by_at_most_one_job() -> None:
    weights = {"paid": 3, "free": 1}
    for seed in range(1000):
        backend = MemoryBackend()
        fill(backend, dict.fromkeys(weights, 40))
        counts = taken(FairShareConsumer(backend.consumer(list(weights)), seeded(weights, seed)), [1] * 40)
        assert 9 <= counts["free"] <= 11, (seed, counts)


def test_queues_that_are_emptied_each_time_are_all_served() -> None:
    # Given few jobs at a time in each queue
    weights = {"high": 3, "low": 1}
    backend = MemoryBackend()
    consumer = FairShareConsumer(backend.consumer(list(weights)), seeded(weights))
    for _ in range(50):
        fill(backend, {"high": 2, "low": 2})
        # When more jobs are asked for than there are, then all are returned
        assert taken(consumer, [10]) == {"high": 2, "low": 2}


def test_a_lease_counts_from_the_same_moment_as_without_shares() -> None:
    # Given a consumer that reserves by shares, and a job
    backend = MemoryBackend()
    inner = backend.consumer(["a", "b"])
    consumer = FairShareConsumer(inner, seeded({"a": 1, "b": 1}))
    assert consumer.asked_at == 0.0
    fill(backend, {"b": 1})
    # When the job is reserved
    consumer.exchange([], 1, 0)
    # Then the consumer's ``asked_at`` is the time from which the lease runs
    assert consumer.asked_at == inner.asked_at > 0


def test_a_strict_order_leaves_the_consumer_as_it_is() -> None:
    consumer = MemoryBackend().consumer(["a", "b"])
    assert fair_share(consumer, None) is consumer


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("a", {"a": 1}),
        (["b", "a"], {"b": 1, "a": 1}),
        (["a", "a"], {"a": 1}),
        (["high=3", "low"], {"high": 3, "low": 1}),
        ({"high": 3, "low": 1}, {"high": 3, "low": 1}),
    ],
)
def test_queues_are_named_alone_or_with_a_weight(said: Any, meant: dict[str, int]) -> None:
    assert list(read_queues(said).items()) == list(meant.items())


@pytest.mark.parametrize(
    ("queues", "policy", "error", "says"),
    [
        (
            {"a": 0},
            "weighted",
            OptionInvalid,
            "the weight of queue 'a' must be a whole number from 1 to 1000, got 0",
        ),
        ({"a": 1.5}, "weighted", OptionInvalid, "got 1.5"),
        ({"a": True}, "weighted", OptionInvalid, "got True"),
        (["a=1001"], "weighted", OptionInvalid, "got 1001"),
        (["a=many"], "weighted", OptionInvalid, "got 'many'"),
        (["a="], "weighted", OptionInvalid, "got ''"),
        (["a=1", "a=2"], "weighted", OptionInvalid, "must be named once, got it twice"),
        ([], "weighted", OptionInvalid, "at least one queue"),
        (["a b=2"], "weighted", NameInvalid, "a queue name must have"),
        ({1: 2}, "weighted", NameInvalid, "a queue name must have .* got 1"),
        (["a=2", "b"], None, OptionInvalid, "queue 'a' has a weight, which policy='strict' ignores"),
        (["a=2", "b"], "round-robin", OptionInvalid, "choose policy='weighted'"),
        (["a"], "fair", OptionInvalid, "unknown policy 'fair': choose strict, weighted or round-robin"),
    ],
)
def test_invalid_queues_and_policies_are_refused(queues: Any, policy: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        multiq.Worker(multiq.App("memory://"), queues=queues, policy=policy)
