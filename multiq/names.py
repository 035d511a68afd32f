"""The one rule for names of queues and tasks, checked once, wherever a name comes in.

It is the strictest common ground of all stores: no name needs escaping in a beanstalkd command, a Redis hash
tag, an SQL value, a URL or a shell.
"""

from __future__ import annotations

import re

from .errors import NameInvalid

RULE = "1 to 128 letters, digits, '_', '.' or '-' (ASCII), beginning with a letter, digit or '_'"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_known: set[str] = set()  # names seen to be good: the check is on the path of every enqueue
_KNOWN_AT_MOST = 10_000


def check_name(name: object, kind: str = "queue") -> str:
    """Return *name* if it is a legal name of a *kind*, else raise ``NameInvalid``."""
    if type(name) is str:
        if name in _known:
            return name
        if _NAME.fullmatch(name):
            if len(_known) < _KNOWN_AT_MOST:
                _known.add(name)
            return name
    shown = ascii(name)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise NameInvalid(f"{shown} is no {kind} name: a name has {RULE}")
