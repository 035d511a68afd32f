"""Callers: each makes one call at a time, over connections of its own, and can repeat a call without a second effect.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
one effect per call   a number per call, which the script remembers with its answer (see      one GET, one SET
                      lua/include/once.lua); a call whose reply was lost is repeated once,
                      at once, on a new connection
a deadline            one for the whole call, repetitions, redirections and waiting included  none
scripts that vanish   after NOSCRIPT the script's text is sent instead of its digest          one round trip, once
safe forks            a child forgets its parent's connections and takes names of its own     one comparison
====================  ======================================================================  =======================
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from multiq.driverkit.fork import forks
from multiq.errors import BackendError

from . import keys
from .call_retry import Tries
from .connection import pack
from .errors import FAILURES, explain
from .pipeline import call_together
from .scripts import STATES_SET, script
from .topology import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.driverkit.net import Address

    from .connection import Wire, Word
    from .scripts import Script
    from .topology import Servers

_SLOT_SIZE = 7  # random bytes that tell a caller from all others; 5 more for the number make a token
_FIRST_NUMBER = 10**11  # all numbers have twelve digits: lua/enqueue_one.lua compares them as text
_FEW_IDLE = 8  # callers that are kept for the next thread in any case
_IDLE_FOR = 30.0  # seconds that more of them are kept
_MOST_HEADS = 1000  # prepared beginnings of commands; somebody may have a queue per customer


class Call(NamedTuple):
    """One script to run for one line."""

    verb: str
    line: str
    arguments: tuple[Word, ...] = ()
    """Its number first, if the script is numbered."""
    state: str | None = None
    """Names the set of those scripts that take one of several."""
    also: tuple[str, ...] = ()
    """More lines on the same server, of which the script takes the same keys."""


class Caller:
    """One thread's calls, one after the other."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self.servers = servers
        self._prefix = prefix
        self._start_over()

        self.idle_since = 0.0
        """When it was last put back beside as many as are kept in any case; monotonic."""

    def _start_over(self) -> None:
        """In a forked child, too: sharing the parent's name or connections would mix up their calls."""
        self.slot = os.urandom(_SLOT_SIZE)
        self._name = self.slot.hex()
        self._number = _FIRST_NUMBER
        self._generation = forks.generation
        self._wires: dict[Address, Wire] = {}

    # --- calls ---

    def next_number(self) -> int:
        """The number of the next call."""
        if self._generation != forks.generation:
            self._start_over()
        self._number += 1
        return self._number

    def token(self, number: int) -> bytes:
        """What the leases of a call are known by: no other call, of whomever, has the same."""
        return self.slot + number.to_bytes(5, "big")

    def call(
        self,
        verb: str,
        line: str,
        arguments: Sequence[Word] = (),
        *,
        state: str | None = None,
        number: int | None = None,
    ) -> Any:
        """Run a verb's script for a line and return its reply.

        With *number* an earlier call is repeated that may or may not have arrived. Raises ``BackendError``.
        """
        return self.perform(self.new_call(verb, line, arguments, state=state, number=number))

    def new_call(
        self,
        verb: str,
        line: str,
        arguments: Sequence[Word] = (),
        *,
        state: str | None = None,
        number: int | None = None,
    ) -> Call:
        """A call with the next number, or with that of an earlier one."""
        if number is None:
            number = self.next_number()
        if script(verb).is_numbered:
            return Call(verb, line, (number, *arguments), state)
        return Call(verb, line, tuple(arguments), state)

    def perform(self, call: Call, deadline: float | None = None) -> Any:
        """The reply to a call, which may have been made before. Raises ``BackendError``."""
        servers = self.servers
        if deadline is None:
            deadline = time.monotonic() + servers.timeout
        address = wire = None
        try:
            address = servers.address(call.line, deadline)
            wire = self._wires.get(address)
            if wire is None or not wire.is_free or self._generation != forks.generation:
                wire = None  # nothing was sent if there is no other
                wire = self.wire_to(address, deadline)
            return wire.ask(self.packed(call, wire), servers.one_try(deadline) if servers.has_others else deadline)
        except (hiredis.ReplyError, *FAILURES) as exc:
            tries = Tries(self, call, deadline, address, wire)
            tries.consider(exc)
        return tries.answer()

    def packed(self, call: Call, wire: Wire, *, with_text: bool = False) -> bytes:
        """A call as it is sent."""
        verb, line, arguments, state, also = call
        if with_text:
            wanted = script(verb, before_7=wire.is_before_7)
            names = self._names(call, wanted)
            return pack(("EVAL", wanted.text, len(names), *names, *arguments))
        words, head = wire.heads.get((verb, line, state, also)) or self._new_head(call, wire)
        packed = pack(arguments)
        return b"*%d\r\n%b%b" % (words + len(arguments), head, packed[packed.index(b"\n") + 1 :])

    def command(self, address: Address, *words: Word) -> Any:
        """One command to one server, tried once, on a new connection if an idle one turns out to be dead."""
        deadline = time.monotonic() + self.servers.timeout
        try:
            try:
                return self.wire_to(address, deadline).ask(pack(words), deadline)
            except ConnectionError:
                return self.wire_to(address, deadline).ask(pack(words), deadline)
        except (*FAILURES, hiredis.ReplyError) as exc:
            raise explain(exc, shown(address), self.servers.timeout) from exc

    def all_addresses(self) -> Sequence[Address]:
        """All servers that hold queues. Raises ``BackendError``."""
        return self.servers.all_addresses(time.monotonic() + self.servers.timeout)

    def wire(self, line: str, deadline: float) -> Wire:
        """The connection to a line's server, for what is no call.

        Raises ``BackendError``, ``OSError``, ``hiredis.ReplyError``.
        """
        return self.wire_to(self.servers.address(line, deadline), deadline)

    def close(self) -> None:
        """Close all connections; they open again when they are needed."""
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.close()

    def hang_up(self) -> None:
        """The same from another thread. The connections of the process that we were forked off from are left alone."""
        if self._generation != forks.generation:
            return
        for wire in tuple(self._wires.values()):
            wire.hang_up()

    # --- how ---

    def abandon(self, address: Address | None) -> None:
        """Close the connection to a server with which something was wrong."""
        wire = self._wires.pop(address, None) if address is not None else None
        if wire is not None:
            wire.close()
        self.servers.suspect(address)

    def wire_to(self, address: Address, deadline: float) -> Wire:
        """The connection to a server. Raises ``OSError``, ``hiredis.ReplyError``, ``BackendUnavailable``."""
        if self._generation != forks.generation:
            self._start_over()
        wire = self._wires.get(address)
        if wire is not None and not wire.is_free:
            wire.close()
            wire = None
        if wire is None:
            wire = self._wires[address] = self.servers.open(address, deadline)
        return wire

    def _new_head(self, call: Call, wire: Wire) -> tuple[int, bytes]:
        """EVALSHA, the digest and the keys of a script: how many words these are, and how they are sent."""
        if len(wire.heads) >= _MOST_HEADS:
            wire.heads.clear()
        wanted = script(call.verb, before_7=wire.is_before_7)
        names = self._names(call, wanted)
        packed = pack(("EVALSHA", wanted.sha, len(names), *names))
        head = wire.heads[call.verb, call.line, call.state, call.also] = (
            3 + len(names),
            packed[packed.index(b"\n") + 1 :],
        )
        return head

    def _names(self, call: Call, wanted: Script) -> list[str]:
        return [self._key(name, line, call.state) for line in (call.line, *call.also) for name in wanted.keys]

    def _key(self, name: str, line: str, state: str | None) -> str:
        base = keys.base(self._prefix, line)
        if name == "call":
            return keys.call(base, self._name)
        if name == STATES_SET:
            assert state is not None  # noqa: S101 - told by the verb
            name = state
        return keys.BY_NAME[name](base)


class Callers:
    """The callers of one backend: idle ones are lent to whichever thread needs one, the last used first."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self.servers = servers
        self.prefix = prefix
        self._idle: list[Caller] = []  # append and pop are atomic
        self._lent: weakref.WeakKeyDictionary[Caller, None] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Caller]:
        """A caller for a moment."""
        caller = self._take()
        try:
            yield caller
        finally:
            self._put_back(caller)

    def call(self, verb: str, line: str, arguments: Sequence[Word] = (), *, state: str | None = None) -> Any:
        """One call by whichever caller is free, for what it is in ``Caller.call``."""
        caller = self._take()
        try:
            return caller.call(verb, line, arguments, state=state)
        finally:
            self._put_back(caller)

    def call_each(
        self, verb: str, lines: Sequence[str], arguments: Sequence[Word] = (), *, state: str | None = None
    ) -> list[Any]:
        """The same call for several lines, in one round trip.

        Raises the first ``BackendError``, if there is one, when all are done.
        """
        if len(lines) == 1:
            return [self.call(verb, lines[0], arguments, state=state)]
        with self.borrowed() as caller:
            replies = call_together(caller, [caller.new_call(verb, line, arguments, state=state) for line in lines])
        for reply in replies:
            if isinstance(reply, BackendError):
                raise reply
        return replies

    def own(self) -> Caller:
        """A caller to keep."""
        caller = Caller(self.servers, self.prefix)
        self._lent[caller] = None
        return caller

    def close(self) -> None:
        """Close all connections, those of callers that others keep included."""
        self.servers.close()
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        for reference in self._lent.keyrefs():  # a copy, as other threads may lend meanwhile
            caller = reference()
            if caller is not None:
                caller.hang_up()

    def _take(self) -> Caller:
        try:
            return self._idle.pop()
        except IndexError:
            return Caller(self.servers, self.prefix)

    def _put_back(self, caller: Caller) -> None:
        if len(self._idle) >= _FEW_IDLE:
            self._thin_out(caller)
        self._idle.append(caller)

    def _thin_out(self, caller: Caller) -> None:
        """Of those beside the few the first was idle for longest, unless another thread is here, too."""
        caller.idle_since = now = time.monotonic()
        with contextlib.suppress(IndexError):
            if now - self._idle[_FEW_IDLE].idle_since > _IDLE_FOR:
                self._idle.pop(_FEW_IDLE).close()
