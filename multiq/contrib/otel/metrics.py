"""The metrics: counts and durations of jobs, and the numbers of queues."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from opentelemetry.metrics import Observation, get_meter_provider

from multiq.control.flags import visible_queues
from multiq.driverkit.fork import forks
from multiq.worker.monitoring.queue_metrics import QueueNumbers, QueueReader

from . import conventions as conv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping, Sequence

    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider
    from opentelemetry.util.types import AttributeValue

    from multiq.app import App

    Labels = tuple[tuple[str, AttributeValue], ...]

_PATIENCE = 1.5  # seconds to wait for the numbers of the queues
_MOST_SETS = 2000  # as many as the SDK has for an instrument, with the set for all others
_OTHERS: Labels = (("otel.metric.overflow", True),)
_STATES = ("ready", "delayed", "reserved", "buried", "held")


class Instruments:
    """The instruments of the jobs of all apps with one meter provider.

    This class keeps the counts. The counts are read when metrics are collected. Each addition to a counter of the SDK
    would take a third of the time that a span takes. A forked process begins at 0, because the parent reports its own
    counts.
    """

    def __init__(self, meter: Meter) -> None:
        self.operation_duration = _seconds(meter, conv.OPERATION_DURATION, "Duration of a call: send, receive, settle.")
        self.process_duration = _seconds(meter, conv.PROCESS_DURATION, "Duration of the runs of jobs.")
        self.wait = _seconds(
            meter, conv.JOB_WAIT, "From a job's enqueue, or from a schedule's due time, to its first start.",
            conv.WAIT_BOUNDS,
        )  # fmt: skip
        self.lateness = _seconds(
            meter, conv.SCHEDULE_LATENESS, "How late schedules' jobs have started.", conv.WAIT_BOUNDS
        )
        self.sent = Counts(meter, conv.SENT_MESSAGES, "{message}", "Jobs that were sent.")
        self.consumed = Counts(meter, conv.CONSUMED_MESSAGES, "{message}", "Jobs that were handed to their tasks.")
        self.outcomes = Counts(meter, conv.JOB_OUTCOMES, "{job}", "Runs of jobs, by their verdict.")


class Counts:
    """A counter whose numbers are read when metrics are collected. Thread-safe.

    The number of queue names in a program has no limit. So from the 2,000th set of attributes on, new sets are counted
    together, with the attribute that the SDK uses for this.
    """

    def __init__(self, meter: Meter, name: str, unit: str, description: str) -> None:
        self._counts: Counter[Labels] = Counter()
        self._lock = threading.Lock()
        self._generation = forks.generation
        forks.watch(self)
        meter.create_observable_counter(name, [self._observe], unit, description)

    def add(self, labels: Labels, number: int = 1) -> None:
        with self._lock:
            if labels not in self._counts and len(self._counts) >= _MOST_SETS - 1:
                labels = _OTHERS
            self._counts[labels] += number

    def start_over_in_child(self) -> None:
        """Begin at 0 in a forked process."""
        self._lock = threading.Lock()
        self._counts = Counter()

    def _observe(self, _options: CallbackOptions) -> list[Observation]:
        with self._lock:
            counts = list(self._counts.items())
        return [Observation(number, dict(labels)) for labels, number in counts]


def instruments_of(provider: MeterProvider | None, meter: Meter) -> Instruments:
    """Return the instruments of a provider. None: the global provider."""
    return _shared(_instruments, provider, lambda: Instruments(meter))


def observe_queues(
    app: App, provider: MeterProvider | None, meter: Meter, queues: Sequence[str], common: Labels
) -> None:
    """Report the numbers of *queues*. If *queues* is empty, report the numbers of all queues."""
    observed = _shared(_observed, provider, lambda: _Observed(meter))
    observed.apps.append(_QueueNumbers(app, queues, common))


class _Observed:
    """The instruments of the queues of all apps with one meter provider."""

    def __init__(self, meter: Meter) -> None:
        self.apps: list[_QueueNumbers] = []
        meter.create_observable_up_down_counter(conv.QUEUE_JOBS, [self._jobs], "{job}", "Jobs of a queue, by state.")
        meter.create_observable_gauge(
            conv.QUEUE_OLDEST_AGE, [self._ages], "s", "Age of the ready job that is next, since its enqueue."
        )

    def _jobs(self, _options: CallbackOptions) -> Iterator[Observation]:
        seen: set[tuple[str, str]] = set()  # the SDK would add up the jobs of a queue that is observed twice
        for numbers in tuple(self.apps):
            yield from numbers.jobs(seen)

    def _ages(self, _options: CallbackOptions) -> Iterator[Observation]:
        for numbers in tuple(self.apps):
            yield from numbers.ages()


class _QueueNumbers:
    def __init__(self, app: App, queues: Sequence[str], common: Labels) -> None:
        self._app = app
        self._queues = queues
        self._common = dict(common)
        self._reader: QueueReader | None = None

    def jobs(self, seen: set[tuple[str, str]]) -> Iterator[Observation]:
        """Observe the queues that are not among *seen*, and add them. An entry is a connection's URL and a queue."""
        holds = self._app.backend.declared.holds
        for stats, _ in self._read():
            if (self._app.url, stats.queue) in seen:
                continue
            seen.add((self._app.url, stats.queue))
            for state in _STATES:
                number = getattr(stats, state)
                if number is not None and (state != "held" or holds):
                    yield Observation(number, {**self._common, conv.DESTINATION: stats.queue, conv.STATE: state})

    def ages(self) -> Iterator[Observation]:
        for stats, age in self._read():
            if age is not None:
                yield Observation(age, {**self._common, conv.DESTINATION: stats.queue})

    def _read(self) -> list[QueueNumbers]:
        if self._reader is None:  # made at the first collection and not earlier, because this opens the backend
            self._reader = QueueReader(self._app.backend, self._find, _PATIENCE)
        return self._reader.read() or []

    def _find(self) -> Sequence[str]:
        return self._queues or visible_queues(self._app.backend)


T = TypeVar("T")


class _Global:
    """Stands for the global meter provider, because a program may set it later."""


_GLOBAL = _Global()
_instruments: MutableMapping[object, Instruments] = weakref.WeakKeyDictionary()
_observed: MutableMapping[object, _Observed] = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()


def _shared(known: MutableMapping[object, T], provider: MeterProvider | None, make: Callable[[], T]) -> T:
    """Return the entry of a provider, which is made if there is none.

    All apps of a provider share one entry, because the SDK ignores the callbacks of a second observable instrument that
    has the same name.
    """
    key: object = _GLOBAL if provider is None or provider is get_meter_provider() else provider
    with _shared_lock:
        found = known.get(key)
        if found is None:
            found = known[key] = make()
        return found


def _seconds(meter: Meter, name: str, description: str, bounds: Sequence[float] = conv.DURATION_BOUNDS) -> Histogram:
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=list(bounds))
