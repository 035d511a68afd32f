"""Five alarms: one ignored, one resolved, one moved earlier, one moved later, and one that watches a heartbeat."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from examples.app import app
from examples.stage import BaseStory, Check, Counts, Outcome

from .alarm import Alarm
from .tasks import rings

if TYPE_CHECKING:
    from examples.stage import Scene

DEADLINE = 4.0  # seconds
SOON = 1.0
LATER = 6.0
BEAT = 1.0
MUCH_LATER = 60.0
PATIENCE = 3.0  # seconds without a heartbeat after which the sensor counts as dead


class Story(BaseStory):
    title = "alarm"
    queue = "alarms"

    def play(self, scene: Scene) -> Outcome:
        started_at = time.time()
        disk, door, batch = (Alarm(what, DEADLINE) for what in ("disk is full", "door is open", "nightly batch"))
        fire = Alarm("fire", MUCH_LATER)
        last_beat_at = time.time()
        sensor = Alarm("sensor is silent", PATIENCE)
        delayed = app.queue("alarms").stats().delayed
        scene.say(f"3 alarms ring in {DEADLINE:g} s, 1 in a minute, 1 when a sensor is silent for {PATIENCE:g} s")

        resolved = door.resolve()
        scene.say("the door was closed: its alarm never rings")
        moved = [fire.move(SOON), batch.move(LATER)]
        moved_at = time.time()
        scene.say(f"fire: moved earlier, to {SOON:g} s; nightly batch: later, {LATER:g} s")

        for _ in range(3):
            time.sleep(BEAT)
            now = time.time()
            if sensor.move(PATIENCE):
                last_beat_at = now
            else:
                moved.append(now - last_beat_at >= PATIENCE)  # right if this machine was suspended for so long
        scene.say("the sensor reported 3 times, and is silent from now on")

        scene.follow(4)
        heard = rings()
        scene.say("rang: " + ", ".join(sorted(heard, key=lambda what: heard[what])))
        first = {what: times[0] for what, times in heard.items()}
        return Outcome(
            self.title,
            expected=Counts(queued=5, delayed=5, retried=0, cancelled=1, worked_off=4, buried=0),
            seen=scene.count(queued=5, delayed=delayed or 0, cancelled=int(resolved)),
            checks=[
                Check("the resolved alarm never rang, all others once", _rang_once(heard, disk, fire, batch, sensor)),
                Check("the outcomes say which have rung", disk.has_rung and fire.has_rung and not door.has_rung),
                Check("every move came in time", all(moved)),
                Check(
                    "the fire rang before its first deadline, and not before its new one",
                    _between(first.get("fire"), started_at + SOON, started_at + MUCH_LATER),
                ),
                Check(
                    "the batch rang after its later deadline, and not before",
                    _between(first.get("nightly batch"), moved_at + LATER - 1),
                ),
                Check(
                    "the ignored alarm did not ring before its time",
                    _between(first.get("disk is full"), started_at + DEADLINE),
                ),
                Check(
                    "the sensor's alarm rang after its last heartbeat",
                    _between(first.get("sensor is silent"), last_beat_at + PATIENCE),
                ),
            ],
        )


def _rang_once(heard: dict[str, list[float]], *alarms: Alarm) -> bool:
    return {what: len(times) for what, times in heard.items()} == {alarm.what: 1 for alarm in alarms}


def _between(moment: float | None, earliest: float, latest: float = float("inf")) -> bool:
    return moment is not None and earliest <= moment < latest
