"""The HTML page of a run: complete, without external files, and safe for any name of a server or URL."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import msgspec
import pytest
from bench_reports import TARGETS, Target, report

from multiq.bench.charts import COLOURS
from multiq.bench.compare import compare
from multiq.bench.html import page
from multiq.bench.report import Violation

replaced = msgspec.structs.replace

VOID = {"meta", "br", "img", "link", "input", "hr"}
FETCHING = {"src", "href", "xlink:href", "srcset", "poster", "data", "action", "background"}
EVIL = "redis\"'><script>alert(1)</script>{{7*7}}\u202e\x1b&amp;"
VIOLATIONS = {
    ("drain", "mysql"): Violation("lost", 3, "job <b>17</b> never ran"),
    ("delayed", "redis"): Violation("early", 1, "job 4 began 12 ms before it was due"),
}


class Page(HTMLParser):
    """Parses a page as a browser does. Fails if a tag is not closed or not opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.said: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
            if name in FETCHING:
                (self.links if tag == "a" and (value or "").startswith("#") else self.fetched).append(value or "")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.said.append(data)


@pytest.fixture(scope="module")
def calm() -> str:
    return page(report(has_histograms=True, repeats=2))


@pytest.fixture(scope="module")
def red() -> str:
    old, new = report(seed=1), report(seed=2, violations=VIOLATIONS, factors={("settle", "settle"): 1.3}, noise=3)
    return page(new, compare(old, new))


@pytest.fixture(scope="module")
def evil() -> str:
    targets = [Target(replaced(TARGETS[0].target, name=EVIL, server=EVIL, promises={EVIL: EVIL}), 1.0)]
    a_run = report(
        targets=targets, has_histograms=True, repeats=2, violations={("drain", EVIL): VIOLATIONS["drain", "mysql"]}
    )
    titled = [replaced(workload, title=EVIL, about=EVIL) for workload in a_run.workloads]
    return page(replaced(a_run, workloads=titled, noise=EVIL, environment={EVIL: EVIL}), compare(a_run, a_run))


@pytest.mark.long
@pytest.mark.parametrize("which", ["red", "calm", "evil"])
def test_a_page_is_whole_and_fetches_nothing(which: str, request: pytest.FixtureRequest) -> None:
    text: str = request.getfixturevalue(which)
    found = Page(text)
    assert found.fetched == []
    assert found.handlers == []
    assert not {"script", "iframe", "object", "embed", "link", "img"} & set(found.tags)
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    assert "default-src 'none'" in text


@pytest.mark.long
def test_whatever_a_name_holds_is_text(evil: str) -> None:
    assert "{{7*7}}" in evil
    assert "<b>17" not in evil
    assert "\u202e" not in evil
    assert "\x1b" not in evil
    assert r"<script>alert(1)</script>{{7*7}}\u202e\x1b&amp;" in Page(evil).text


@pytest.mark.long
def test_every_chart_is_an_image_with_a_name_and_its_marks_have_titles(calm: str) -> None:
    drawings = [ET.fromstring(found) for found in re.findall(r"<svg [^>]*role=\"img\".*?</svg>", calm, re.DOTALL)]  # noqa: S314
    assert len(drawings) > 20
    for drawing in drawings:
        assert drawing.get("role") == "img"
        assert drawing[0].tag.endswith("title")
        assert drawing[0].text == drawing.get("aria-label") != ""
    titles = {title.text for drawing in drawings for title in drawing.iter() if title.tag.endswith("title")}
    assert any(
        re.fullmatch(r"redis: drained, jobs/s [\d,]+( ±\d+%)?, \d+% of the baseline", title or "") for title in titles
    )
    assert any(re.fullmatch(r"mysql: p99 [\d.]+ ms", title or "") for title in titles)


@pytest.mark.long
def test_each_kind_of_chart_is_there_where_its_figures_are(calm: str) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", calm)
    assert captions.count("latency by percentile") == 2
    assert captions.count("lateness by percentile") == 1
    assert captions.count("jobs a second, each line a repeat") == 3
    assert captions.count("processor time of a job") == 6
    assert {"10k: drained, jobs/s", "1M: enqueued, jobs/s", "back after, ms", "settle, us/job"} <= set(captions)
    assert "pickup p50, ms" not in captions  # a point of the curve


@pytest.mark.long
def test_every_colour_is_defined_for_light_dark_and_paper(calm: str) -> None:
    used = set(re.findall(r"var\((--\w+)\)", calm))
    blocks = re.findall(r":root \{(.*?)\}", calm, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        defined = set(re.findall(r"(--\w+):", block))
        assert used <= defined
        assert {f"--c{number + 1}" for number in range(COLOURS)} <= defined


@pytest.mark.long
def test_promises_stand_beside_speeds(calm: str) -> None:
    text = Page(calm).text
    for told in ("server crash", "innodb_flush_log_at_trx_commit 2", "enqueue twice", "two jobs", "MariaDB 10.11.6"):
        assert told in text
    assert "each accounted for. None lost, doubled, early." in text


@pytest.mark.long
def test_a_red_run_says_so_before_all_else(red: str) -> None:
    text = Page(red).text
    assert text.index("2 broken promises") < text.index("lost: 3 on mysql in drain: job <b>17</b> never ran")
    assert text.index("early: 1 on redis in delayed") < text.index("Take the figures with care") < text.index("Speeds")
    assert "each accounted for" not in text


@pytest.mark.long
def test_a_comparison_shows_what_changed_and_keeps_the_rest_folded(red: str) -> None:
    text = Page(red).text
    assert "Compared with multiq 0.1.0 of 21 November 2026, 12:30 UTC: regression: of 267 figures 4 worse" in text
    changed, rest = red[red.index('id="compared"') :].split("<details>")
    assert changed.count('class="worse"') == 4
    assert 'class="worse"' not in rest
    suspects = changed.count('class="unsure"')
    assert f"{263 - suspects} figures that did not change, or are uncertain" in text
    assert ("What looks worse, and may not be" in changed) == bool(suspects)


def test_a_run_without_results_is_a_page_too() -> None:
    Page(page(replaced(report(), results=[])))
    Page(page(replaced(report(), results=[], workloads=[], targets=[])))


@pytest.mark.long
def test_more_targets_than_colours_still_have_one() -> None:
    many = [Target(replaced(TARGETS[0].target, name=f"redis {number}"), 1.0) for number in range(COLOURS + 2)]
    text = page(report(targets=many, repeats=1, has_histograms=True))
    assert f"redis {COLOURS + 1}" in Page(text).text
    assert f"var(--c{COLOURS + 1})" not in text


@pytest.mark.long
def test_a_long_url_stands_on_two_lines_of_a_chart_and_whole_in_the_tables() -> None:
    url = "redis://:***@queue-1.example.com:6379/3"
    text = page(report(targets=[Target(replaced(TARGETS[0].target, name=url), 1.0)], repeats=1))
    assert ">redis://:***@queue<" in text
    assert ">-1.example.com:6379<" in text
    assert text.count(f"{url}</th>") > 5
