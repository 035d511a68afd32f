"""The documentation as a site: it builds without a warning, has all public names, and needs nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import multiq
from multiq import backend, conformance, errors, events

ROOT = Path(__file__).parents[2]

#: the files that a page loads by itself, and not when a reader follows a link
_LOADED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]*)"|<link\b[^>]*\bhref="([^"]*)"')


@pytest.mark.long
@pytest.mark.timeout(1800)  # half a minute of work, and more than ten on two cores with a load of 15
def test_the_site_builds_without_a_warning_and_has_all_public_names(tmp_path: Path) -> None:
    site = tmp_path / "site"

    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html", "docs", site],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )

    assert (build.returncode, build.stdout + build.stderr) == (0, ""), build.stderr
    pages = sorted(site.rglob("*.html"))
    sources = [
        path for path in ROOT.glob("docs/**/*") if path.suffix in {".md", ".rst"} and "pictures" not in path.parts
    ]
    assert {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in sources} <= {
        str(page.relative_to(site)) for page in pages
    }
    assert (site / "searchindex.js").stat().st_size > 100_000
    assert [(page.name, url) for page in pages for url in _loaded_by(page) if "://" in url or url[:2] == "//"] == []
    assert _public_names() - _documented_names(site) == set()


def _loaded_by(page: Path) -> list[str]:
    return [script or link for script, link in _LOADED.findall(page.read_text("utf-8"))]


def _documented_names(site: Path) -> set[str]:
    """Read the names from the site's inventory, which has four head lines and then a compressed line for each name."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = (line.split() for line in zlib.decompress(packed).decode().splitlines())
    return {name.rpartition(".")[2] for name, kind, *_ in lines if kind.startswith("py:")}


def _public_names() -> set[str]:
    """Return the public names for users and for authors of drivers, without modules."""
    of_modules = {
        name
        for module, root in ((errors, errors.MultiqError), (events, events.Event))
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, root)
    }
    return {*multiq.__all__, *backend.__all__, *conformance.__all__, *of_modules} - {
        "ConformanceNotInstalled", "PLANTED", "__version__", "errors", "events",
    }  # fmt: skip
