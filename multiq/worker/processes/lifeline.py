"""The lifeline: a pipe that closes when the supervisor ends, even if it is killed. The children then end themselves.

The supervisor opens the pipe, and only the supervisor keeps its writing end. Nothing is written to the pipe, so a
readable pipe is a cut lifeline.

- A child waits for signals and for the end of its lifeline together (``SignalInbox.wait``). A cut lifeline counts as
  ``CUT_COUNTS_AS``, so the child stops as if its supervisor had stopped it.
- The sidecar polls the lifeline, and kills children that do not end in time (``Sidecar.run``).
- In a reload, the re-executed program keeps the pipe open (``hand_on``), and closes it when it takes over
  (``PreviousGeneration.take``).
"""

from __future__ import annotations

import os
import select
import signal

CUT_COUNTS_AS = signal.SIGTERM
"""The signal that a child's inbox receives when the lifeline is cut."""


class Lifeline:
    """The supervisor creates the lifeline. Its forked processes inherit both ends, and let go of the writing end."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the lifeline is cut, for ``poll``."""
        return self._reader

    def is_cut(self) -> bool:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        return bool(poll.poll(0))

    def let_go(self) -> None:
        """Close this process's copy of the writing end. The lifeline is cut when no process has a copy."""
        os.close(self._writer)

    def hand_on(self) -> int:
        """Keep the writing end open in the program that this process executes next. Returns its descriptor."""
        os.set_inheritable(self._writer, True)
        return self._writer

    def take_back(self) -> None:
        """Undo ``hand_on``, because no other program was executed."""
        os.set_inheritable(self._writer, False)

    def close(self) -> None:
        """Close the reading end."""
        os.close(self._reader)
