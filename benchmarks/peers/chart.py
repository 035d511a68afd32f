"""``peers.svg``: bar charts of how fast each library drains and enqueues, for light and dark pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vl_convert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.results import Row, Run

_OURS, _OTHERS, _TEXT = "#e8590c", "#868e96", "#7d8590"  # enough contrast on white as well as on near black
_PANELS = {"drain": "drained", "bulk": "enqueued in bulk", "enqueue": "enqueued one by one"}
_STORES = {"redis": "Redis", "sqlite": "SQLite", "mysql": "MariaDB"}
_BAR, _WIDTH, _NAMES = 24, 270, 62  # pixels: the distance of two bars, the width of a panel, the space for names
_ROOM = 1.35  # times the longest bar: the width of the axis, so that the bar's label has room
_CONFIG = {
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": None},
    "title": {"color": _TEXT, "anchor": "start", "fontSize": 13, "offset": 8},
    "axis": {"labelFontSize": 12, "labelLimit": 200},
}


def picture(run: Run) -> str:
    """The SVG: a row of panels for each store, and a panel for each figure. multiq is on top; the others follow by
    their drain rate."""
    rows = [
        {
            "spacing": 24,
            "hconcat": [_panel(some, store, name, first=name == "drain") for name in _PANELS],
        }
        for store in _STORES
        if (some := run.rows_of(store))
    ]
    spec = {"config": _CONFIG, "padding": 10, "spacing": 28, "vconcat": rows}
    return str(vl_convert.vegalite_to_svg(spec))


def _panel(rows: Sequence[Row], store: str, name: str, *, first: bool) -> dict[str, Any]:
    """The bars of one figure. Only the *first* panel of a row shows the libraries' names."""
    values = [
        {
            "library": row.entry.name,
            "rate": value or 0,
            "label": f"{value:,.0f}" if value else "none" if row.turns else "failed",
            "ours": row.entry.is_ours,
        }
        for row in rows
        for value in [row.median(name)]
    ]
    longest = max((row.median(name) or 0 for row in rows), default=0) or 1
    labels = {"labelColor": {"condition": {"test": "datum.value == 'multiq'", "value": _OURS}, "value": _TEXT}}
    axis = (
        {"title": None, "domain": False, "ticks": False, "labelPadding": 6, "minExtent": _NAMES, **labels}
        if first
        else None
    )
    colour = {"condition": {"test": "datum.ours", "value": _OURS}, "value": _OTHERS}
    text = {"condition": {"test": "datum.ours", "value": _OURS}, "value": _TEXT}
    return {
        "title": f"{_STORES[store]}: {_PANELS[name]}, jobs/s",
        "width": _WIDTH,
        "height": {"step": _BAR},
        "data": {"values": values},
        "encoding": {
            "y": {"field": "library", "type": "nominal", "sort": None, "axis": axis},
            "x": {"field": "rate", "type": "quantitative", "axis": None, "scale": {"domain": [0, longest * _ROOM]}},
        },
        "layer": [
            {"mark": {"type": "bar", "height": {"band": 0.72}}, "encoding": {"color": colour}},
            {
                "mark": {"type": "text", "align": "left", "dx": 5, "fontSize": 12},
                "encoding": {"text": {"field": "label"}, "color": text},
            },
        ],
    }
