"""The optional parts of a backend: what a driver declares and what it inherits from must agree."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest
from multiq_folder import FolderBackend

from multiq.backend import OPTIONAL_PARTS, Backend, Capabilities, Gap, Pausing, State
from multiq.backend.base import methods_of
from multiq.backend.memory import MemoryBackend
from multiq.backend.paired.needs import WITH_STORE
from multiq.errors import DriverInvalid, MultiqError, Unsupported

LACKS = Gap("not done", "this driver has not got it")


def changed(**claims: Any) -> Capabilities:
    return msgspec.structs.replace(FolderBackend.declared, **claims)


@pytest.mark.parametrize("power", OPTIONAL_PARTS)
def test_a_declared_part_without_its_methods_is_refused_when_the_class_is_made(power: str) -> None:
    methods = ", ".join(methods_of(power))
    with pytest.raises(DriverInvalid, match=f"Lying declares {power} and does not implement {methods}: inherit from"):
        type("Lying", (FolderBackend,), {"declared": changed(**{power: True})})


@pytest.mark.parametrize("power", OPTIONAL_PARTS)
def test_a_part_that_is_declared_as_a_gap_is_refused_when_the_class_is_made(power: str) -> None:
    part = OPTIONAL_PARTS[power]
    with pytest.raises(DriverInvalid, match=f"Lying inherits from multiq.backend.{part.__name__} and declares {power}"):
        type("Lying", (part,), {"declared": changed(**{power: LACKS})})
    assert issubclass(DriverInvalid, MultiqError)


def test_a_part_that_is_inherited_must_be_implemented() -> None:
    class Halfway(FolderBackend, Pausing):
        declared: ClassVar[Capabilities] = changed(pausing=True)

        def pause(self, queue: str, seconds: float) -> None:
            """Nothing to do."""

    with pytest.raises(TypeError, match=r"abstract method '?resume"):
        Halfway("/nowhere")  # type: ignore[abstract]


def test_a_driver_made_before_there_were_parts_goes_on_working() -> None:
    # Given a driver that inherits from Backend alone, implements everything, and declares no part
    methods = {name: getattr(MemoryBackend, name) for power in OPTIONAL_PARTS for name in methods_of(power)}
    older = type("Older", (FolderBackend,), {**methods, "declared": _without_parts()})
    # Then it has all parts that every driver had to have
    assert issubclass(older, Backend)
    assert [power for power in OPTIONAL_PARTS if older.declared.claim(power)] == [
        "inspection", "management", "pausing", "purging",
    ]  # fmt: skip


def _without_parts() -> Capabilities:
    fields = {name: getattr(FolderBackend.declared, name) for name in Capabilities.__struct_fields__}
    new = {*OPTIONAL_PARTS, "priorities", "exact_counts", "longest_delay", "memos", "one_step_everywhere"}
    return Capabilities(**{name: value for name, value in fields.items() if name not in new})


@pytest.mark.parametrize("power", sorted(OPTIONAL_PARTS.keys() - {"diagnosis"}))
def test_a_missing_part_is_refused_with_kind_reason_and_the_backends_that_have_it(power: str, tmp_path: Any) -> None:
    backend = FolderBackend(tmp_path)
    calls: dict[str, tuple[Any, ...]] = {
        "peek": ("q", "1"), "jobs": ("q", State.READY), "delete": ("q", "1"), "reschedule": ("q", "1", 1.0),
        "kick_job": ("q", "1"), "pause": ("q", 1.0), "resume": ("q",), "purge": ("q", [State.READY]), "schema": (),
        "outcomes": ("q", ["1"]), "history": ("q",), "forget": ("q",), "carry_out": ([],), "relay": (["q"],),
        "note": ("q", "key"), "notes": ("q",), "now": ("q",), "limits": ("q",),
    }  # fmt: skip
    for method in methods_of(power):
        with pytest.raises(Unsupported) as refusal:
            getattr(backend, method)(*calls[method])
        gap = backend.declared.claim(power)
        assert isinstance(gap, Gap)
        assert refusal.value.capability == power
        with_store = "; a store beside the backend adds this capability: ?store=sqlite:///state.db in the URL"
        assert refusal.value.reason == f"{gap.kind}: {gap.reason}{with_store if power in WITH_STORE else ''}"
        assert ("mysql" if power == "schema" else "memory") in refusal.value.others
