"""Every code block of the documentation runs, or says why it does not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import psutil
import pytest
from doc_blocks import PAGES, REASONS, ROOT, Block, PageRun, blocks_of
from processes import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCKS = {str(page.relative_to(ROOT)): blocks_of(page) for page in PAGES}
NOT_RUN = [block for blocks in BLOCKS.values() for block in blocks if block.reason_not_to_run is not None]

#: pages whose blocks take the most time
_LONG = frozenset(
    {
        "docs/bench.md",
        "docs/cli.md",
        "docs/django.md",
        "docs/envelope.md",
        "docs/fastapi.md",
        "docs/flask.md",
        "docs/flows.md",
        "docs/howto/failed-jobs.md",
        "docs/howto/monitor.md",
        "docs/howto/use-in-a-web-application.md",
        "docs/metrics.md",
        "docs/schedules.md",
        "docs/soak.md",
        "docs/sqlalchemy.md",
        "docs/troubleshooting.md",
        "docs/tutorial-workflow.md",
        "docs/tutorial.md",
        "docs/worker.md",
        "docs/writing-a-driver.md",
    }
)

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]*)(#[^)\s]*)?\)")


@pytest.fixture
def page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageRun]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = PageRun(tmp_path)
    yield run
    run.close()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page in _LONG else [])
        for page, blocks in BLOCKS.items()
        if blocks
    ],
)
def test_a_page_runs_from_top_to_bottom(page: str, page_run: PageRun) -> None:
    for block in BLOCKS[page]:
        if block.reason_not_to_run is None:
            page_run.run(block)


@pytest.mark.parametrize("block", NOT_RUN, ids=str)
def test_a_block_that_is_not_run_has_a_reason_that_counts(block: Block) -> None:
    assert block.reason_not_to_run in REASONS, f"{block}: {block.reason_not_to_run!r} is not in REASONS"


@pytest.mark.parametrize("page", BLOCKS)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    targets = [match[1] for match in _LINK.finditer(text) if match[1] and "://" not in match[1]]
    assert [target for target in targets if not (folder / target).exists()] == []


def test_the_index_of_decisions_has_all_decisions() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text("utf-8")
    assert [path.name for path in sorted(ROOT.glob("docs/decisions/0*.md")) if f"({path.name})" not in index] == []


def test_the_pages_are_found() -> None:
    assert {"README.md", "docs/contract.md", "docs/envelope.md"} <= set(BLOCKS)
    assert sum(len(blocks) for blocks in BLOCKS.values()) > 20


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "assert 1 == 2"),
        ("console", "$ false\n"),
        ("console", "$ true\n$ multiq nonsense\n"),
        ("sh", "multiq --version | grep nonsense"),
        ("json", '{"a": }'),
        ("toml", "a = "),
        ("toml", "# multiq.toml\nnonsense = 3"),
        ("", "what am I?"),
        ("ruby", "puts 1"),
    ],
)
def test_a_wrong_block_fails(language: str, code: str, page_run: PageRun) -> None:
    with pytest.raises((AssertionError, ValueError)):
        page_run.run(Block("page.md", 1, language, code, ""))


def test_a_command_shown_to_fail_must_fail_with_its_code(page_run: PageRun) -> None:
    page_run.run(Block("page.md", 1, "console", "$ echo hello\nhello\n$ exit 3\n", "exits with 3"))
    with pytest.raises(AssertionError, match="exit code 4, not 3"):
        page_run.run(Block("page.md", 1, "console", "$ exit 4\n", "exits with 3"))


def test_a_block_that_is_only_a_file_does_not_run_by_itself(page_run: PageRun) -> None:
    page_run.run(Block("page.md", 1, "python", "# hello.py\nraise SystemExit(3)\n", "only a file"))
    page_run.run(Block("page.md", 5, "console", "$ python hello.py\n", "exits with 3"))
    with pytest.raises(AssertionError, match="names none"):
        page_run.run(Block("page.md", 9, "python", "raise SystemExit(3)\n", "only a file"))


def test_output_that_a_block_promises_must_be_printed(page_run: PageRun) -> None:
    page_run.run(Block("page.md", 1, "console", "$ echo hello; echo world \\\n  peace\nhello\nworld\n", "prints this"))
    for note in ("prints this", "exits with 0 and prints this"):
        with pytest.raises(AssertionError, match="is not printed"):
            page_run.run(Block("page.md", 1, "console", "$ echo hello\nhallo\n", note))


def test_a_page_s_file_can_be_imported_and_its_background_ends_with_it(page_run: PageRun, tmp_path: Path) -> None:
    page_run.run(Block("page.md", 1, "python", "# shop/prices.py\nTEA = 3\n", ""))
    page_run.run(
        Block("page.md", 5, "python", "from shop.prices import TEA as imported\nassert imported == TEA == 3", "")
    )
    page_run.run(Block("page.md", 9, "console", "$ sleep 1000 & echo $! > pid\n", ""))
    pid = int((tmp_path / "pid").read_text())
    assert psutil.pid_exists(pid)
    page_run.close()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/pictures").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_and_colours_for_light_and_dark(picture: Path) -> None:
    text = picture.read_text("utf-8")
    root = ET.fromstring(text)  # noqa: S314 - a file of this repository
    assert [child.tag.rpartition("}")[2] for child in root][:2] == ["title", "desc"]
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    coloured = set(re.findall(r"^ +\.(\w+) \{.*(?:fill|stroke): #", light, re.MULTILINE))
    assert coloured
    assert coloured == set(re.findall(r"^ +\.(\w+) \{", dark.partition("</style>")[0], re.MULTILINE))
    assert [url for url in re.findall(r"https?://[^\"\s]+", text) if url != "http://www.w3.org/2000/svg"] == []
