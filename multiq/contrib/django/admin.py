"""The admin's page of failed jobs. This page has the jobs of all queues of all multiq backends in ``TASKS``."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.http import urlencode
from django.views.decorators.csrf import csrf_protect
from django.views.decorators.http import require_POST

from multiq.errors import JobNotFailed, JobNotFound, MultiqError, Unsupported
from multiq.failed import ShownJob
from multiq.formatting import many

from .apps_of_backends import app_of, our_aliases
from .models import FailedJob
from .results import moment

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterator

    from django.http import HttpRequest, HttpResponse

    from multiq.failed import FailedChange
    from multiq.job import JobInfo

_PAGE = 100  # jobs; a connection's jobs are read until the page is full
_log = logging.getLogger("multiq.django")


class Row(NamedTuple):
    """A failed job of the list."""

    alias: str
    job: JobInfo
    failed_at: dt.datetime | None
    key: str
    """Identifies the job in its present state. If the job has run since then, no action changes the job."""

    @classmethod
    def of(cls, alias: str, job: JobInfo) -> Row:
        failure = job.failure
        return cls(alias, job, None if failure is None else moment(failure.at), write_key(alias, ShownJob.of(job)))

    @property
    def query(self) -> str:
        """The query part of the URL of the job's page."""
        return str(urlencode({"backend": self.alias, "queue": self.job.queue, "id": self.job.id}))

    @property
    def called(self) -> str:
        """The job's arguments, as JSON. If the body is not an envelope, or the arguments are nested too deeply:
        the body."""
        value = self.job.value
        if self.job.task is not None:
            value = {"args": value.get("args", []), "kwargs": value.get("kwargs", {})}
        if isinstance(value, bytes):
            return repr(value)
        try:
            # json.dumps would refuse values that are nested less deeply than those that can be decoded
            return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        except (RecursionError, OverflowError, msgspec.MsgspecError):
            return repr(self.job.body)


def write_key(alias: str, job: ShownJob) -> str:
    return json.dumps([alias, job.queue, job.id, job.attempt, job.kicks, job.failed_at])


def read_key(key: str) -> tuple[str, ShownJob]:
    """Return the alias and the job of a key. Raises ``ValueError`` for any other text."""
    try:
        alias, queue, job_id, attempt, kicks, failed_at = json.loads(key)
    except (TypeError, RecursionError) as exc:
        raise ValueError(f"a key must be one of the page's, got {key!r}") from exc
    ShownJob.of((queue, job_id))
    numbers = [value for value in (attempt, kicks, failed_at) if value is not None]
    if not isinstance(alias, str) or not all(type(number) in {int, float} for number in numbers):
        raise ValueError(f"a key must be one of the page's, got {key!r}")
    return alias, ShownJob(queue, job_id, attempt, kicks, failed_at)


@admin.register(FailedJob)
class FailedJobAdmin(admin.ModelAdmin):
    """Lists failed jobs, shows a failed job, retries failed jobs, and forgets failed jobs. Only a POST changes
    anything."""

    def get_urls(self) -> list[Any]:
        """The pages: the list, a job, and the pages that retry and forget."""
        view = self.admin_site.admin_view
        return [
            path("", view(self.changelist_view), name="multiq_failedjob_changelist"),
            path("job/", view(self.job_view), name="multiq_failedjob_job"),
            path("retry/", view(require_POST(csrf_protect(self.retry_view))), name="multiq_failedjob_retry"),
            path("forget/", view(require_POST(csrf_protect(self.forget_view))), name="multiq_failedjob_forget"),
        ]

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002 - Django's signature
        return False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list. Within a queue, the jobs have the order of the store: the newest failures come last."""
        self._demand(request, "view")
        wanted = {name: request.GET.get(name, "").strip() for name in ("backend", "queue", "task", "reason")}
        rows, notes = _rows(wanted)
        return self._page(
            request,
            "admin/multiq/failedjob/list.html",
            {
                "title": "Failed jobs",
                "rows": rows[:_PAGE],
                "has_more": len(rows) > _PAGE,
                "page_size": _PAGE,
                "notes": notes,
                "aliases": our_aliases(),
                "wanted": wanted,
                **(extra_context or {}),
            },
        )

    def job_view(self, request: HttpRequest) -> HttpResponse:
        """One job with its traceback."""
        self._demand(request, "view")
        alias, queue, job_id = (request.GET.get(name, "") for name in ("backend", "queue", "id"))
        if alias not in our_aliases():
            raise Http404(f"there is no backend {alias!r}")
        try:
            row = Row.of(alias, app_of(alias).failed.show(job_id, queue))
        except (JobNotFound, JobNotFailed, ValueError) as exc:
            self.message_user(request, str(exc), messages.WARNING)
            return self._to_list()
        except MultiqError as exc:
            self.message_user(request, str(exc), messages.ERROR)
            return self._to_list()
        return self._page(request, "admin/multiq/failedjob/job.html", {"title": f"Job {job_id}", "row": row})

    def retry_view(self, request: HttpRequest) -> HttpResponse:
        """Make the chosen jobs ready."""
        self._demand(request, "change")
        return self._change(request, "retried", lambda alias, jobs: app_of(alias).failed.retry_ids(jobs))

    def forget_view(self, request: HttpRequest) -> HttpResponse:
        """Delete the chosen jobs."""
        self._demand(request, "delete")
        return self._change(request, "forgotten", lambda alias, jobs: app_of(alias).failed.forget_ids(jobs))

    def _demand(self, request: HttpRequest, action: str) -> None:
        if not request.user.has_perm(f"multiq.{action}_failedjob"):
            raise PermissionDenied

    def _change(
        self, request: HttpRequest, done: str, change: Callable[[str, list[ShownJob]], FailedChange]
    ) -> HttpResponse:
        chosen: dict[str, list[ShownJob]] = {}
        ours = our_aliases()
        for key in request.POST.getlist("job"):
            try:
                alias, job = read_key(key)
            except ValueError:
                alias = ""
            if alias not in ours:
                self.message_user(request, "A job that is not on the page was left out.", messages.WARNING)
                continue
            chosen.setdefault(alias, []).append(job)
        if not chosen:
            self.message_user(request, "No jobs were chosen.", messages.WARNING)
        for alias, jobs in chosen.items():
            try:
                told = change(alias, jobs)
            except MultiqError as exc:
                self.message_user(request, f"{alias}: {exc}", messages.ERROR)
                continue
            _log.info("%s: %d of %s %s by %s", alias, told.changed, many(len(jobs), "job"), done, request.user)
            self.message_user(request, f"{many(told.changed, 'job')} {done}.", messages.SUCCESS)
            if told.left:
                self.message_user(request, f"{many(told.left, 'job')} left: changed meanwhile.", messages.WARNING)
            if told.awaited:
                self.message_user(
                    request, f"{many(told.awaited, 'job')} left: other jobs of a flow wait for them.", messages.WARNING
                )
            if told.taken:
                self.message_user(
                    request,
                    f"{many(told.taken, 'job')} left: another job has taken the unique key meanwhile.",
                    messages.WARNING,
                )
        return self._to_list()

    def _page(self, request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            template,
            {
                **self.admin_site.each_context(request),
                "opts": self.opts,
                "may_retry": request.user.has_perm("multiq.change_failedjob"),
                "may_forget": request.user.has_perm("multiq.delete_failedjob"),
                **context,
            },
        )

    def _to_list(self) -> HttpResponse:
        return HttpResponseRedirect(reverse("admin:multiq_failedjob_changelist", current_app=self.admin_site.name))


def _rows(wanted: dict[str, str]) -> tuple[list[Row], list[str]]:
    """Return the jobs that match the filters, and messages about the list. At most one more job than fits on a page is
    returned."""
    rows: list[Row] = []
    notes: list[str] = []
    stores: set[str] = set()
    for alias in our_aliases():
        if wanted["backend"] in {"", alias} and len(rows) <= _PAGE:
            try:
                app = app_of(alias)
                if app.url in stores and app.backend.declared.shared:
                    continue  # another backend has the same store, so its jobs are already in the list
                stores.add(app.url)
                rows.extend(_of_backend(alias, wanted, _PAGE + 1 - len(rows)))
            except Unsupported as exc:
                notes.append(f"{alias}: not all jobs are shown: {exc}")
            except MultiqError as exc:
                notes.append(f"{alias}: {exc}")
    return rows, notes


def _of_backend(alias: str, wanted: dict[str, str], limit: int) -> Iterator[Row]:
    found = app_of(alias).failed.list(
        queue=wanted["queue"] or None, task=wanted["task"] or None, reason=wanted["reason"] or None, limit=limit
    )
    return (Row.of(alias, job) for job in found)
