"""The admin's page of failed jobs, as a browser sees it."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

import django.urls
import djangos
import msgspec
import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import Client, override_settings
from django_shop import tasks as shop
from djangos import tasks, work
from servers.redis import RedisServer
from stores import STORES

import multiq
from multiq.contrib.django.admin import FailedJobAdmin, Row, read_key
from multiq.contrib.django.framework import Status, TaskResultDoesNotExist
from multiq.contrib.django.models import FailedJob

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from multiq.contrib.django import TaskBackend

LIST = "/admin/multiq/failedjob/"


@pytest.fixture
def backend(database: Any, tmp_path: Path) -> Iterator[TaskBackend]:
    with tasks(f"sqlite:///{tmp_path}/jobs.db") as backend:
        yield backend


def client(*permissions: str, superuser: bool = False) -> Client:
    """A browser in which a member of the staff is logged in."""
    user = User.objects.create(username="ann", is_staff=True, is_superuser=superuser)
    found = Permission.objects.filter(codename__in=permissions, content_type__app_label="multiq")
    assert len(found) == len(permissions)
    user.user_permissions.set(found)
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


def failed(*words: str) -> list[Any]:
    return [shop.fail.enqueue(word) for word in words]


def keys(page: str) -> list[str]:
    return [html.unescape(key) for key in re.findall(r'name="job" value="([^"]*)"', page)]


def post(client: Client, action: str, jobs: list[str]) -> str:
    """Send the list's form, and return the page after it."""
    page = client.get(LIST).content.decode()
    (token, *_) = re.findall(r'name="csrfmiddlewaretoken" value="([^"]*)"', page) or [""]
    data = {"csrfmiddlewaretoken": token, "job": jobs}
    answer = client.post(f"{LIST}{action}/", data, follow=True)
    return str(answer.content.decode()) if answer.status_code == 200 else str(answer.status_code)


def test_the_list_shows_failed_jobs_and_a_job_its_traceback(backend: TaskBackend) -> None:
    # given two failed jobs of Django's tasks, and one failed job of another kind
    failed("one", "two")
    backend.app.queue("raw").enqueue(b"<script>alert(1)</script>")
    work(backend, queues=["default", "raw"])
    ann = client("view_failedjob")

    # when the admin's pages are opened
    page = ann.get(LIST).content.decode()
    (link, *_) = re.findall(r'href="([^"]*job/\?[^"]*)"', page)
    job = ann.get(html.unescape(link)).content.decode()

    # then they show the jobs, and no button without the permission
    assert page.count("django_shop.tasks.fail</a>") == 2
    assert "ValueError: no one" in page
    assert "(no task)" in page
    assert "<script>alert" not in page
    assert "raise ValueError(f&quot;no {word}&quot;)" in job
    assert "builtins" not in page
    assert 'value="Retry"' not in page + job
    assert 'value="Forget"' not in page + job
    assert "Failed jobs" in ann.get("/admin/").content.decode()


def test_arguments_that_nest_deeply_are_shown(backend: TaskBackend) -> None:
    # given a failed job
    queue = backend.app.queue("raw")
    queue.enqueue(b"{}")
    queue.reserve().bury()
    (job,) = queue.jobs("buried")

    # when its arguments nest as deeply as can be decoded, and more deeply, then they are shown
    for depth in range(900, 1010):
        body = f'{{"multiq":1,"task":"gone","args":[{"[" * depth}{"]" * depth}]}}'.encode()
        called = Row.of("default", msgspec.structs.replace(job, body=body)).called
        assert called.count("[") > depth


def test_a_second_admin_site_links_to_its_own_pages(backend: TaskBackend) -> None:
    # given a failed job, and two admin sites that show failed jobs
    failed("one")
    work(backend)
    site = admin.AdminSite(name="ops")
    site.register(FailedJob, FailedJobAdmin)
    urls = django.urls.path("ops/", site.urls), django.urls.path("admin/", admin.site.urls)

    # when the second site shows the list
    with override_settings(ROOT_URLCONF=urls):
        page = client("view_failedjob").get("/ops/multiq/failedjob/").content.decode()

    # then the link to the job leads to the second site
    (link,) = re.findall(r'href="([^"]*job/\?[^"]*)"', page)
    assert link.startswith("/ops/multiq/failedjob/job/?backend=default&amp;queue=default&amp;id=")


def test_a_failed_job_is_retried(backend: TaskBackend) -> None:
    one, two = failed("one", "two")
    work(backend)
    ann = client("view_failedjob", "change_failedjob")
    chosen = [key for key in keys(ann.get(LIST).content.decode()) if read_key(key)[1].id == one.id]
    page = post(ann, "retry", chosen)
    assert "1 job retried." in page
    one.refresh()
    two.refresh()
    assert (one.status, two.status) == (Status.READY, Status.FAILED)
    assert len(keys(page)) == 1


def test_a_failed_job_is_forgotten(backend: TaskBackend) -> None:
    results = failed("one", "two")
    work(backend)
    ann = client("view_failedjob", "delete_failedjob")
    page = post(ann, "forget", keys(ann.get(LIST).content.decode()))
    assert "2 jobs forgotten." in page
    assert "There are no failed jobs." in page
    for result in results:
        with pytest.raises(TaskResultDoesNotExist):
            result.refresh()


def test_a_job_that_has_run_since_the_page_was_shown_is_left(backend: TaskBackend) -> None:
    (result,) = failed("one")
    work(backend)
    ann = client("view_failedjob", "delete_failedjob", "change_failedjob")
    shown = keys(ann.get(LIST).content.decode())
    backend.app.failed.retry(task="django_shop.tasks.fail")
    work(backend)
    assert "1 job left: changed meanwhile." in post(ann, "forget", shown)
    result.refresh()
    assert result.status == Status.FAILED


@pytest.mark.parametrize(
    ("permissions", "action", "code"),
    [
        ((), "", 403),
        ((), "job/?backend=default&queue=default&id=1", 403),
        (("view_failedjob",), "retry/", 403),
        (("view_failedjob", "delete_failedjob"), "retry/", 403),
        (("view_failedjob", "change_failedjob"), "forget/", 403),
    ],
)
def test_each_action_needs_its_permission(
    backend: TaskBackend, permissions: tuple[str, ...], action: str, code: int
) -> None:
    failed("one")
    work(backend)
    ann = client(*permissions)
    ann.handler.enforce_csrf_checks = False
    answer = ann.post(f"{LIST}{action}", {"job": []}) if action in {"retry/", "forget/"} else ann.get(f"{LIST}{action}")
    assert answer.status_code == code
    if not permissions:
        assert "Failed jobs" not in ann.get("/admin/").content.decode()
    assert backend.app.queue().stats().buried == 1


def test_only_a_post_with_a_token_of_the_page_changes_anything(backend: TaskBackend) -> None:
    failed("one")
    work(backend)
    ann = client(superuser=True)
    shown = keys(ann.get(LIST).content.decode())
    assert [ann.get(f"{LIST}{action}/").status_code for action in ("retry", "forget")] == [405, 405]
    assert [ann.post(f"{LIST}{action}/", {"job": shown}).status_code for action in ("retry", "forget")] == [403, 403]
    assert backend.app.queue().stats().buried == 1


def test_a_stranger_is_sent_to_the_login(backend: TaskBackend) -> None:
    for path in (LIST, f"{LIST}job/", f"{LIST}retry/", f"{LIST}forget/"):
        answer = Client().get(path)
        assert (answer.status_code, answer["Location"].partition("?")[0]) == (302, "/admin/login/")


@pytest.mark.parametrize(
    "key",
    ["", "nonsense", "[]", "[1]", '["default"]', '["other", "default", "1", 1, 0, null]',
     '["default", "q", 1, 1, 0, 1]', '["default", "q", "1", "x", 0, 1]', '{"a": 1}', "[" * 5000,
     '["default", "q", "1", 1e999, 0, 1]',
     '["default", "q", "1", true, 0, 1]', '["default", "' + "x" * 300 + '", "1", 1, 0, 1]',
     '["default", "q", "\\u0000", 1, 0, 1]'],
)  # fmt: skip
def test_a_key_that_is_not_the_page_s_is_left_out(backend: TaskBackend, key: str) -> None:
    failed("one")
    work(backend)
    ann = client(superuser=True)
    page = post(ann, "forget", [key])
    assert "was left out" in page or "1 job left: changed meanwhile." in page or "must" in page
    assert backend.app.queue().stats().buried == 1


@pytest.mark.parametrize(
    "asked",
    ["", "?backend=other&queue=default&id=1", "?backend=default", "?backend=default&queue=default&id=nothing",
     "?backend=default&queue=%00&id=%00", "?backend=default&queue=" + "x" * 300 + "&id=1"],
)  # fmt: skip
def test_a_job_that_is_not_there_is_no_error(backend: TaskBackend, asked: str) -> None:
    answer = client(superuser=True).get(f"{LIST}job/{asked}")
    assert answer.status_code in {302, 404}


def test_the_filters_choose_jobs(backend: TaskBackend) -> None:
    failed("one", "two")
    shop.fail_now.enqueue()
    work(backend)
    ann = client("view_failedjob")
    for query, wanted in {
        "task=django_shop.tasks.fail": 2, "reason=one": 1, "queue=default": 3, "queue=other": 0, "backend=default": 3,
        "backend=none": 0, "task=&reason=": 3, "reason=%3Cb%3E": 0, "queue=%00": 0,
    }.items():  # fmt: skip
        page = ann.get(f"{LIST}?{query}").content.decode()
        assert len(keys(page)) == wanted, query
        assert "<b>" not in page


@pytest.mark.long
def test_a_long_list_says_that_it_is_cut(backend: TaskBackend) -> None:
    failed(*map(str, range(101)))
    work(backend)
    page = client("view_failedjob").get(LIST).content.decode()
    assert len(keys(page)) == 100
    assert "Only 100 jobs are shown." in page


def test_the_failed_jobs_of_all_backends_are_shown(backend: TaskBackend, tmp_path: Path) -> None:
    parameters = {"BACKEND": "multiq.contrib.django.TaskBackend", "QUEUES": []}
    with RedisServer() as server:
        urls = {"default": f"sqlite:///{tmp_path}/jobs.db", "fast": server.url, "gone": "redis://127.0.0.1:1"}
        both = {alias: {**parameters, "OPTIONS": {"url": url}} for alias, url in urls.items()}
        with override_settings(TASKS=both):
            for alias in ("default", "fast"):
                shop.fail.using(backend=alias).enqueue(alias)
                work(djangos.task_backends()[alias])
            ann = client(superuser=True)
            page = ann.get(LIST).content.decode()

            # one backend that does not answer hides no others
            assert [read_key(key)[0] for key in keys(page)] == ["default", "fast"]
            assert "gone: 127.0.0.1:1" in page
            assert len(keys(ann.get(f"{LIST}?backend=fast").content.decode())) == 1
            page = post(ann, "retry", keys(page))
            assert page.count("1 job retried.") == 2
            assert len(keys(page)) == 0
            djangos.task_backends()["fast"].app.close()


def test_the_jobs_of_two_backends_with_one_store_are_shown_once(backend: TaskBackend) -> None:
    parameters = {"BACKEND": "multiq.contrib.django.TaskBackend", "QUEUES": []}
    options = {"url": backend.app.url}
    both = {
        "default": {**parameters, "OPTIONS": options},
        "patient": {**parameters, "OPTIONS": {**options, "max_attempts": 1}},
    }
    with override_settings(TASKS=both):
        for alias in both:
            shop.fail.using(backend=alias).enqueue(alias)
        work(djangos.task_backends()["default"])
        ann = client(superuser=True)
        page = ann.get(LIST).content.decode()
        assert len(keys(page)) == 2
        assert len(keys(ann.get(f"{LIST}?backend=patient").content.decode())) == 2
        page = post(ann, "retry", keys(page))
        assert "2 jobs retried." in page
        assert "changed meanwhile" not in page


def test_a_job_whose_unique_key_is_taken_meanwhile_is_left(backend: TaskBackend) -> None:
    # given a failed job with a unique key, which is free since it has failed, and another job with this key
    @backend.app.task(max_attempts=1, unique=multiq.Unique(until="buried"))
    def report() -> None:
        raise RuntimeError

    report.enqueue()
    work(backend)
    report.enqueue()
    # when it is retried
    ann = client(superuser=True)
    page = post(ann, "retry", keys(ann.get(LIST).content.decode()))
    # then the page says why the failed job was left unchanged
    assert "0 jobs retried." in page
    assert "1 job left: another job has taken the unique key meanwhile." in page


def test_a_store_without_failed_jobs_says_so(database: Any) -> None:
    with tasks("null://"):
        page = client(superuser=True).get(LIST).content.decode()
        assert "There are no failed jobs." in page


def test_a_failed_job_has_no_page_of_another_model(backend: TaskBackend) -> None:
    ann = client(superuser=True)
    for path in ("add/", "1/change/", "1/delete/", "1/history/"):
        assert ann.get(f"{LIST}{path}").status_code == 404


def test_permissions_are_made_by_migrate(database: Any) -> None:
    call_command("migrate", verbosity=0)
    names = Permission.objects.filter(content_type__app_label="multiq").values_list("codename", flat=True)
    assert sorted(names) == ["change_failedjob", "delete_failedjob", "view_failedjob"]


@pytest.mark.long
@pytest.mark.parametrize("store", ["redis", "mysql", "beanstalk", "beanstalk+store"])
def test_the_page_works_on_each_store(store: str, database: Any, tmp_path: Path) -> None:
    with STORES[store](tmp_path) as url, tasks(url) as backend:
        failed("one", "two")
        work(backend)
        ann = client(superuser=True)
        page = ann.get(LIST).content.decode()
        shown = keys(page)
        is_listed = not store.startswith("beanstalk")  # which shows only the first failed job
        assert len(shown) == (2 if is_listed else 1)
        assert ("not all jobs are shown" in page) != is_listed
        (link, *_) = re.findall(r'href="([^"]*job/\?[^"]*)"', page)
        assert "django_shop.tasks.fail" in ann.get(html.unescape(link)).content.decode()
        assert "1 job retried." in post(ann, "retry", shown[:1])
        work(backend)
        page = ann.get(LIST).content.decode()
        assert len(keys(page)) == len(shown)
        assert "forgotten." in post(ann, "forget", keys(page))
        backend.app.close()
