"""What a worker process holds, as others read it: while it works, and after its death."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Lease
from multiq.worker.ledger import ACKED, ENDED, NEVER, WAITING, Held, Ledger, LedgerReader

if TYPE_CHECKING:
    from pathlib import Path


def lease(number: int, queue: str = "q") -> Lease:
    return Lease(queue, f"id-{number}", f"token-{number}", b"body", 1024, 60.0, 1, 0, 0, 0.0)


def marks(path: Path) -> list[float]:
    return [entry.mark for entry in LedgerReader(path).entries()]


@pytest.fixture(params=[True, False], ids=["in turn", "side by side"])
def in_turn(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_new_ledger_holds_nothing(tmp_path: Path, in_turn: bool) -> None:
    Ledger(tmp_path / "held", 4, in_turn=in_turn)
    reader = LedgerReader(tmp_path / "held")
    assert (reader.entries(), reader.next_touch) == ([], NEVER)


def test_it_tells_what_is_held_how_far_it_is_and_until_when(tmp_path: Path) -> None:
    # Given three leases, one of which runs under a limit, and one has ended
    ledger = Ledger(tmp_path / "held", 4, in_turn=False)
    one, two, three = lease(1), lease(2, "x" * 128), lease(3)
    ledger.hold([one, two, three])
    ledger.touched_until(77.5)
    ledger.begin(two, 10.0)
    ledger.limit(two, 12.5)
    ledger.begin(three, 11.0)
    ledger.end(three, acked=True)
    # Then all of it can be read
    reader = LedgerReader(tmp_path / "held")
    assert [entry.held for entry in reader.entries()] == [
        Held("q", "id-1", "token-1", 60.0), Held("x" * 128, "id-2", "token-2", 60.0), Held("q", "id-3", "token-3", 60.0)
    ]  # fmt: skip
    assert marks(tmp_path / "held") == [WAITING, 10.0, ACKED]
    assert [entry.is_running for entry in reader.entries()] == [False, True, False]
    assert ([entry.kill_at for entry in reader.entries()], reader.next_touch) == ([NEVER, 12.5, NEVER], 77.5)


def test_what_is_held_on_keeps_its_mark_at_its_new_place(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "held", 4, in_turn=False)
    one, two, three = lease(1), lease(2), lease(3)
    ledger.hold([one, two])
    ledger.begin(two, 10.0)
    ledger.limit(two, 12.0)
    ledger.hold([three, two])
    assert marks(tmp_path / "held") == [WAITING, 10.0]
    assert [entry.kill_at for entry in LedgerReader(tmp_path / "held").entries()] == [NEVER, 12.0]
    ledger.end(two, acked=False)
    ledger.begin(one, 99.0)  # not held any more
    assert marks(tmp_path / "held") == [WAITING, ENDED]


def test_in_turn_the_beginning_of_one_tells_the_end_of_those_before_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "held", 4, in_turn=True)
    leases = [lease(number) for number in range(4)]
    ledger.hold(leases)
    places, first = ledger.turns(leases[0])
    for place in range(3):
        places[first + place] = 10.0 + place
    ledger.end(leases[0], acked=False)
    assert marks(tmp_path / "held") == [ENDED, ACKED, 12.0, WAITING]
    ledger.end(leases[2], acked=True)
    assert marks(tmp_path / "held") == [ENDED, ACKED, ACKED, WAITING]


def test_more_than_fits_is_held_as_far_as_it_fits(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "held", 2, in_turn=True)
    ledger.hold([lease(number) for number in range(3)])
    assert [entry.held.id for entry in LedgerReader(tmp_path / "held").entries()] == ["id-0", "id-1"]


def test_tokens_too_long_for_it_are_not_held_rather_than_cut(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "held", 2, in_turn=True)
    ledger.hold([lease(1)])
    ledger.hold([Lease("q", "id", "t" * 5000, b"", 0, 60.0, 1, 0, 0, 0.0)])
    assert LedgerReader(tmp_path / "held").entries() == []


def test_it_can_be_read_at_every_moment_of_writing_and_after_a_kill(tmp_path: Path) -> None:
    # Given a process that takes other leases as fast as it can
    code = """
        import sys
        from pathlib import Path
        from multiq.backend import Lease
        from multiq.worker.ledger import Ledger
        ledger = Ledger(Path(sys.argv[1]), 50, in_turn=True)
        number = 0
        while True:
            number += 1
            count = number % 50
            ledger.hold([Lease("q", str(i), str(number), b"", 0, 60.0, 1, 0, 0, 0.0) for i in range(count)])
            print(number, flush=True) if number == 100 else None
    """
    path = tmp_path / "held"
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    # When it is read meanwhile, and after it was killed
    reader = LedgerReader(path)
    seen = [reader.entries() for _ in range(5000)]
    process.kill()
    process.communicate()
    # Then what is read is nothing, or leases of one moment, whole
    assert len(reader.entries()) <= 50
    tokens = [{entry.held.token for entry in entries} for entries in [*seen, reader.entries()]]
    assert all(len(batch) <= 1 for batch in tokens)
    assert len({token for batch in tokens for token in batch}) > 1
