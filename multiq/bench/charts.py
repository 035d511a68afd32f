"""Charts as inline SVG, drawn by Vega-Lite. The colours of a chart come from the page's CSS variables, for light, dark
and paper.

Every bar and every point of a percentile curve has a title. Browsers show the titles, and screen readers read them out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias
from xml.etree import ElementTree as ET

from hdrh.histogram import HdrHistogram

from multiq.terminal_escapes import safe

from .figures import label, number, share_of_baseline, summary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .report import Metric, Report, Result

Spec: TypeAlias = dict[str, Any]

COLOURS = 8
"""The number of distinct colours of targets, ``--c1`` to ``--c8``. If there are more targets, the colours repeat."""

_WIDTH = 330  # CSS pixels of a plot; a plot with its axis fits a phone, and two or three plots fit beside each other
_PLOT = _WIDTH - 110  # width of bars, with room for figures beside them
_BAR = 30  # height of a target's row
_OUTLIER = 2  # repeats beyond this multiple of the longest bar are not shown, so that the bars have room
_BAND = 46  # height of a target's strip in a time line
_MARKS = {"bar", "point"}  # Vega's names of the marks that have a description
_SVG = "http://www.w3.org/2000/svg"
_PERCENTILES = (10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)
_SHORT = "datum.value < 1000 ? format(datum.value, '~g') : format(datum.value, '~s')"  # 0, 0.5, 10k
#: breaks a long URL into two lines, and cuts off the rest
_NAME = "length(datum.label) > 18 ? [slice(datum.label, 0, 18), slice(datum.label, 18, 37)] : datum.label"
_DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3])  # distinct on paper and for colour-blind readers

_INK, _FAINT, _GRID = "var(--ink)", "var(--faint)", "var(--grid)"
_CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": _FAINT,
        "titleColor": _FAINT,
        "gridColor": _GRID,
        "domain": False,
        "ticks": False,
        "labelFontSize": 11.5,
        "labelPadding": 6,
        "titleFontSize": 11.5,
        "titleFontWeight": "normal",
        "titlePadding": 8,
    },
    "header": {"labelColor": _INK, "labelFontSize": 12, "title": None},
    "text": {"color": _INK, "fontSize": 12},
}


def bars(
    results: Sequence[Result], metric: Metric, names: Sequence[str], title: str, *, has_baseline: bool = False
) -> str | None:
    """A bar for each target, with its repeats as dots and its baseline as a mark. The result is None if no target has a
    figure."""
    rows: list[dict[str, Any]] = []
    for result in results:
        found = summary(result, metric)
        if found is None:
            continue
        share = share_of_baseline(result, metric) if has_baseline else None
        caption = f", {share:.0%} of the baseline" if share else ""
        rows.append({
            "who": safe(result.target),
            "value": found.median,
            "repeats": result.figures(metric.name),
            "limit": result.baseline if share else None,
            "text": number(found.median),
            "share": f"{share:.0%}" if share else "",
            "caption": safe(f"{result.target}: {label(metric)} {found}{caption}"),
        })  # fmt: skip
    if not rows:
        return None
    longest = max(max(row["value"], row["limit"] or 0.0) for row in rows)
    farthest = max(longest, *(min(repeat, _OUTLIER * longest) for row in rows for repeat in row["repeats"]))
    x: Spec = {
        "type": "quantitative",
        "axis": _value_axis(safe(label(metric))),
        "scale": {"domain": [0, farthest or 1], "nice": False},
    }
    layers: list[Spec] = [
        {
            "mark": {"type": "bar", "cornerRadiusEnd": 3, "height": {"band": 0.62}},
            "encoding": {
                "x": {**x, "field": "value"},
                "color": _colour(names),
                "description": {"field": "caption"},
            },
        },
        {
            "transform": [{"flatten": ["repeats"], "as": ["repeat"]}],
            "mark": {"type": "circle", "size": 13, "color": _INK, "opacity": 0.55, "aria": False, "clip": True},
            "encoding": {"x": {**x, "field": "repeat"}},
        },
    ]
    for field, offset, style in (("text", 8, _INK), ("share", 64, _FAINT)):
        layers.append({
            "mark": {"type": "text", "align": "left", "color": style, "aria": False},
            "encoding": {"x": {"value": _PLOT + offset}, "text": {"field": field}},
        })  # fmt: skip
    if any(row["limit"] for row in rows):
        layers.append({
            "mark": {"type": "tick", "thickness": 2.5, "height": {"band": 0.86}, "color": _INK, "aria": False},
            "encoding": {"x": {**x, "field": "limit"}},
        })  # fmt: skip
    shown = [str(row["who"]) for row in rows]
    return _draw(
        {
            "data": {"values": rows},
            "width": _PLOT,
            "height": {"step": _BAR},
            "encoding": {"y": {**_rows_axis(shown), "field": "who"}},
            "layer": layers,
        },
        title,
    )


def curves(results: Sequence[Result], histogram: str, names: Sequence[str], title: str) -> str | None:
    """A curve of milliseconds over the percentiles for each target, on a logarithmic axis. The result is
    None if there are no histograms."""
    rows = []
    for result in results:
        merged = _merged(result, histogram)
        if merged is None:
            continue
        for percentile in _PERCENTILES:
            if merged.get_total_count() * (1 - percentile / 100) < 1:
                break  # a percentile finer than the number of values only repeats the largest value
            value = max(1, merged.get_value_at_percentile(percentile)) / 1000
            rows.append({
                "who": safe(result.target),
                "rarity": 1 / (1 - percentile / 100),
                "value": value,
                "caption": safe(f"{result.target}: p{percentile:g} {number(value)} ms"),
            })  # fmt: skip
    if not rows:
        return None
    marks = "{'1': '0', '2': 'p50', '10': 'p90', '100': 'p99', '1000': 'p99.9', '10000': 'p99.99'}"
    decades = _decades([float(row["value"]) for row in rows])
    encoding = {
        "x": {
            "field": "rarity",
            "type": "quantitative",
            "scale": {"type": "log", "nice": False},
            "axis": {"values": [2, 10, 100, 1000, 10000], "labelExpr": f"{marks}[datum.value + '']", "title": None},
        },
        "y": {
            "field": "value",
            "type": "quantitative",
            "scale": {"type": "log", "domain": [decades[0], decades[-1]]},
            "axis": {"title": f"{histogram}, ms", "values": decades, "labelExpr": "format(datum.value, '~g')"},
        },
        "color": _colour(names),
        "strokeDash": _dash(names),
    }
    line = {"mark": {"type": "line", "strokeWidth": 2, "interpolate": "monotone", "aria": False}, "encoding": {}}
    dots = {
        "transform": [{"filter": "indexof([2, 10, 100, 1000, 10000], round(datum.rarity)) >= 0"}],
        "mark": {"type": "point", "filled": True, "size": 34, "opacity": 1},
        "encoding": {"description": {"field": "caption"}, "strokeDash": {"value": [1, 0]}},
    }
    spec = {"data": {"values": rows}, "width": _WIDTH, "height": 220, "encoding": encoding, "layer": [line, dots]}
    return _draw(spec, title)


def timelines(results: Sequence[Result], names: Sequence[str], title: str) -> str | None:
    """Jobs per second over time. Each target has a strip, with a line for each repeat.

    The result is None if no repeat has a timeline of five points.
    """
    rows = [
        {"who": safe(result.target), "repeat": repeat, "second": second, "rate": rate}
        for result in results
        for repeat, sample in enumerate(result.samples)
        for second, rate in sample.timeline
        if len(sample.timeline) >= 5
    ]
    if not rows:
        return None
    shown = list(dict.fromkeys(row["who"] for row in rows))
    encoding = {
        "row": {
            "field": "who",
            "sort": shown,
            "header": {"labelAnchor": "start", "labelOrient": "top", "labelPadding": 2},
        },
        "x": {"field": "second", "type": "quantitative", "axis": {**_value_axis("seconds"), "grid": False}},
        "y": {
            "field": "rate",
            "type": "quantitative",
            "axis": {"title": None, "tickCount": 2, "labelExpr": _SHORT},
        },
        "detail": {"field": "repeat"},
        "color": _colour(names),
    }
    mark = {"type": "line", "strokeWidth": 1.3, "opacity": 0.7, "aria": False}
    spec = {"data": {"values": rows}, "width": _WIDTH, "height": _BAND, "mark": mark, "encoding": encoding}
    return _draw({**spec, "spacing": 14, "resolve": {"scale": {"y": "independent"}}}, title)


def stacked(results: Sequence[Result], metrics: Sequence[Metric], title: str) -> str | None:
    """A bar for each target. The bar consists of several figures with the same unit. The result is None if no target
    has such a figure."""
    rows = []
    for result in results:
        for order, metric in enumerate(metrics):
            found = summary(result, metric)
            if found is not None:
                caption = safe(f"{result.target}: {label(metric)} {found}")
                rows.append({
                    "who": safe(result.target),
                    "part": safe(metric.name),
                    "order": order,
                    "value": found.median,
                    "caption": caption,
                })  # fmt: skip
    if not rows:
        return None
    parts = [safe(metric.name) for metric in metrics]
    shades = {"domain": parts, "range": [f"var(--part{index + 1})" for index in range(len(parts))]}
    shown = list(dict.fromkeys(str(row["who"]) for row in rows))
    legend = {"title": None, "orient": "bottom", "labelColor": _FAINT, "labelFontSize": 11.5, "symbolType": "square"}
    encoding = {
        "y": {**_rows_axis(shown), "field": "who"},
        "x": {"field": "value", "type": "quantitative", "axis": _value_axis(safe(metrics[0].unit))},
        "color": {"field": "part", "type": "nominal", "scale": shades, "legend": legend},
        "order": {"field": "order"},
        "description": {"field": "caption"},
    }
    mark = {"type": "bar", "height": {"band": 0.62}}
    spec = {"data": {"values": rows}, "width": _WIDTH - 20, "height": {"step": _BAR}, "mark": mark}
    return _draw({**spec, "encoding": encoding}, title)


def calm(report: Report, title: str) -> str | None:
    """The durations of a fixed piece of work around each repeat, in the order of the run. The result is None if
    there are no samples."""
    rows = [
        {
            "second": sample.started,
            "calm": sample.calm,
            "who": safe(result.target),
        }
        for result in report.results
        for sample in result.samples
    ]
    if not rows:
        return None
    encoding = {
        "x": {"field": "second", "type": "quantitative", "axis": _value_axis("seconds since the run began")},
        "y": {
            "field": "calm",
            "type": "quantitative",
            "scale": {"zero": False, "nice": True},
            "axis": {"title": "times the fastest", "tickCount": 4},
        },
        "color": _colour([target.name for target in report.targets]),
    }
    mark = {"type": "point", "filled": True, "size": 22, "opacity": 0.8, "aria": False}
    return _draw({"data": {"values": rows}, "width": _WIDTH, "height": 150, "mark": mark, "encoding": encoding}, title)


def dash(names: Sequence[str], name: str) -> str:
    """The dash pattern of this target's curves, in the format of ``stroke-dasharray``."""
    return " ".join(map(str, _DASHES[names.index(name) % len(_DASHES)]))


def colour(names: Sequence[str], name: str) -> str:
    """The CSS variable of this target's colour."""
    return f"var(--c{names.index(name) % COLOURS + 1})"


# --- pieces of a specification ----------------------------------------------------------------------------


def _value_axis(title: str) -> Spec:
    return {"title": title, "tickCount": 4, "labelExpr": _SHORT}


def _decades(values: Sequence[float]) -> list[float]:
    """The powers of ten around the values, as the ticks of a logarithmic axis."""
    lowest, highest = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [10.0**power for power in range(lowest, max(highest, lowest + 1) + 1)]


def _rows_axis(shown: Sequence[str]) -> Spec:
    """An axis of the targets from top to bottom, in the run's order."""
    is_long = any(len(name) > 18 for name in shown)
    axis = {
        "title": None,
        "labelColor": _INK,
        "labelFontSize": 10.5 if is_long else 12.5,
        "labelExpr": _NAME,
        "labelLimit": 140,
    }
    return {"type": "nominal", "sort": list(shown), "axis": axis}


def _colour(names: Sequence[str]) -> Spec:
    scale = {"domain": [safe(name) for name in names], "range": [colour(names, name) for name in names]}
    return {"field": "who", "type": "nominal", "scale": scale, "legend": None}


def _dash(names: Sequence[str]) -> Spec:
    dashes = [_DASHES[index % len(_DASHES)] for index in range(len(names))]
    scale = {"domain": [safe(name) for name in names], "range": dashes}
    return {"field": "who", "type": "nominal", "scale": scale, "legend": None}


def _merged(result: Result, name: str) -> Any | None:
    """One histogram with the values of all repeats."""
    merged = None
    for sample in result.samples:
        if name in sample.histograms:
            found = HdrHistogram.decode(sample.histograms[name])
            if merged is None:
                merged = found
            else:
                merged.add(found)
    return merged


# --- drawing ---------------------------------------------------------------------------------------------


def _draw(spec: Mapping[str, Any], title: str) -> str:
    import vl_convert

    drawn = vl_convert.vegalite_to_svg({**spec, "config": _CONFIG, "usermeta": {}})
    return _titled(drawn, safe(title))


def _titled(svg: str, title: str) -> str:
    """The drawing as SVG with a title. Each mark's description becomes the mark's title, which browsers show."""
    ET.register_namespace("", _SVG)
    root = ET.fromstring(svg)  # noqa: S314 - drawn by this program
    for mark in list(root.iter()):
        caption = mark.get("aria-label")
        if caption and mark.get("aria-roledescription") in _MARKS:
            ET.SubElement(mark, f"{{{_SVG}}}title").text = caption
    heading = ET.Element(f"{{{_SVG}}}title")
    heading.text = title
    root.insert(0, heading)
    root.set("role", "img")
    root.set("aria-label", title)
    return ET.tostring(root, encoding="unicode")
