"""Reads from ``/proc`` a local server's command-line options, and the addresses on which the server listens."""

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
    """Return the options of a beanstalkd's command line, like ``{"b": "/var/lib/b", "F": ""}``. None: the options
    cannot be read.

    *hostname* is the name that the server reports for its machine. If this machine has another name, the server runs
    elsewhere, for instance in a container. The server's process id is then not valid on this machine.
    """
    if hostname not in {None, socket.gethostname()}:
        return None
    try:
        words = (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return None
    return options_of(words[1:-1]) if Path(words[0]).name.startswith("beanstalkd") else None


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Parse options like ``-Vf0 -b /var/lib``, in the same way as beanstalkd. The options are in the order of their
    last occurrences."""
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
    """Return this machine's addresses with a listener on *port*. Empty if the system does not list listeners."""
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
    """Decode an address of /proc/net/tcp. The address has words of four bytes in the machine's byte order."""
    words = (bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
