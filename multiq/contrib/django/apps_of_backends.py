"""The multiq apps of a project: one for each backend of the setting ``TASKS`` that is multiq's.

Django makes a backend object for each thread. All objects of an alias share one app.
"""

from __future__ import annotations

import copy
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
from django.apps import apps as installed_apps
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string, module_has_submodule

from multiq.app import App
from multiq.driverkit.fork import forks
from multiq.errors import MultiqError, NameInvalid
from multiq.registry import make_task, not_loaded
from multiq.validation import check_name

from .connections import guard
from .framework import InvalidTask, Task, task_backends
from .options import KEEP_DEFAULT, MAX_ATTEMPTS_DEFAULT, project_settings, read_options
from .priorities import to_priority
from .running import Finished, runner_of
from .task_options import options_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from multiq.settings.model import Settings
    from multiq.task import Task as MultiqTask

    from .options import BackendOptions


class DjangoApp(App):
    """The app of a backend. This app has the tasks of ``multiq.Tasks`` and Django's tasks. The name of a Django task is
    its path."""

    def __init__(self, options: BackendOptions, settings: Settings) -> None:
        if options.queues is not None and settings.worker.queues is None:
            worker = msgspec.structs.replace(
                settings.worker, queues=options.queues, policy=settings.worker.policy or "round-robin"
            )
            settings = msgspec.structs.replace(settings, worker=worker)
            self._has_own_queues = False
        else:
            self._has_own_queues = True
        super().__init__(options.url, settings=settings)
        self.settings = msgspec.structs.replace(self.settings, url=self.url, store=None)  # for commands
        self.options = options
        self.elsewhere = False
        """Whether it is known that Django's database is not this backend's database."""
        self._not_included = [""]  # until ``load_included`` has found the modules
        self._has_modules = False
        self._registries: list[Any] = []
        not_loaded.add(self)
        self.sender: Any = None
        """The class of the backend. It is the sender of Django's signals."""
        guard(self)
        self.middleware(Finished(self))

    def load_included(self) -> None:
        """Import the modules ``tasks`` of the installed apps, and the modules that the options and the settings
        name."""
        with self._including:
            if not self._has_modules:
                self._has_modules = True  # imports may call this method
                modules = dict.fromkeys([*_task_modules(), *self.options.include, *self.settings.include])
                self._not_included[:] = modules
                self.settings = msgspec.structs.replace(self.settings, include=tuple(modules))
            if not self._not_included:
                return
            super().load_included()
            for name in self.settings.include:
                self._add_all(vars(sys.modules[name]))
            if not self._has_own_queues:
                self._serve_queues_of_tasks()

    def include(self, tasks: Any) -> None:
        """Include a registry, if this app is the one that includes registries: the app of the alias ``default``, or of
        the first alias if there is no ``default``."""
        if _includes_registries(self.options.alias):
            super().include(tasks)
            self._registries.append(tasks)

    def drop(self) -> None:
        """Close the connections, and exclude the registries, so that the app that replaces this one can include
        them."""
        not_loaded.discard(self)
        for tasks in self._registries:
            self.exclude(tasks)
        self.close()

    def multiq_task(self, task: Any) -> MultiqTask[..., Any]:
        """Return multiq's task for a task of Django's. Raises ``InvalidTask`` if no worker would know the task."""
        path = task.module_path
        known = self._tasks.get(path) or self.tasks.get(path)
        if known is None or getattr(known.function, "__wrapped__", None) is not task.func:
            raise InvalidTask(
                f"task {path} must be a variable of a module that workers import: a module tasks of an installed app, "
                "or one that OPTIONS['include'] names"
            )
        return known

    def django_task(self, path: str) -> Any:
        """Return the Django task at this path, or None if there is none."""
        found = self.tasks.get(path)
        return None if found is None else getattr(found.function, "django_task", None)

    def keep_of(self, keep: float | None) -> float:
        """Return the seconds for which a result is kept."""
        if keep is None:
            keep = self.options.keep
        if keep is None:
            return KEEP_DEFAULT if self.backend.declared.outcomes else 0.0
        return keep

    def _add_all(self, variables: Mapping[str, Any]) -> None:
        """Add the tasks among a module's variables, whatever their backend is, because ``task.using(backend=...)``
        changes the backend."""
        for value in list(variables.values()):
            if isinstance(value, Task) and value.module_path not in self._tasks:
                self._tasks[value.module_path] = _make(self, value)

    def _serve_queues_of_tasks(self) -> None:
        worker = self.settings.worker
        others = (task.default.queue for task in self._tasks.values() if not hasattr(task.function, "django_task"))
        queues = dict.fromkeys([*(worker.queues or ()), *others])
        worker = msgspec.structs.replace(worker, queues=tuple(queues))
        self.settings = msgspec.structs.replace(self.settings, worker=worker)


def app_of(alias: str) -> DjangoApp:
    """Return the app of a backend in ``TASKS``. Raises ``ImproperlyConfigured``."""
    parameters = task_backends.settings.get(alias)
    if parameters is None:
        known = ", ".join(task_backends.settings) or "none"
        raise ImproperlyConfigured(f"TASKS has no backend {alias!r}: there are {known}")
    if not is_ours(parameters):
        raise ImproperlyConfigured(
            f"TASKS[{alias!r}]: BACKEND must be multiq.contrib.django.TaskBackend, got {parameters.get('BACKEND')}"
        )
    return app_for(alias, parameters)


def app_for(alias: str, parameters: Mapping[str, Any]) -> DjangoApp:
    """Return the app of a backend with these parameters. Raises ``ImproperlyConfigured``."""
    with _lock:
        known = _apps.get(alias)
        if known is None or known[0] != parameters:
            try:
                app = DjangoApp(read_options(alias, parameters), project_settings())
            except ImproperlyConfigured:
                raise
            except MultiqError as exc:
                raise ImproperlyConfigured(f"TASKS[{alias!r}]: {exc}") from exc
            if known is not None:
                known[1].drop()
            known = _apps[alias] = (copy.deepcopy(dict(parameters)), app)
        return known[1]


def our_aliases() -> list[str]:
    """Return the aliases in ``TASKS`` whose backends are multiq's."""
    return [alias for alias, parameters in task_backends.settings.items() if is_ours(parameters)]


def is_ours(parameters: Mapping[str, Any]) -> bool:
    """Whether the ``BACKEND`` in *parameters* is multiq's ``TaskBackend`` or a subclass of it."""
    try:
        found = import_string(str(parameters.get("BACKEND")))
    except ImportError:
        return False
    return bool(getattr(found, "is_multiq", False))


def _includes_registries(alias: str) -> bool:
    ours = our_aliases()
    return alias == ("default" if "default" in ours else next(iter(ours), alias))


def _task_modules() -> Iterator[str]:
    for config in installed_apps.get_app_configs():
        if config.module is not None and module_has_submodule(config.module, "tasks"):
            yield f"{config.name}.tasks"


def _make(app: DjangoApp, task: Any) -> MultiqTask[..., Any]:
    """Return multiq's task that runs a task of Django's."""
    path = task.module_path
    try:
        check_name(path, "task")
        options = {**app.options.tasks, **options_of(task.func)}
        if not {"max_attempts", "retry_for"} & options.keys():
            options["max_attempts"] = MAX_ATTEMPTS_DEFAULT
        keep = app.keep_of(options.pop("keep", None))
        function = runner_of(app, task)
        return make_task(
            app,
            function,
            name=path,
            queue=task.queue_name,
            priority=to_priority(task.priority),
            keep=keep,
            **options,
        )
    except NameInvalid as exc:
        raise InvalidTask(f"task {path}: {exc}") from exc


@receiver(setting_changed)
def _forget(*, setting: str, **_: Any) -> None:
    """Forget the apps when a test overrides their settings."""
    if setting in {"TASKS", "MULTIQ"}:
        with _lock:
            for _, app in _apps.values():
                app.drop()
            _apps.clear()


_lock = threading.RLock()
_apps: dict[str, tuple[dict[str, Any], DjangoApp]] = {}

forks.hold(_lock)
