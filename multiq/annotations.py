"""Converts values to JSON and back by annotations, such as ``datetime`` or a dataclass.

An annotation is *rich* if JSON would lose the type of the annotated value. Values whose annotation is not rich are not
converted. An annotation cannot be used if its name is unknown at run time, or if its type is not supported. An
annotation that cannot be used is ignored, and ``Types.unusable`` has the reason.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import inspect
import sys
import types
import typing
import uuid
from collections import abc
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from .errors import PayloadInvalid
from .formatting import shown
from .json_check import check_json

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

_Kind: TypeAlias = Literal["plain", "rich", "unknown"]

_PLAIN: frozenset[Any] = frozenset(
    [str, int, float, bool, None, type(None), Any, object, list, dict, inspect.Parameter.empty]
)
_RICH = (dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID, decimal.Decimal, bytes, enum.Enum, msgspec.Struct)
_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection)
_DICTS = (dict, abc.Mapping, abc.MutableMapping)
_COLLECTIONS = (tuple, set, frozenset, abc.Set, abc.MutableSet)
_JSON_TYPES = {str, int, float, bool, type(None), list, dict, tuple}
_WITH_OFFSET = (dt.datetime, dt.time)
_DEEPEST = 20  # the deepest nesting that is examined, because an annotation may contain itself


class Mismatch(ValueError):
    """The annotation does not allow the value, or JSON would change the value."""


class Codec:
    """Converts the values of one rich annotation. Raises ``TypeError`` if msgspec does not support the annotation."""

    def __init__(self, annotation: Any) -> None:
        self._type = annotation
        self.name = inspect.formatannotation(annotation)
        msgspec.json.Decoder(annotation, dec_hook=_from_plain)  # checks the annotation

    def encode(self, value: Any, *, may_lose_types: bool = False) -> Any:
        """Convert *value* to JSON's types. A value that already has JSON's types is returned unchanged.

        *may_lose_types*: accept a value whose parts arrive as text, such as a date in a field of type ``Any``. Raises
        ``Mismatch``.
        """
        if _is_json(value):
            self.decode(_without_tuples(value))
            return value
        try:
            plain = to_builtins(value)
            check_json(plain)
            decoded = msgspec.convert(_without_tuples(plain), self._type, str_keys=True, dec_hook=_from_plain)
        except Exception as exc:  # code of the value's class may raise any error
            raise Mismatch(f"must be {self.name}, got {shown(value)}: {exc}") from exc
        if not _are_same(value, decoded, may_lose_types=may_lose_types):
            raise Mismatch(f"must be {self.name}, got {shown(value)}, which would arrive as {shown(decoded)}")
        return plain

    def encode_key(self, value: Any) -> Any:
        """``encode`` for a key. Equal values have equal keys: a set, and the form of a value in the envelope, too.
        Raises ``Mismatch``."""
        plain = self.encode(value)
        decoded = self.decode(_without_tuples(plain))
        try:
            return _in_sorted_sets(decoded, to_builtins(decoded))
        except Exception:  # noqa: BLE001 - for example, the JSON form of a model that hides a secret
            return plain

    def as_decoded(self, value: Any) -> Any:
        """Return the value that a worker decodes if a caller gives *value*. Raises ``Mismatch``."""
        return self.decode(_without_tuples(self.encode(value)))

    def encode_result(self, value: Any) -> Any:
        """``encode`` for a result. A result that is JSON is accepted even if the annotation does not allow the result,
        because the job has done its work. A value within the result may lose its type.

        Raises ``PayloadInvalid``.
        """
        if _is_json(value):
            return value
        try:
            return self.encode(value, may_lose_types=True)
        except Mismatch as exc:
            raise PayloadInvalid(f"the value {exc}") from exc

    def decode(self, plain: Any) -> Any:
        """Convert JSON's types to the annotation's type. Raises ``Mismatch``."""
        try:
            return msgspec.convert(plain, self._type, str_keys=True, dec_hook=_from_plain)
        except Exception as exc:  # as in encode
            raise Mismatch(f"must be {self.name}, got {shown(plain)}: {exc}") from exc


class Types:
    """The rich annotations of a function's parameters and of its return value."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        names = _globals_of(function)
        self.unusable: dict[str, str] = {}
        """The parameters whose annotation is not used. The key is the parameter's name, and the value is the reason."""
        self._by_position: list[Codec | None] = []
        self._by_name: dict[str, Codec] = {}
        self._plain_names: set[str] = set()
        self._more: Codec | None = None
        self._more_named: Codec | None = None
        for parameter in signature.parameters.values():
            codec = self._codec(parameter.name, parameter.annotation, names, or_none=parameter.default is None)
            self._add(parameter, codec)
        self.result = self._codec("return", signature.return_annotation, names)
        self.has_arguments = any(self._by_position) or bool(self._by_name or self._more or self._more_named)

    def convert(
        self,
        way: Callable[[Codec, Any], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        left_out: Container[int | str] = (),
    ) -> tuple[list[Any], dict[str, Any]]:
        """Convert the arguments that have a rich annotation, and return all arguments. *way* is a method of ``Codec``.

        *left_out*: the positions and names of arguments that are not converted. Raises ``Mismatch``.
        """
        positional, named = list(args), dict(kwargs)
        for at, value in enumerate(positional):
            codec = self._by_position[at] if at < len(self._by_position) else self._more
            if codec is not None and at not in left_out:
                positional[at] = _converted(way, codec, value, f"args[{at}]")
        for name, value in named.items():
            codec = self._by_name[name] if name in self._by_name else self._of_unknown(name)
            if codec is not None and name not in left_out:
                named[name] = _converted(way, codec, value, name)
        return positional, named

    def _of_unknown(self, name: str) -> Codec | None:
        return None if name in self._plain_names else self._more_named

    def _add(self, parameter: inspect.Parameter, codec: Codec | None) -> None:
        kind = parameter.kind
        if kind is parameter.VAR_POSITIONAL:
            self._more = codec
        elif kind is parameter.VAR_KEYWORD:
            self._more_named = codec
        else:
            if kind is not parameter.KEYWORD_ONLY:
                self._by_position.append(codec)
            if kind is not parameter.POSITIONAL_ONLY:
                if codec is not None:
                    self._by_name[parameter.name] = codec
                else:
                    self._plain_names.add(parameter.name)

    def _codec(self, name: str, annotation: Any, names: dict[str, Any], *, or_none: bool = False) -> Codec | None:
        try:
            found = _resolved(annotation, names)
            kind = _kind(found)
            if kind == "rich":
                return Codec(typing.Optional[found] if or_none else found)  # noqa: UP045 - a string does not support |
            if kind == "unknown":
                self.unusable[name] = f"{inspect.formatannotation(found)} is not supported"
        except Exception as exc:  # noqa: BLE001 - evaluating an annotation may run any code
            self.unusable[name] = str(exc)
        return None


def are_plain(annotations: Iterable[Any]) -> bool:
    """Return whether all annotations are certainly plain. An annotation that is text is not evaluated, so it counts as
    rich."""
    try:
        return all(_kind(annotation) == "plain" for annotation in annotations)
    except Exception:  # noqa: BLE001 - evaluating an annotation may run any code
        return False


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """Evaluate an annotation that is text, or that contains text. May raise any error, such as ``NameError``."""
    holder = types.FunctionType((lambda: None).__code__, names)
    holder.__annotations__ = {"it": annotation}
    return typing.get_type_hints(holder, include_extras=True)["it"]


def _globals_of(function: Callable[..., Any]) -> dict[str, Any]:
    inner: Any = inspect.unwrap(function)
    while not hasattr(inner, "__globals__") and hasattr(inner, "func"):  # functools.partial
        inner = inspect.unwrap(inner.func)
    if not hasattr(inner, "__globals__"):  # an object that can be called
        inner = vars(type(inner)).get("__call__", inner)
    found: dict[str, Any] | None = getattr(inner, "__globals__", None)
    return found if found is not None else vars(sys.modules[inner.__module__])


def _kind(annotation: Any, depth: int = 0) -> _Kind:
    if depth > _DEEPEST or isinstance(annotation, typing.TypeVar):
        return "plain"
    if isinstance(annotation, str | typing.ForwardRef):
        raise NameError(f"{annotation} is not evaluated yet")  # noqa: TRY004 - Python raises the same error
    if isinstance(annotation, abc.Hashable) and annotation in _PLAIN:
        return "plain"
    if isinstance(annotation, typing.NewType):
        return _kind(annotation.__supertype__, depth + 1)
    if hasattr(annotation, "__value__") and hasattr(annotation, "__type_params__"):  # type X = ...
        return _kind(annotation.__value__, depth + 1)
    if typing.get_origin(annotation) is None:
        return _kind_of_class(annotation, depth)
    return _kind_of_generic(typing.get_origin(annotation), typing.get_args(annotation), depth)


def _kind_of_generic(origin: Any, parts: Sequence[Any], depth: int) -> _Kind:
    if origin is typing.Literal:
        return "plain" if all(type(part) in {str, int, bool, type(None)} for part in parts) else "unknown"
    if origin is typing.Annotated:
        return _kind(parts[0], depth + 1)
    if origin in {typing.Union, types.UnionType} or origin in _LISTS or origin in _DICTS:
        return _all_of([_kind(part, depth + 1) for part in parts])
    if origin in _COLLECTIONS:
        return _all_of(["rich", *(_kind(part, depth + 1) for part in parts if part is not ...)])
    return _kind_of_class(origin, depth)


def _all_of(kinds: Sequence[_Kind]) -> _Kind:
    if "rich" not in kinds:
        return "plain"  # as without annotations
    return "unknown" if "unknown" in kinds else "rich"


def _kind_of_class(kind: Any, depth: int) -> _Kind:
    if not isinstance(kind, type):
        return "unknown"
    if typing.is_typeddict(kind):
        return _all_of([_kind(hint, depth + 1) for hint in typing.get_type_hints(kind).values()])
    if kind in _LISTS or kind in _DICTS:
        return "plain"
    if kind in _COLLECTIONS or issubclass(kind, _RICH) or dataclasses.is_dataclass(kind) or _is_model(kind):
        return "rich"
    if hasattr(kind, "__attrs_attrs__") or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return "rich"
    return "unknown"


def _is_model(kind: type) -> bool:
    """Whether *kind* is a model of pydantic 2. Does not import pydantic."""
    return hasattr(kind, "__pydantic_validator__") and hasattr(kind, "model_validate_json")


def _to_plain(value: Any) -> Any:
    """Convert values that msgspec does not convert: models of pydantic, and instances of subclasses of text, numbers
    and dates."""
    kind = type(value)
    if _is_model(kind):
        plain = value.model_dump(mode="json", by_alias=True, round_trip=True)
        if _from_plain(kind, plain) != value:  # the JSON lacks data: for example, pydantic hides a secret
            raise TypeError(f"the JSON of {kind.__qualname__} does not have all of its data")
        return plain
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, dt.datetime | dt.date):  # such as a subclass from a library that stops the clock in tests
        return value.isoformat()
    raise TypeError(f"{kind.__qualname__} is not JSON")


def _from_plain(kind: type, plain: Any) -> Any:
    if isinstance(kind, type) and _is_model(kind):
        # validate JSON, because a strict model accepts text as a date only in JSON
        return kind.model_validate_json(msgspec.json.encode(plain))  # type: ignore[attr-defined]
    raise TypeError(f"{kind} is not supported")


def to_builtins(value: Any) -> Any:
    """Convert a value to plain types, which can be sent as JSON. May raise any error, such as ``TypeError``."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_to_plain)


def _without_tuples(plain: Any) -> Any:
    """Replace tuples by lists, as JSON does."""
    if isinstance(plain, list | tuple):
        return [_without_tuples(each) for each in plain]
    if isinstance(plain, dict):
        return {key: _without_tuples(each) for key, each in plain.items()}
    return plain


def _is_json(value: Any) -> bool:
    try:
        check_json(value)
    except PayloadInvalid:
        return False
    return not isinstance(value, enum.Enum)


def _in_sorted_sets(value: Any, plain: Any) -> Any:
    """Return *plain*, which is *value* in plain types, with the members of each set of *value* in sorted order, and
    with all defaults.

    Equal sets may yield their members in different orders, and texts have other orders in other processes.
    """
    if isinstance(plain, dict) and isinstance(value, dict):
        pairs = zip(plain.items(), value.values(), strict=True)
        return {key: _in_sorted_sets(each, own) for (key, own), each in pairs}
    if isinstance(plain, dict):
        # msgspec leaves out the defaults of some objects: of a dataclass that it has decoded, for example
        members = _members_of(value)
        filled = {**{key: to_builtins(each) for key, each in members.items() if key not in plain}, **plain}
        return {key: _in_sorted_sets(members[key], own) if key in members else own for key, own in filled.items()}
    if isinstance(plain, list | tuple):
        if isinstance(value, set | frozenset):
            return sorted(map(_in_sorted_sets, value, plain), key=_in_name_order.encode)
        items = list(value if isinstance(value, list | tuple) else _members_of(value).values())
        first = len(plain) - len(items)  # the tag of a struct is in front of its fields
        return [*plain[:first], *map(_in_sorted_sets, items, plain[first:])]
    return plain


def _members_of(value: Any) -> dict[str, Any]:
    """Return the values of an object's fields by the names that the fields have in the envelope."""
    kind = type(value)
    if _is_model(kind):
        return {field.serialization_alias or name: getattr(value, name) for name, field in kind.model_fields.items()}
    names = _fields_of(kind)
    keys = getattr(kind, "__struct_encode_fields__", names)
    return {key: getattr(value, name) for key, name in zip(keys, names, strict=True)}


_in_name_order = msgspec.json.Encoder(order="sorted")
_in_order = msgspec.json.Encoder(enc_hook=_to_plain, order="deterministic")


def _are_same(value: Any, decoded: Any, *, may_lose_types: bool) -> bool:
    """Whether a value arrives unchanged. A tuple may arrive as a list, because JSON has no tuples."""
    try:
        if decoded == value:
            return True
    except Exception:  # noqa: BLE001, S110 - the value's class may raise any error
        pass
    try:
        return (
            _in_order.encode(value) == _in_order.encode(decoded)
            and (may_lose_types or _has_kept_types(value, decoded))
            and _has_whole_offsets(
                msgspec.to_builtins(value, str_keys=True, enc_hook=_to_plain, builtin_types=_WITH_OFFSET)
            )
        )
    except TypeError:  # a set whose members have no order
        return False


def _has_kept_types(value: Any, decoded: Any) -> bool:
    """Whether decoding gave each value its original type. A date in a field of type ``Any``, for example, becomes text.

    *value* and *decoded* must have the same JSON.
    """
    if type(value) in {list, tuple} or isinstance(value, dict | set | frozenset):
        return _has_kept_members(value, decoded)
    if type(value) in _JSON_TYPES or isinstance(value, str):  # perhaps the JSON form of another type
        return not isinstance(value, int) or not isinstance(decoded, str)  # a key
    if isinstance(value, bytearray | memoryview):
        return isinstance(decoded, bytes | bytearray | memoryview)
    if not isinstance(value, type(decoded)):
        return isinstance(value, int | float) and not isinstance(value, enum.Enum)
    return all(
        _has_kept_types(getattr(value, name, None), getattr(decoded, name, None)) for name in _fields_of(type(value))
    )


def _has_kept_members(value: Any, decoded: Any) -> bool:
    """``_has_kept_types`` for a list, a tuple, a dict or a set. *value* may also be the JSON form of a dataclass or a
    model."""
    if isinstance(decoded, set | frozenset):  # in any order
        return {type(each) for each in value} - _JSON_TYPES <= {type(each) for each in decoded}
    if isinstance(value, dict) and isinstance(decoded, dict):
        pairs = zip(value.items(), decoded.items(), strict=True)
        return all(_has_kept_types(mine, other) for pair in pairs for mine, other in zip(*pair, strict=True))
    if isinstance(value, dict):
        return all(_has_kept_types(each, getattr(decoded, key, each)) for key, each in value.items())
    if isinstance(value, list | tuple) and isinstance(decoded, list | tuple):
        return all(map(_has_kept_types, value, decoded))
    return isinstance(value, list | tuple)


def _fields_of(kind: Any) -> Sequence[str]:
    """Return the names of the fields of a dataclass, a struct, an attrs class or a named tuple."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if hasattr(kind, "__attrs_attrs__"):
        return [attribute.name for attribute in kind.__attrs_attrs__]
    names: Sequence[str] = getattr(kind, "__struct_fields__", ()) or getattr(kind, "_fields", ())
    return names


def _has_whole_offsets(plain: Any) -> bool:
    """Whether the UTC offsets of all datetimes are whole minutes. A UTC offset in the format of RFC 3339 has no
    seconds."""
    if isinstance(plain, _WITH_OFFSET):
        offset = plain.utcoffset()
        return not offset or offset % dt.timedelta(minutes=1) == dt.timedelta(0)
    if isinstance(plain, dict):
        return all(map(_has_whole_offsets, plain.values()))
    return not isinstance(plain, list | tuple) or all(map(_has_whole_offsets, plain))


def _converted(way: Callable[[Codec, Any], Any], codec: Codec, value: Any, where: str) -> Any:
    try:
        return way(codec, value)
    except Mismatch as exc:
        raise Mismatch(f"{where} {exc}") from exc.__cause__
