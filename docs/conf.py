"""How Sphinx builds the site: ``make docs``.

The pages are plain Markdown that a code host shows as it is, so nothing in them is Sphinx's own: the table of contents
is in ``CONTENTS``, and the pages made from docstrings (``reference/*.rst``) are the only ones in another format.
"""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import multiq
from multiq import driverkit

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "multiq"
author = "the authors of multiq"
version = release = multiq.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"
exclude_patterns = ["pictures"]
language = "en"
nitpicky = False

myst_heading_anchors = 4
myst_enable_extensions: list[str] = []
suppress_warnings = ["myst.header"]  # a page may begin below the first level

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

# the signatures of records are evaluated, and these names are imported for type checkers only
vars(multiq.events).setdefault("JobContext", multiq.JobContext)
vars(multiq.backend.effects).setdefault("NewJob", multiq.backend.NewJob)
vars(sys.modules[multiq.JobContext.__module__]).setdefault("Envelope", Any)
vars(sys.modules[multiq.JobContext.__module__]).setdefault("Memos", Any)
vars(sys.modules[multiq.backend.Ack.__module__]).setdefault("After", multiq.backend.After)
vars(sys.modules[multiq.JobOutcome.__module__]).setdefault("OutcomeKind", multiq.backend.OutcomeKind)

html_theme = "furo"
html_title = f"multiq {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["pictures/style"]
html_css_files = ["multiq.css"]
pygments_style = "default"
pygments_dark_style = "github-dark"
templates_path: list[str] = []

#: the sidebar: captions, and the pages below them
CONTENTS: dict[str, list[str]] = {
    "Tutorial": ["tutorial", "tutorial-workflow"],
    "How to": [
        "howto/send-mail-after-commit",
        "howto/use-in-a-web-application",
        "fastapi",
        "flask",
        "django",
        "sqlalchemy",
        "howto/cancel-an-order",
        "howto/ring-an-alarm",
        "howto/retry-and-give-up",
        "howto/failed-jobs",
        "howto/priorities-and-queues",
        "howto/run-coroutines",
        "howto/limit-time",
        "results",
        "testing",
        "deploying",
        "howto/deploy-new-code",
        "howto/monitor",
        "monitoring",
        "opentelemetry",
        "sentry",
        "howto/move-to-another-backend",
        "soak",
        "writing-a-driver",
        "troubleshooting",
        "faq",
    ],
    "Coming from": ["coming-from/celery", "coming-from/rq", "coming-from/laravel"],
    "Reference": [
        "tasks",
        "flows",
        "schedules",
        "unique",
        "limits",
        "middleware",
        "asyncio",
        "worker",
        "cli",
        "configuration",
        "metrics",
        "backends",
        "sqlite",
        "redis",
        "mysql",
        "beanstalk",
        "envelope",
        "payloads",
        "contract",
        "bench",
        "reference/index",
    ],
    "Explanation": [
        "concepts",
        "durability",
        "reliability",
        "worker-life",
        "security",
        "peers",
        "decisions/README",
    ],
    "The project": ["changes", "contributing", "reporting"],
}

#: the project's own pages outside of this folder, and the pages of the site that show them
OUTSIDE = {
    "README.md": "index",
    "CHANGELOG.md": "changes",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "reporting",
}

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def _toctree(pages: list[str], caption: str = "") -> str:
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return f"\n```{{toctree}}\n{options}\n" + "\n".join(pages) + "\n```\n"


def _module(name: str) -> str:
    return f"\n{name}\n{'-' * len(name)}\n\n.. automodule:: {name}\n   :members:\n"


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Make a page's text what the site needs: its table of contents, what it shows from outside, links."""
    text, folder = source[0], (DOCS / page).parent
    if page == "index":
        text += "".join(_toctree(pages, caption) for caption, pages in CONTENTS.items())
    if re.match(r"decisions/\d", page):  # its index has them all, and the sidebar of each page need not
        text = "---\norphan: true\n---\n" + text
    if page == "reference/driverkit":
        text += "".join(_module(f"{driverkit.__name__}.{module.name}") for module in iter_modules(driverkit.__path__))
    for name, shown_at in OUTSIDE.items():
        if page == shown_at != "index":
            text, folder = (ROOT / name).read_text("utf-8"), ROOT
            app.env.note_dependency(ROOT / name)
    source[0] = text if page.startswith("reference/") else _within_site(text, folder)


def _within_site(text: str, folder: Path) -> str:
    """The text of a page in *folder*, its links as the site needs them."""

    def change(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (folder / target).resolve()
        anchor = match["anchor"] or ""
        if path.parent == ROOT and path.name in OUTSIDE:
            return f"[{match['text']}](/{OUTSIDE[path.name]}.md{anchor})"
        if folder == ROOT and path.is_relative_to(DOCS):  # it was written for another folder
            return f"[{match['text']}](/{path.relative_to(DOCS)}{anchor})"
        if not path.is_relative_to(DOCS):  # the site has no page of it
            name = path.relative_to(ROOT).as_posix()
            return match["text"] if name in match["text"] else f"{match['text']} (`{name}`)"
        return match[0]

    return _LINK.sub(change, text)


def setup(app: Sphinx) -> None:
    this_file = zlib.crc32(Path(__file__).read_bytes())
    app.add_config_value("this_file", this_file, "env")  # if it changes, all pages are read again
    app.connect("source-read", _read)
