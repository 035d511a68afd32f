from __future__ import annotations

import pytest

from multiq import BackendUnavailable
from multiq.driverkit.replies import guarded


@guarded("find", "count", server="a shop")
class Shelf:
    def __init__(self) -> None:
        self.discarded = 0

    def find(self, item: str) -> str:
        return item.missing  # type: ignore[attr-defined, no-any-return]

    def count(self, item: str) -> int:
        return len(item)

    def _discard_connections(self) -> None:
        self.discarded += 1


@guarded("find", server="a shop")
class TwiceGuarded(Shelf): ...


@pytest.mark.parametrize("kind", [Shelf, TwiceGuarded])
def test_arguments_that_do_not_fit_are_no_malformed_reply(kind: type[Shelf]) -> None:
    shelf = kind()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'item'"):
        shelf.find()  # type: ignore[call-arg]
    assert shelf.discarded == 0


def test_error_of_a_parser_is_a_malformed_reply() -> None:
    shelf = Shelf()
    with pytest.raises(BackendUnavailable, match="TypeError: object of type 'int' has no len"):
        shelf.count(7)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable, match="AttributeError"):
        shelf.find("teapot")
    assert shelf.discarded == 2
