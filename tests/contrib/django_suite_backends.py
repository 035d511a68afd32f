"""multiq in the place of Django's own backends, for Django's own tests of them.

Django's tests expect features that only Django's two backends for tests have: ``DummyBackend`` has a list of its
results, and ``ImmediateBackend`` runs a task within its enqueue. Here, a real worker runs it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from asgiref.sync import sync_to_async

import multiq
from multiq.contrib.django import TaskBackend

_results: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class Stored(TaskBackend):
    """multiq's backend, on the store that the environment names. It is empty for each test."""

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        options = params.get("OPTIONS", {})
        super().__init__(alias, {**params, "OPTIONS": {"url": os.environ["DJANGO_SUITE_URL"], **options}})
        self.options = options
        if self.app not in _results:
            self.clear()

    @property
    def results(self) -> list[Any]:
        return _results.setdefault(self.app, [])

    def clear(self) -> None:
        self.results.clear()
        for queue in self.app.backend.queues():
            self.app.queue(queue).purge()


class Dummy(Stored):
    """Enqueues, and lists what it has enqueued."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        self.results.append(result)
        return result

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = await super().aenqueue(task, args, kwargs)
        self.results.append(result)
        return result


class Immediate(Stored):
    """Enqueues, and lets a worker run the job before it returns."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        self._work()
        result.refresh()
        return result

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = await super().aenqueue(task, args, kwargs)
        await sync_to_async(self._work)()
        await result.arefresh()
        return result

    def _work(self) -> None:
        worker = threading.Thread(target=multiq.Worker(self.app, stop_when_empty=True).run)
        worker.start()
        worker.join()
