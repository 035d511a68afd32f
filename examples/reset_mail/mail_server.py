"""A real SMTP server on a free local port, with the temporary and final refusals of real ones."""

from __future__ import annotations

import asyncio
import email
import email.policy
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiosmtpd.smtp import SMTP, Envelope

if TYPE_CHECKING:
    from collections.abc import Collection
    from email.message import EmailMessage
    from typing import Self


class MailServer:
    """Runs while the ``with`` block lasts.

    Addresses in *busy* are answered 451 ("later") for their first *refusals* attempts, as a greylisting server does;
    those in *unknown* always 550 ("never").
    """

    def __init__(self, *, busy: Collection[str], refusals: int, unknown: Collection[str]) -> None:
        self.letters: list[EmailMessage] = []
        self.tries: Counter[str] = Counter()
        self.port = 0
        self._busy = busy
        self._refusals = refusals
        self._unknown = unknown
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="smtp", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._is_up.wait(10):
            raise RuntimeError("the local mail server did not come up within 10 s")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, _server: Any, _session: Any, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        self.tries[address] += 1
        if address in self._unknown:
            return "550 5.1.1 no such mailbox"
        if address in self._busy and self.tries[address] <= self._refusals:
            return "451 4.7.1 greylisted, please try again later"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Envelope) -> str:  # noqa: N802
        assert isinstance(envelope.content, bytes)  # noqa: S101 - what aiosmtpd promises
        self.letters.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
        return "250 OK"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        server = await self._loop.create_server(lambda: SMTP(self, loop=self._loop), "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._done.wait()
        server.close()
