"""The local server process: its command-line options, and the addresses on which it listens, from ``/proc``."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PROC = Path("/proc")

_WITH_ARGUMENT = frozenset("bflpuzs")  # the options of beanstalkd that have an argument
_LISTENS = "0A"  # the state of a socket that listens, as /proc/net/tcp writes it


def options_of_process(pid: int, hostname: str | None) -> dict[str, str] | None:
    """Return the options of a beanstalkd's command line, ``{"b": "/var/lib/b", "F": ""}``; None if that cannot be read.

    *hostname* is the name that the server reports for its machine. If this machine has another name, the server runs
    elsewhere, in a container for instance, and its process id means nothing here.
    """
    if hostname not in {None, socket.gethostname()}:
        return None
    try:
        words = (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return None
    return options_of(words[1:-1]) if Path(words[0]).name.startswith("beanstalkd") else None


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Parse options as beanstalkd does, in the order of their last occurrence: ``-Vf0 -b /var/lib``."""
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            continue
        letters = word[1:]
        for at, letter in enumerate(letters):
            found.pop(letter, None)
            if letter in _WITH_ARGUMENT:
                found[letter] = letters[at + 1 :] or next(rest, "")
                break
            found[letter] = ""
    return found


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening_on(port: int) -> list[str]:
    """Return the addresses of this machine with a listener on *port*; none if the system does not list them."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            address, _, its_port = local.partition(":")
            if state == _LISTENS and int(its_port, 16) == port:
                found.append(_address(address))
    return found


def _address(text: str) -> str:
    """Decode an address of /proc/net/tcp: words of four bytes, each in the machine's byte order."""
    words = (bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
