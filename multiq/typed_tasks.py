"""Tasks with annotations that decide how arguments and results are encoded. Tasks whose annotations are plain JSON
types do not use this module."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from .annotations import Codec, Mismatch, Types
from .errors import ArgumentsInvalid, EnqueueUncertain, PayloadInvalid
from .job import JobHandle
from .task import Task, places_of_results

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from .backend import Backend, Gate, UniqueKey
    from .call_options import CallOptions
    from .envelope import Envelope, FlowPart
    from .limits import Limit
    from .outcome import JobOutcome
    from .unique import Unique

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", JobHandle, list[JobHandle])


class TypedTask(Task[P, R]):
    """A task with annotations that are not plain JSON types.

    The annotations are read at the first use, because an annotation may name a class that is defined after the
    function.
    """

    @cached_property
    def types(self) -> Types:
        return Types(self.function, self.signature)

    @property
    def returns(self) -> Codec | None:
        return self.types.result

    def accept(self, envelope: Envelope) -> None:
        super().accept(envelope)
        if envelope.flow is None:
            self.decode_arguments(envelope)

    def decode_arguments(self, envelope: Envelope) -> None:
        if self.types.has_arguments:
            try:
                envelope.args, envelope.kwargs = self.types.convert(Codec.decode, envelope.args, envelope.kwargs)
            except Mismatch as exc:
                raise ArgumentsInvalid(f"task {self.name} cannot be called like this: {exc}") from exc

    def _encode(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: CallOptions,
        max_body: int,
        flow: FlowPart | None = None,
    ) -> bytes:
        types = self.types
        if types.has_arguments:
            self.check_arguments(args, kwargs)
            try:
                args, kwargs = types.convert(Codec.encode, args, kwargs, places_of_results(flow))
            except Mismatch as exc:
                raise ArgumentsInvalid(f"task {self.name} cannot be called like this: {exc}") from exc
        try:
            return super()._encode(args, kwargs, options, max_body, flow)
        except PayloadInvalid as exc:
            for name, reason in types.unusable.items():
                exc.add_note(f"the annotation of {name} is not used: {reason}")
            raise

    def _gates(
        self, limits: Sequence[Limit], args: Sequence[Any], kwargs: Mapping[str, Any], results: Container[int | str]
    ) -> tuple[Gate, ...]:
        """Make the keys of the decoded arguments, so that a value and its form in the envelope have the same key."""
        types = self.types
        if types.has_arguments and any(limit.key for limit in limits):
            try:
                args, kwargs = types.convert(Codec.as_decoded, args, kwargs, results)
            except Mismatch as exc:
                raise ArgumentsInvalid(f"task {self.name} cannot be called like this: {exc}") from exc
        return super()._gates(limits, args, kwargs, results)

    def _unique_key(self, unique: Unique, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UniqueKey:
        types = self.types
        if not types.has_arguments:
            return super()._unique_key(unique, args, kwargs)
        encode = partial(types.convert, Codec.encode_key)
        try:
            return unique.key_of(self.name, self.signature, args, kwargs, encode)
        except Mismatch as exc:
            raise ArgumentsInvalid(f"task {self.name} cannot be called like this: {exc}") from exc

    def _send(
        self,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        options: CallOptions,
        ids: Iterable[str] | None,
    ) -> list[JobHandle]:
        return self._typed(lambda: super(TypedTask, self)._send(calls, options, ids))

    def _send_one(self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> JobHandle:
        return self._typed(lambda: super(TypedTask, self)._send_one(args, kwargs, options))

    async def _asend(
        self,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        options: CallOptions,
        ids: Iterable[str] | None,
    ) -> list[JobHandle]:
        try:
            return self._decoding(await super()._asend(calls, options, ids))
        except EnqueueUncertain as error:
            self._type_repeat(error)
            raise

    async def _asend_one(self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> JobHandle:
        try:
            return self._decoding(await super()._asend_one(args, kwargs, options))
        except EnqueueUncertain as error:
            self._type_repeat(error)
            raise

    def _typed(self, send: Callable[[], H]) -> H:
        """Call *send*. Return the handles from *send*, changed so that the handles decode results by the annotation."""
        try:
            return self._decoding(send())
        except EnqueueUncertain as error:
            self._type_repeat(error)
            raise

    def _decoding(self, sent: H) -> H:
        codec = self.returns
        if codec is None:
            return sent
        if isinstance(sent, JobHandle):
            return TypedHandle.of(sent, self.app.backend, codec)
        return [TypedHandle.of(handle, self.app.backend, codec) for handle in sent]

    def _type_repeat(self, error: EnqueueUncertain) -> None:
        if self.returns is not None:
            error.repeat_by(_typed_repeat(self._typed, error.repeated))


def _typed_repeat(typed: Callable[[Callable[[], H]], H], again: Callable[[], H] | None) -> Callable[[], H] | None:
    return None if again is None else lambda: typed(again)


class TypedHandle(JobHandle):
    """The handle of a job whose result is decoded by the annotation of the job's task."""

    __slots__ = ("_codec", "was_new")

    def __init__(self, backend: Backend, queue: str, job_id: str, codec: Codec, *, was_new: bool = True) -> None:
        super().__init__(backend, queue, job_id)
        self._codec = codec
        self.was_new = was_new

    @classmethod
    def of(cls, handle: JobHandle, backend: Backend, codec: Codec) -> TypedHandle:
        return cls(backend, handle.queue, handle.id, codec, was_new=handle.was_new)

    def result(self, timeout: float | None = None) -> Any:
        return self._decoded(super().result(timeout))

    async def aresult(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - as in result
        return self._decoded(await super().aresult(timeout))

    def outcome(self) -> JobOutcome | None:
        outcome = super().outcome()
        if outcome is None or outcome.omitted is not None:
            return outcome
        return msgspec.structs.replace(outcome, value=self._decoded(outcome.value))

    def _decoded(self, plain: Any) -> Any:
        try:
            return self._codec.decode(plain)
        except Mismatch as exc:
            raise PayloadInvalid(
                f"the result of job {self.id} {exc}; app.job(queue, id).result() returns it as plain JSON"
            ) from exc
