"""Two dozen people forgot their password. Three mailboxes say "later", one does not exist."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import multiq
from examples.app import app
from examples.stage import BaseStory, Check, Counts, Outcome

from .mail_server import MailServer
from .tasks import send_reset_mail

if TYPE_CHECKING:
    from typing import Self

    from examples.stage import Scene

BUSY = ["carla@busy.example", "cem@busy.example", "chen@busy.example"]
REFUSALS = 2
UNKNOWN = "nobody@gone.example"
PEOPLE = [f"user{number}@mail.example" for number in range(20)] + BUSY + [UNKNOWN]


class Story(BaseStory):
    title = "reset_mail"
    queue = "mail"

    def __enter__(self) -> Self:
        self._server = MailServer(busy=BUSY, refusals=REFUSALS, unknown=[UNKNOWN])
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def environment(self) -> dict[str, str]:
        return {"SHOP_SMTP": f"127.0.0.1:{self._server.port}"}

    def play(self, scene: Scene) -> Outcome:
        handles = send_reset_mail.enqueue_many(
            [
                (address, address.partition("@")[0].title(), f"https://shop.example/reset/{number}")
                for number, address in enumerate(PEOPLE)
            ]
        )
        scene.say(f"{len(handles)} mails enqueued in one round trip")

        refused = handles[PEOPLE.index(UNKNOWN)]
        scene.until(lambda: refused.state() is multiq.State.BURIED, "the unknown mailbox is given up")
        scene.say(f"buried: 550 no such mailbox ({UNKNOWN})")

        scene.until(lambda: scene.happened("retried") >= len(BUSY), "the busy mailboxes are tried again")
        scene.say(f"{len(BUSY)} busy mailboxes said 451: tried again after a backoff")

        first = handles[0].result(timeout=30)
        scene.say(f"the first mail's result: {first}")

        scene.follow(len(PEOPLE))
        wanted = Counter(address for address in PEOPLE if address != UNKNOWN)
        scene.say(f"{len(self._server.letters)} mails arrived, the busy ones at try {REFUSALS + 1}")
        return Outcome(
            self.title,
            expected=Counts(queued=24, delayed=0, retried=len(BUSY) * REFUSALS, cancelled=0, worked_off=23, buried=1),
            seen=scene.count(queued=len(handles), delayed=0, cancelled=0),
            checks=[
                Check("everybody got exactly one mail", Counter(str(m["To"]) for m in self._server.letters) == wanted),
                Check("each mail has a plain and an HTML form", all(m.is_multipart() for m in self._server.letters)),
                Check("the result of a job is its Message-ID", first == f"<{handles[0].id}@shop.example>"),
                Check("the errors before a success are kept", _errors(handles[PEOPLE.index(BUSY[0])]) == REFUSALS),
                Check("the failed job has its traceback", "SMTPRecipientsRefused" in _traceback(refused)),
                Check("the buried job says why", "550 5.1.1 no such mailbox" in str(refused.peek().reason)),
                Check("nothing else is left in the queue", app.queue("mail").stats().buried == 1 == _left()),
            ],
        )


def _errors(handle: multiq.JobHandle) -> int:
    outcome = handle.outcome()
    return -1 if outcome is None else len(outcome.errors)


def _traceback(handle: multiq.JobHandle) -> str:
    failure = handle.peek().failure
    return "" if failure is None else failure.traceback


def _left() -> int:
    stats = app.queue("mail").stats()
    return sum(count or 0 for count in (stats.ready, stats.delayed, stats.reserved, stats.buried))
