"""The mail itself: plain text and HTML from one set of values."""

from __future__ import annotations

import html
from email.message import EmailMessage
from string import Template

SENDER = "Shop <no-reply@shop.example>"

PLAIN = Template("""\
Hello $name,

somebody, hopefully you, wants a new password for $address. Choose one here within an hour:

    $link

If it was not you, do nothing: the old password stays.
""")

HTML = Template("""\
<p>Hello $name,</p>
<p>somebody, hopefully you, wants a new password for <b>$address</b>.</p>
<p><a href="$link">Choose one here</a> within an hour.</p>
<p>If it was not you, do nothing: the old password stays.</p>
""")


def reset_letter(address: str, name: str, link: str, message_id: str) -> EmailMessage:
    """A mail as plain text and as HTML. Values that users have typed are escaped."""
    values = {"name": name, "address": address, "link": link}
    letter = EmailMessage()
    letter["From"] = SENDER
    letter["To"] = address
    letter["Subject"] = "Your new password"
    letter["Message-ID"] = message_id
    letter.set_content(PLAIN.substitute(values))
    letter.add_alternative(HTML.substitute({key: html.escape(value) for key, value in values.items()}), subtype="html")
    return letter
