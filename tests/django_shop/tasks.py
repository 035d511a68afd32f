"""Tasks of Django's, and of multiq's."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

from django.db import connection, transaction

import multiq
from multiq.contrib.django import task, task_options

from .models import Order

shop = multiq.Tasks(prefix="shop")


@task
def add(one: int, two: int = 0) -> int:
    return one + two


@task(queue_name="mail", priority=10)
def send(address: str) -> str:
    return address


@task
async def add_later(one: int, two: int = 0) -> int:
    await asyncio.sleep(0)
    return one + two


@task(takes_context=True)
def tell(context: Any, *words: str) -> dict[str, Any]:
    result = context.task_result
    return {"id": result.id, "attempt": context.attempt, "words": words, "args": result.args, "path": result.task.name}


@task
@task_options(max_attempts=3, backoff=0)
def fail(word: str) -> None:
    raise ValueError(f"no {word}")


@task
@task_options(max_attempts=3, backoff=0)
def fail_once(path: str) -> str:
    if not os.path.exists(path):  # noqa: PTH110
        with open(path, "w") as file:  # noqa: PTH123
            file.write("failed")
        raise LookupError("not yet")
    return "done"


@task
def fail_now() -> None:
    raise KeyError("at once")


@task
async def fail_later() -> None:
    await asyncio.sleep(0)
    raise ValueError("later")


receiver_waits, receiver_may_go = threading.Event(), threading.Event()


@task
async def let_the_receiver_go() -> None:
    while not receiver_waits.is_set():  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0.01)
    receiver_may_go.set()


@task
def give(size: int) -> str:
    return "x" * size


@task
def give_a_set() -> Any:
    return {1, 2}


@task
def note(number: int) -> list[Any]:
    """Write a row, and return the names of the process and the thread."""
    Order.objects.create(number=number, note=f"{os.getpid()}")
    return [number, os.getpid(), threading.current_thread().name]


@task
async def anote(number: int) -> int:
    await Order.objects.acreate(number=number, note="async")
    return number


@task
def fail_after_a_row(number: int) -> None:
    Order.objects.create(number=number)
    raise ValueError("after the row")


@task
def leave_open(number: int) -> None:
    """Leave a transaction open, as no task should."""
    transaction.atomic().__enter__()
    Order.objects.create(number=number)


@task
def place_and_fail(number: int) -> None:
    """Write a row and enqueue in a transaction that is rolled back."""
    with transaction.atomic():
        Order.objects.create(number=number)
        add.enqueue(number)
        raise ValueError("rolled back")


@task
def session_id() -> int:
    """Return the id of the database's session."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID()")
        return int(cursor.fetchone()[0])


@task
@task_options(timeout=0.5)
def wait_in_a_query() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT SLEEP(20)")


@task
def sleep(seconds: float) -> None:
    time.sleep(seconds)


@shop.task(queue="shop", keep=60)
def total(one: int) -> int:
    return one * int(Order.objects.count())
