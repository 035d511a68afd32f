"""A call of a task that is not enqueued yet: ``task.s(1, 2)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiq.errors import ArgumentsInvalid

if TYPE_CHECKING:
    from multiq.call_options import CallOptions
    from multiq.task import Task


class Signature:
    """A task with arguments and options, as a part of a chain, group, batch or flow. Immutable.

    In a chain, a signature may lack its first argument. The job then gets the result of the step before it.
    """

    __slots__ = ("args", "kwargs", "options", "task")

    def __init__(
        self, task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.options = options

    def lacks_argument(self) -> bool:
        """Return whether the task takes one more argument in front of the arguments of this call. Raises
        ``ArgumentsInvalid``."""
        try:
            self.task.check_arguments(self.args, self.kwargs)
        except ArgumentsInvalid as exc:
            try:
                self.task.check_arguments((None, *self.args), self.kwargs)
            except ArgumentsInvalid:
                raise exc from None
            return True
        return False

    def __repr__(self) -> str:
        parts = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.task.name}.s({', '.join(parts)})"
