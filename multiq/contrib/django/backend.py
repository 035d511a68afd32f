"""The backend for Django's setting ``TASKS``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.utils import timezone

from multiq.async_calls import run
from multiq.control.flags import visible_queues
from multiq.errors import BackendNotInstalled, ConnectionElsewhere, NameInvalid, OptionInvalid
from multiq.ids import check_id, new_id
from multiq.task import TaskCall
from multiq.validation import check_delay, check_queue

from .apps_of_backends import app_for
from .checking import check_app
from .connections import is_in_transaction
from .framework import BaseTaskBackend, InvalidTask, TaskResultDoesNotExist, task_enqueued
from .priorities import to_priority
from .results import RUN_AFTER, change, enqueued_at, find_result, new_result

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from django.core import checks

    from .apps_of_backends import DjangoApp


class TaskBackend(BaseTaskBackend):
    """Enqueues Django's tasks as jobs of multiq.

    ``OPTIONS`` has *url*, *transaction*, *database*, *include*, and the options of ``task_options``, which are the
    defaults of all tasks. ``docs/django.md`` describes these options.

    Raises ``ImproperlyConfigured``.
    """

    is_multiq = True
    supports_defer = True  # all backends have delays
    supports_async_task = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        self.app: DjangoApp = app_for(alias, params)  # checks the parameters, which Django does not
        super().__init__(alias, params)
        self.app.sender = type(self)

    @property
    def supports_get_result(self) -> bool:
        """Whether results are kept: the capability ``outcomes``, unless the option *keep* is 0."""
        declared = self._declared
        return bool(declared.outcomes and declared.inspection and self.app.keep_of(None))

    @property
    def supports_priority(self) -> bool:
        return bool(self._declared.priorities)

    def validate_task(self, task: Any) -> None:
        """Raise ``InvalidTask`` unless this backend can run the task."""
        super().validate_task(task)
        try:
            check_queue(task.queue_name)
        except NameInvalid as exc:
            raise InvalidTask(str(exc)) from exc

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Enqueue a task, either in the transaction of Django's database or after the commit of this transaction.

        The option *transaction* chooses one of the two ways. If the transaction is rolled back, nothing is enqueued.
        The returned result already has the job's final ``id``. There is one exception: if the backend chooses the ids
        and the job waits for the commit, ``id`` is empty until the commit. ``enqueued_at`` is None until the job is
        sent.

        Raises the errors of ``multiq.Task.enqueue``, and ``InvalidTask``. Raises ``TypeError`` for arguments that are
        not JSON.
        """
        parcel = _Parcel(self, task, args, kwargs)
        if self.app.options.transaction == "now":
            return parcel.send()
        connection = connections[self.app.options.database]
        if not is_in_transaction(connection):
            return parcel.send()
        return self._join(parcel, connection)

    async def aenqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``enqueue`` without blocking the event loop."""
        if self.app.options.transaction != "now" and await sync_to_async(self._is_in_transaction)():
            return await sync_to_async(self.enqueue)(task=task, args=args, kwargs=kwargs)
        return await _Parcel(self, task, args, kwargs).asend()

    def get_result(self, result_id: str) -> Any:
        """Return a result. The job is searched in the queues of ``QUEUES``.

        Raises ``TaskResultDoesNotExist``: there is neither the job nor its outcome. Raises ``NotImplementedError`` if
        the backend keeps no results.
        """
        if not self.supports_get_result:
            return super().get_result(result_id)
        try:
            check_id(result_id)
        except OptionInvalid:
            raise TaskResultDoesNotExist(result_id) from None
        result = find_result(self.app, self._queues_to_search(), result_id)
        if result is None:
            raise TaskResultDoesNotExist(result_id)
        return result

    async def aget_result(self, result_id: str) -> Any:
        """``get_result`` without blocking the event loop."""
        return await run(await self.app.abackend(), self.get_result, result_id)

    def check(self, **_: Any) -> Iterable[checks.CheckMessage]:
        """The checks of ``manage.py check``. No check makes a call of the store."""
        return check_app(self.app)

    @property
    def _declared(self) -> Any:
        try:
            return self.app.backend.declared
        except (BackendNotInstalled, ValueError) as exc:
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]: {exc}") from exc

    def _is_in_transaction(self) -> bool:
        return is_in_transaction(connections[self.app.options.database])

    def _join(self, parcel: _Parcel, connection: Any) -> Any:
        """Enqueue in the transaction that is open on *connection*, or after its commit."""
        asked = self.app.options.transaction
        if asked in {"auto", "join"} and self._may_join(connection):
            try:
                return parcel.send(connection)
            except ConnectionElsewhere as exc:
                if asked == "join":
                    raise self._cannot_join(str(exc)) from exc
                self.app.elsewhere = True
        elif asked == "join":
            raise self._cannot_join(f"it is {connection.vendor}, and the backend is {self._declared.backend}")
        parcel.wait()
        transaction.on_commit(partial(parcel.send), using=connection.alias)
        return parcel.result

    def _may_join(self, connection: Any) -> bool:
        """Whether Django's database may be the database that has the jobs. If so, an enqueue checks whether the two are
        the same."""
        declared = self._declared
        is_like = declared.transactional_enqueue and declared.backend == connection.vendor
        return bool(is_like and (self.app.options.transaction == "join" or not self.app.elsewhere))

    def _cannot_join(self, why: str) -> ImproperlyConfigured:
        return ImproperlyConfigured(
            f"TASKS[{self.alias!r}]: with transaction='join', the jobs must be in the database "
            f"{self.app.options.database!r} of Django ({why}): name its URL, or use 'auto' or 'on_commit'"
        )

    def _queues_to_search(self) -> Iterable[str]:
        if self.app.options.queues is not None:
            return self.app.options.queues
        used = [task.default.queue for task in self.app.tasks.values()]
        return dict.fromkeys(["default", *used, *visible_queues(self.app.backend)])


class _Parcel:
    """One task that is to be enqueued."""

    def __init__(self, owner: TaskBackend, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        owner.validate_task(task)
        self._app = app = owner.app
        self._task = app.multiq_task(task)
        self.result = new_result(app, task, args, kwargs, result_id="")
        self._run_after = _aware(task.run_after)
        self._options = msgspec.structs.replace(
            self._task.default,
            queue=task.queue_name,
            priority=to_priority(task.priority),
            headers={} if self._run_after is None else {RUN_AFTER: self._run_after.isoformat()},
        )

    def wait(self) -> None:
        """Check all that can be checked, so that the commit finds no mistakes. Choose the job's id, if the backend
        allows it."""
        backend, options = self._app.backend, self._call().chosen
        self._task.encode(self.result.args, self.result.kwargs, options)
        backend.check_terms(priority=options.priority, delay=options.delay)
        if backend.declared.client_ids:
            self._options = msgspec.structs.replace(self._options, id=new_id())
            change(self.result, id=self._options.id)

    def send(self, connection: Any = None) -> Any:
        """Enqueue the job. *connection*: the Django connection whose transaction the enqueue joins. None: enqueue now,
        without a transaction."""
        handle = self._call(connection).enqueue(*self.result.args, **self.result.kwargs)
        self._note(handle.id)
        if connection is not None and connection.in_atomic_block:
            transaction.on_commit(self._tell, using=connection.alias)
        else:
            self._tell()
        return self.result

    async def asend(self) -> Any:
        """``send`` without blocking the event loop."""
        handle = await self._call().aenqueue(*self.result.args, **self.result.kwargs)
        self._note(handle.id)
        await task_enqueued.asend_robust(sender=self._app.sender, task_result=self.result)
        return self.result

    def _call(self, connection: Any = None) -> TaskCall[...]:
        delay = check_delay(None, self._run_after)
        return TaskCall(self._task, msgspec.structs.replace(self._options, delay=delay, connection=connection))

    def _note(self, job_id: str) -> None:
        change(self.result, id=job_id, enqueued_at=enqueued_at(job_id, 0.0))

    def _tell(self) -> None:
        task_enqueued.send_robust(sender=self._app.sender, task_result=self.result)


def _aware(moment: Any) -> Any:
    return timezone.make_aware(moment) if moment is not None and timezone.is_naive(moment) else moment
