"""Tasks with limits that are kept by permits, for workers in processes of their own."""

from __future__ import annotations

import random
import time

from worker_app import diary, note

import multiq

app = multiq.App()

TTR = 2.0

BOTH = multiq.Limit("both", slots=2, scope="app")
ONE = multiq.Limit("one", slots=1, scope="app")
OWN = multiq.Limit("own", slots=1)
RATE = multiq.Limit("rate", rate=10, burst=2, scope="app")
THREE = multiq.Limit("three", slots=3, scope="app")
TENANT = multiq.Limit("tenant", key="{tenant}", slots=1, scope="app")


def run(number: int, seconds: float) -> None:
    """Notes its attempt, and when it starts and ends."""
    note(f"start:{multiq.current_job().attempt}", number)
    time.sleep(seconds)
    note("end", number)


def run_beside_another(number: int) -> None:
    """Runs until another job has started, but not for more than ten seconds: all other jobs may have ended before."""
    note(f"start:{multiq.current_job().attempt}", number)
    own, give_up_at = time.monotonic_ns(), time.monotonic() + 10
    while time.monotonic() < give_up_at:
        started = [at for word, other, _, at in diary() if word.startswith("start:") and other != number]
        if any(at > own for at in started):
            break
        time.sleep(0.01)
    note("end", number)


@app.task(queue="mail", limits=[BOTH], ttr=TTR)
def mail_beside_another(number: int) -> None:
    run_beside_another(number)


@app.task(queue="sms", limits=[BOTH], ttr=TTR)
def sms_beside_another(number: int) -> None:
    run_beside_another(number)


@app.task(queue="mail", limits=[BOTH], ttr=TTR)
def mail(number: int, seconds: float) -> None:
    run(number, seconds)


@app.task(queue="sms", limits=[BOTH], ttr=TTR)
def sms(number: int, seconds: float) -> None:
    run(number, seconds)


@app.task(queue="sms", limits=[BOTH, TENANT], ttr=TTR)
async def ssms(number: int, seconds: float, tenant: str) -> None:
    run(number, seconds)


@app.task(queue="mail", limits=[ONE], max_attempts=1, max_crashes=1, ttr=TTR)
def one(number: int, seconds: float) -> None:
    run(number, seconds)


@app.task(queue="mail", limits=[OWN], ttr=TTR)
def own(number: int, seconds: float) -> None:
    run(number, seconds)


@app.task(queue="mail", limits=[RATE])
def rated(number: int) -> None:
    run(number, 0.0)


@app.task(queue="mail", limits=[THREE], max_attempts=0, max_crashes=0, backoff=0, ttr=2 * TTR)
def three(number: int) -> None:
    run(number, random.choice([0.01, 0.05, 0.3]))


@app.task(queue="mail")
def free(number: int) -> None:
    run(number, 0.0)
