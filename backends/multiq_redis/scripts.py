"""Loads each Lua script, ``lua/<verb>.lua``, once, and expands its includes.

A line ``--- include <name>`` is replaced by ``lua/include/<name>.lua``. The first line, ``--- flags: ...``, becomes the
shebang that Redis 7.0 introduced. Redis 6.2 has no shebang. With Redis 6.2, the first write of a script decides whether
the script may run at maxmemory. A line ``--- before 7.0:`` adds a harmless first write. With this write, the script may
run.
"""

from __future__ import annotations

import functools
import hashlib
import pkgutil
import re
from typing import NamedTuple

_FLAGS = re.compile(r"--- flags: (\S+)\n")
_INCLUDE = re.compile(r"^--- include (\w+)\n", re.MULTILINE)
_BEFORE_7 = re.compile(r"^--- before 7\.0: (.*)$", re.MULTILINE)
_KEYS = re.compile(r"^-- KEYS  (.*?)^-- (?:ARGV|=>)", re.MULTILINE | re.DOTALL)
_KEY = re.compile(r"\d+ ([a-z_' ]+?)(?:   |\s*$)", re.MULTILINE)

STATES_SET = "the state's set"
"""In a script's header, this is the name of the sorted set that the caller chooses by state."""


class Script(NamedTuple):
    """One Lua script. The keys' names are in the order in which the script takes them."""

    verb: str
    text: str
    sha: str
    keys: tuple[str, ...]
    is_numbered: bool
    """Whether the script stores the last call of each client."""


@functools.cache
def script(verb: str, *, before_7: bool = False) -> Script:
    """Return one script, for Redis before 7.0 if *before_7* is true."""
    source = _read(verb)
    flags = _FLAGS.match(source)
    names = _KEYS.search(source)
    assert flags is not None and names is not None, verb  # noqa: PT018, S101 - the files are part of this package
    body = _included(source[flags.end() :])
    shebang = "#!lua\n" if flags[1] == "none" else f"#!lua flags={flags[1]}\n"
    text = _BEFORE_7.sub("" if flags[1] == "none" else r"\1", body) if before_7 else shebang + body
    keys = tuple(_KEY.findall(names[1].replace("\n--", "\n")))
    digest = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - Redis names scripts so
    return Script(verb, text, digest, keys, keys[0] == "call")


def _included(text: str) -> str:
    return _INCLUDE.sub(lambda found: _read(f"include/{found[1]}"), text)


def _read(name: str) -> str:
    data = pkgutil.get_data(__package__, f"lua/{name}.lua")
    assert data is not None  # noqa: S101 - the files are part of this package
    return data.decode()
