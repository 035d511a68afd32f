"""The task that sends a mail, with its retry policy. A final refusal is not retried."""

from __future__ import annotations

import os
import smtplib

import multiq
from examples.app import app

from .letter import reset_letter

#: host:port of the mail server
SMTP_SERVER = os.environ.get("SHOP_SMTP", "localhost:25")

#: seconds after the first failure; a shop would begin with a minute (``first=60``) and go up to an hour
FIRST_WAIT = float(os.environ.get("SHOP_MAIL_FIRST_WAIT", "60"))


@app.task(
    queue="mail", ttr=30, max_attempts=6, backoff=multiq.exponential(first=FIRST_WAIT, base=2, cap=3600), keep=3600
)
def send_reset_mail(address: str, name: str, link: str) -> str:
    """Deliver one mail, and return its Message-ID, which is kept for an hour.

    A refusal for now (4xx) is raised and retried. One for good (5xx) is buried with its reason.
    """
    # A worker may die after the server took the mail and before the job is acked, and then the mail is sent
    # again. The job's id as Message-ID lets mail servers recognise the second one.
    message_id = f"<{multiq.current_job().id}@shop.example>"
    letter = reset_letter(address, name, link, message_id=message_id)
    host, _, port = SMTP_SERVER.rpartition(":")
    try:
        with smtplib.SMTP(host, int(port), timeout=10) as server:
            server.send_message(letter)
    except smtplib.SMTPRecipientsRefused as refused:
        code, said = refused.recipients[address]
        text = f"{code} {said.decode(errors='replace')}"
        if code >= 500:
            raise multiq.BuryJob(f"{address} was refused for good: {text}") from refused
        raise ConnectionError(f"{address} was put off: {text}") from refused
    return message_id
