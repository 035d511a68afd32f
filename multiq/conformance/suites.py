"""All topics, and the pytest classes that are made from the topics for a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .topics.abandon import AbandonTests
from .topics.ack import AckTests
from .topics.bury import BuryTests
from .topics.capabilities import CapabilitiesTests
from .topics.concurrency import ConcurrencyTests
from .topics.delete import DeleteTests
from .topics.enqueue import EnqueueTests
from .topics.errors import ErrorsTests, NamesTests
from .topics.give_back import GiveBackTests
from .topics.hangs import HangsTests
from .topics.holds import HeldJobsTests, HoldsTests
from .topics.kick import KickTests
from .topics.kick_job import KickJobTests
from .topics.lease import LeaseTests
from .topics.lifecycle import LifecycleTests
from .topics.limits import LimitsTests, LimitsUniqueTests, LimitsWakingTests
from .topics.looking import JobsTests, PeekTests, QueuesTests, StatsTests
from .topics.lost_replies import LostRepliesTests
from .topics.memos import DetailsTests, MemosTests
from .topics.notes import CompareAndSetTests, NotesTests
from .topics.outcomes import OutcomesTests
from .topics.pause import PauseTests
from .topics.permits import PermitsTests
from .topics.purge import PurgeTests
from .topics.queue_order import QueueOrderTests
from .topics.release import ReleaseTests
from .topics.reschedule import RescheduleTests
from .topics.reserve import ReserveTests
from .topics.schedules import SchedulesTests, ServerTimeTests
from .topics.settle import SettleTests
from .topics.steps import OneStepEverywhereTests, OneStepTests, StepsTests
from .topics.touch import TouchTests
from .topics.transaction import TransactionTests
from .topics.unique import UniqueKicksTests, UniqueReplaceTests, UniqueTests
from .topics.waiting import WaitingTests
from .topics.waking import WakingTests
from .topics.walk import WalkTests

if TYPE_CHECKING:
    from collections.abc import Callable

    from .case import Topic
    from .harness import Harness

#: The topics are in the order of the contract, except that the slowest topics are last.
TOPICS: tuple[type[Topic], ...] = (
    CapabilitiesTests, EnqueueTests, ReserveTests, QueueOrderTests, LeaseTests, AckTests, ReleaseTests, BuryTests,
    TouchTests, GiveBackTests, AbandonTests, SettleTests, KickTests, KickJobTests, RescheduleTests, DeleteTests,
    PeekTests, JobsTests, StatsTests, QueuesTests, PauseTests, PurgeTests, ErrorsTests, NamesTests, LifecycleTests,
    OutcomesTests, MemosTests, DetailsTests, HoldsTests, HeldJobsTests, StepsTests, NotesTests, CompareAndSetTests,
    UniqueTests, UniqueReplaceTests, UniqueKicksTests,
    ServerTimeTests, SchedulesTests, LimitsTests, LimitsUniqueTests, PermitsTests, TransactionTests, WaitingTests,
    WakingTests, LimitsWakingTests, LostRepliesTests, HangsTests,
    OneStepTests, OneStepEverywhereTests, ConcurrencyTests, WalkTests,
)  # fmt: skip


def topic_name(topic: type) -> str:
    """The name of a topic in reports. Both ``KickJobTests`` and a driver's ``TestKickJob`` become ``KickJob``."""
    return topic.__name__.removeprefix("Test").removesuffix("Tests")


def suite(harness_class: Callable[[], Harness]) -> dict[str, type[Topic]]:
    """Make the pytest classes of the whole suite for a harness. The test file of a driver calls
    ``globals().update(suite(AcmeHarness))``.
    """
    return {name: _test_class(name, topic, harness_class) for topic in TOPICS for name in [f"Test{topic_name(topic)}"]}


def _test_class(name: str, topic: type[Topic], harness_class: Callable[[], Harness]) -> type[Topic]:
    # Without ``staticmethod``, a plain function would become a method of the test class.
    made_by = harness_class if isinstance(harness_class, type) else staticmethod(harness_class)
    return type(name, (topic,), {"harness_class": made_by, "__doc__": topic.__doc__})
