"""Charts as SVG, without a plotting library.

A `Chart` has axes and series. It draws itself as SVG with colours from CSS variables, so that it fits light and dark
pages, and it carries the points that the report's script shows on hover. In a notebook a chart displays itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 44
_LEGEND_HEIGHT = 20
_MAX_NAME = 64
"""Characters of a name in the legend."""
_MAX_POINTS = 2000
"""Maximum number of points drawn per series. Longer series are sampled evenly."""

STYLE = """
.chart{--s1:#2a78d6;--s2:#eb6834;--s3:#1baf7a;--s4:#eda100;--s5:#4a3aa7;--s6:#e34948;
--surface:#ffffff;--ink:#1f2328;--muted:#656d76;--grid:#e6e8eb;--heat-low:#e3eefb;--heat-high:#1c5cab;
font:12px system-ui,-apple-system,"Segoe UI",sans-serif}
@media (prefers-color-scheme:dark){.chart{--s1:#3987e5;--s2:#d95926;--s3:#199e70;--s4:#c98500;--s5:#9085e9;--s6:#e66767;
--surface:#1a1d21;--ink:#e6e8eb;--muted:#9aa2ab;--grid:#30353b;--heat-low:#22303f;--heat-high:#86b6ef}}
.chart text{fill:var(--muted)}.chart .title{fill:var(--ink);font-weight:600;font-size:14px}
.chart .grid{stroke:var(--grid);stroke-width:1}.chart .axis{stroke:var(--muted);stroke-width:1}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}.chart .limit{stroke:var(--s6);stroke-dasharray:5 4}
@media (max-width:640px){.chart{font-size:15px}}
.chart .range{opacity:.22;stroke:none}.chart .dot{stroke:none}
""".strip()

Kind = Literal["line", "points", "bars", "spans", "range"]


@dataclass(frozen=True)
class Series:
    """Values of one colour.

    - line, points: y over x
    - bars: boxes from 0 to y, from x to x2
    - spans: horizontal lines from x to x2 at y
    - range: the area between y and y2
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Kind = "line"
    x2: Sequence[float] = ()
    y2: Sequence[float] = ()
    labels: Sequence[str] = ()
    """Text of each point on hover; by default its coordinates."""
    color: int | None = None
    """Number of the colour, from 1; by default the position of the series."""
    marks: bool = False
    """Draw a dot at each point of a line."""


@dataclass(frozen=True)
class Limit:
    """A dashed line at a value of an axis, such as a service level objective."""

    value: float
    name: str
    vertical: bool = False


class Drawable:
    """A figure with a title that renders as SVG."""

    title: str
    note: str

    def svg(self, *, standalone: bool = True) -> str:
        """Return an SVG element; `standalone` adds the style and the title."""
        raise NotImplementedError

    def save(self, path: str | Path) -> Path:
        """Write an SVG file and return its path."""
        target = Path(path)
        target.write_text(self.svg(), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        return self.svg()


@dataclass(frozen=True)
class Chart(Drawable):
    """A chart with one x and one y axis."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    limits: tuple[Limit, ...] = ()
    note: str = ""
    from_zero: bool = True
    """Let linear y axes start at 0."""

    def svg(self, *, standalone: bool = True) -> str:
        return _Drawing(self).svg(standalone)


@dataclass(frozen=True)
class HeatMap(Drawable):
    """Numbers of a grid as colours. `cells[row][column]` belongs to `rows[row]` and `columns[column]`."""

    title: str
    x_label: str
    y_label: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[float, ...], ...]
    unit: str = ""
    note: str = ""

    def svg(self, *, standalone: bool = True) -> str:
        top = _TOP + (26 if standalone else 0)
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        width, height = (right - _LEFT) / len(self.columns), (bottom - top) / len(self.rows)
        most = max((cell for row in self.cells for cell in row), default=0.0) or 1.0
        parts, points = [], []
        for r, row in enumerate(self.cells):
            y = bottom - (r + 1) * height
            for c, cell in enumerate(row):
                x = _LEFT + c * width
                share = 100 * math.sqrt(cell / most)  # square root: small counts stay visible
                fill = (
                    "none"
                    if cell == 0
                    else f"color-mix(in srgb,var(--heat-high) {share:.0f}%,var(--heat-low))"
                )
                box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" height="{max(height - 1, 0.5):.1f}"'
                parts.append(f'<rect {box} style="fill:{fill}"/>')
                if cell:
                    label = f"{self.x_label} {self.columns[c]}, {self.y_label} {self.rows[r]}: {cell:g} {self.unit}"
                    points.append([round(x + width / 2), round(y + height / 2), label.strip()])
            if r % max(1, len(self.rows) // 6) == 0:
                parts.append(_text(_LEFT - 6, y + height / 2 + 4, self.rows[r], "end"))
        for c in range(0, len(self.columns), -(-len(self.columns) // 6)):
            parts.append(_text(_LEFT + (c + 0.5) * width, bottom + 16, self.columns[c], "middle"))
        parts.append(_axis_titles(self.x_label, self.y_label, top))
        return _document(self.title, "".join(parts), points, standalone)


class _Drawing:
    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        xs = [v for s in chart.series for values in (s.x, s.x2) for v in values]
        ys = [v for s in chart.series for values in (s.y, s.y2) for v in values]
        xs += [limit.value for limit in chart.limits if limit.vertical]
        ys += [limit.value for limit in chart.limits if not limit.vertical]
        if chart.from_zero and not chart.log_y:
            ys.append(0.0)
        self.points: list[list[float | str]] = []
        self.top = _TOP
        self.x_scale = _Scale(xs, chart.log_x)
        self.y_scale = _Scale(ys, chart.log_y)

    def px(self, value: float) -> float:
        return _LEFT + self.x_scale.share(value) * (WIDTH - _LEFT - _RIGHT)

    def py(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self.y_scale.share(value) * (HEIGHT - _BOTTOM - self.top)

    def svg(self, standalone: bool) -> str:
        chart = self.chart
        named = [series for series in chart.series if series.name]
        if standalone:
            self.top += 26
        legend = _legend_rows(named) if len(named) > 1 else []
        legend_top = self.top
        self.top += _LEGEND_HEIGHT * len(legend)
        parts = [self._grid()]
        for position, series in enumerate(chart.series, 1):
            parts.append(self._series(series, series.color or position))
        parts += [self._limit(limit, row) for row, limit in enumerate(chart.limits)]
        parts.append(_axis_titles(chart.x_label, chart.y_label, self.top))
        parts += [
            self._legend(row, legend_top + 8 + _LEGEND_HEIGHT * number) for number, row in enumerate(legend)
        ]
        if not any(len(series.x) for series in chart.series):
            parts.append(_text(WIDTH / 2, HEIGHT / 2, "no data", "middle"))
        return _document(chart.title, "".join(parts), self.points, standalone)

    def _grid(self) -> str:
        parts = []
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        for value, label in self.y_scale.ticks():
            y = self.py(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(_LEFT - 6, y + 4, label, "end"))
        for value, label in self.x_scale.ticks():
            parts.append(_text(self.px(value), bottom + 16, label, "middle"))
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        return "".join(parts)

    def _series(self, series: Series, color: int) -> str:
        indexes = _selection(len(series.x))
        var = f"var(--s{(color - 1) % 6 + 1})"
        parts = []
        if series.kind == "line":
            path = " ".join(f"{self.px(series.x[i]):.1f},{self.py(series.y[i]):.1f}" for i in indexes)
            parts.append(f'<polyline class="line" style="stroke:{var}" points="{path}"/>')
        if series.kind == "range":
            edge = [(series.x[i], series.y[i]) for i in indexes]
            edge += [(series.x[i], series.y2[i]) for i in reversed(indexes)]
            path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in edge)
            return f'<polygon class="range" style="fill:{var}" points="{path}"/>'
        for i in indexes:
            x, y = self.px(series.x[i]), self.py(series.y[i])
            if series.kind == "points" or (series.kind == "line" and (series.marks or len(indexes) == 1)):
                radius = 4 if series.kind == "line" else 2.2
                parts.append(
                    f'<circle class="dot" style="fill:{var}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
                )
            elif series.kind == "bars":
                end, base = self.px(series.x2[i]), self.py(0.0 if not self.chart.log_y else self.y_scale.low)
                box = f'x="{x:.1f}" y="{y:.1f}" width="{max(end - x - 1, 0.7):.1f}" height="{base - y:.1f}"'
                parts.append(f'<rect style="fill:{var}" {box}/>')
                x = (x + end) / 2
            elif series.kind == "spans":
                end = self.px(series.x2[i])
                parts.append(
                    f'<line style="stroke:{var};stroke-width:2" x1="{x:.1f}" x2="{max(end, x + 1):.1f}"'
                    f' y1="{y:.1f}" y2="{y:.1f}"/>'
                )
            self.points.append([round(x), round(y), self._label(series, i)])
        return "".join(parts)

    def _label(self, series: Series, i: int) -> str:
        if series.labels:
            return series.labels[i]
        name = f"{series.name}: " if series.name else ""
        return f"{name}{short(series.y[i])} ({self.chart.x_label} {short(series.x[i])})"

    def _limit(self, limit: Limit, row: int) -> str:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        if limit.vertical:
            x = self.px(limit.value)
            line = f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{bottom}"/>'
            left = x - _text_width(limit.name) > 0
            return line + _text(
                x - 4 if left else x + 4, self.top + 10 + 14 * row, limit.name, "end" if left else "start"
            )
        y = self.py(limit.value)
        line = f'<line class="limit" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        return line + _text(right, y - 4, limit.name, "end")

    def _legend(self, row: list[Series], y: float) -> str:
        parts, x = [], float(_LEFT)
        for series in row:
            color = series.color or self.chart.series.index(series) + 1
            parts.append(
                f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" rx="2" '
                f'style="fill:var(--s{(color - 1) % 6 + 1})"/>'
            )
            parts.append(_text(x + 15, y, _shortened(series.name), "start"))
            x += _legend_width(series)
        return "".join(parts)


def _legend_rows(named: list[Series]) -> list[list[Series]]:
    """Divide the names of the series into rows that fit the width."""
    rows: list[list[Series]] = [[]]
    x = float(_LEFT)
    for series in named:
        if rows[-1] and x + _legend_width(series) > WIDTH:
            rows.append([])
            x = _LEFT
        rows[-1].append(series)
        x += _legend_width(series)
    return rows


def _legend_width(series: Series) -> float:
    return 30 + _text_width(_shortened(series.name))


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"


def _text_width(text: str) -> float:
    """Estimate the width of a text on a narrow page, where it is larger."""
    return 8.0 * len(text)


class _Scale:
    """Maps values of an axis to 0 … 1."""

    def __init__(self, values: Sequence[float], log: bool) -> None:
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        self.log = log
        if low == high:
            low, high = (low / 2, high * 2) if log else (min(low, 0.0), high if high > 0 else low + 1)
        if log:
            self.low, self.high = low or 0.5, high or 1.0
        else:
            step = nice_step((high - low) / 6)
            self.low, self.high = math.floor(low / step) * step, high + 0.04 * (high - low)

    def share(self, value: float) -> float:
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[tuple[float, str]]:
        if not self.log:
            step = nice_step((self.high - self.low) / 6)
            number = math.floor((self.high - self.low) / step + 1e-9)
            return [(self.low + i * step, short(self.low + i * step)) for i in range(number + 1)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        digits = (1, 2, 5) if last - first <= 2 else (1,)
        values = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        inside = [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]
        return [(v, short(v)) for v in inside or (self.low, self.high)]


def nice_step(rough: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    if rough <= 0 or not math.isfinite(rough):
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))


def short(value: float) -> str:
    """Return a number with three significant digits, and k or M for thousands or millions."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if size > 1e-12 else "0"


def _selection(number: int) -> Sequence[int]:
    if number <= _MAX_POINTS:
        return range(number)
    return [round(i * (number - 1) / (_MAX_POINTS - 1)) for i in range(_MAX_POINTS)]


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _axis_titles(x_label: str, y_label: str, top: float) -> str:
    middle = (top + HEIGHT - _BOTTOM) / 2
    turned = f' transform="rotate(-90 14 {middle:.0f})"'
    return _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x_label, "middle") + _text(
        14, middle, y_label, "middle", turned
    )


def _document(title: str, body: str, points: Sequence[object], standalone: bool) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    if standalone:
        background = f'<rect width="{WIDTH}" height="{HEIGHT}" style="fill:var(--surface)"/>'
        return (
            f'{head} aria-label="{escape(title)}"><style>{STYLE}</style>{background}'
            f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>{body}</svg>'
        )
    data = escape(json.dumps(points, ensure_ascii=False), quote=True)
    return f'{head} aria-label="{escape(title)}" data-points="{data}">{body}</svg>'
