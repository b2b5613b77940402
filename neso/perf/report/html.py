"""HTML report: one self-contained file with light and dark colours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path

from neso import __version__
from neso.perf.console import STATISTICS, load_text, number, statistic_cells
from neso.perf.measurement import Measurement, endpoint_setting
from neso.perf.metrics import METRICS
from neso.perf.report.charts import STYLE, Drawable
from neso.perf.report.plots import run_charts, sweep_charts

_STYLE_FILE = Path(__file__).with_name("page.css")
_SCRIPT_FILE = Path(__file__).with_name("page.js")

_TILES = (
    ("Requests", "request_throughput", "avg", "/s"),
    ("Output tokens", "output_token_throughput", "avg", "/s"),
    ("TTFT p50", "time_to_first_token", "p50", "ms"),
    ("TTFT p99", "time_to_first_token", "p99", "ms"),
    ("ITL p50", "inter_token_latency", "p50", "ms"),
    ("ITL p99", "inter_token_latency", "p99", "ms"),
    ("Latency p50", "request_latency", "p50", "ms"),
    ("Latency p99", "request_latency", "p99", "ms"),
    ("Goodput", "goodput", "avg", "/s"),
    ("Good requests", "good_request_share", "avg", "%"),
    ("Failed", "error_request_count", "avg", ""),
)


def write_report(
    runs: Sequence[Measurement], path: Path, *, links: Sequence[str] = (), slice_seconds: float = 0.0
) -> Path:
    """Write the report of one run, or of a sweep with `links` to the reports of its runs. Returns `path`."""
    body = _run(runs[0], slice_seconds) if len(runs) == 1 else _sweep(runs, links)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(_title(runs[0]), body), encoding="utf-8")
    return path


def write_plots(runs: Sequence[Measurement], folder: Path) -> list[Path]:
    """Write each chart as an SVG file. Returns the files."""
    charts = run_charts(runs[0]) if len(runs) == 1 else sweep_charts(runs)
    folder.mkdir(parents=True, exist_ok=True)
    return [chart.save(folder / f"{_file_name(chart.title)}.svg") for chart in charts]


def page(title: str, body: str) -> str:
    """Return a complete page with the style and the script of reports."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE_FILE.read_text()}{STYLE}</style></head>"
        f"<body><main>{body}</main><script>{_SCRIPT_FILE.read_text()}</script></body></html>"
    )


def figures(charts: Iterable[Drawable]) -> str:
    """Return charts as a grid of figures."""
    cards = []
    for chart in charts:
        note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
        cards.append(f"<figure><h3>{escape(chart.title)}</h3>{chart.svg(standalone=False)}{note}</figure>")
    return f'<div class="charts">{"".join(cards)}</div>'


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _title(run: Measurement) -> str:
    return f"neso perf: {', '.join(endpoint_setting(run.result, 'models') or ['run'])}"


def _head(run: Measurement, what: str) -> str:
    when = datetime.fromtimestamp((run.result.start_ns + run.records.epoch_offset_ns) * 1e-9, timezone.utc)
    facts = [str(endpoint_setting(run.result, "endpoint_type") or "chat")]
    facts += [str(url) for url in endpoint_setting(run.result, "urls") or ()]
    facts += [what, f"{when:%Y-%m-%d %H:%M} UTC", f"neso {__version__}"]
    return f'<h1>{escape(_title(run))}</h1><div class="soft">{escape(" · ".join(facts))}</div>'


def _run(run: Measurement, slice_seconds: float) -> str:
    parts = [_head(run, load_text(run.result.load)), _tiles(run), _notes(run)]
    parts.append(figures(run_charts(run, slice_seconds)))
    rows = []
    for metric in METRICS:
        summary = run.summaries.get(metric.name)
        if summary is not None:
            rows.append([f"{metric.title} ({metric.unit})", *statistic_cells(metric, summary)])
    parts += ["<h2>Metrics</h2>", html_table(["", *STATISTICS], rows)]
    counters = run.result.telemetry.get("summary", {}).get("server_metrics", {})
    if counters:
        rows = [[name, number(float(value))] for name, value in counters.items()]
        parts += [
            f"<details><summary>Server metrics: change during the run ({len(rows)})</summary>",
            html_table(["counter", "change"], rows),
            "</details>",
        ]
    settings = escape(json.dumps(run.result.settings, indent=1, default=str, ensure_ascii=False))
    parts.append(f"<details><summary>Settings</summary><pre>{settings}</pre></details>")
    return "".join(parts)


def _sweep(runs: Sequence[Measurement], links: Sequence[str]) -> str:
    parts = [_head(runs[0], f"sweep of {len(runs)} runs"), figures(sweep_charts(runs)), "<h2>Runs</h2>"]
    present = [tile for tile in _TILES if any(tile[1] in run.summaries for run in runs)]
    head = "".join(
        f"<th>{escape(f'{title} ({unit})' if unit else title)}</th>" for title, _, _, unit in present
    )
    rows = []
    for i, run in enumerate(runs):
        name = escape(load_text(run.result.load))
        first = f'<a href="{escape(links[i])}">{name}</a>' if links else name
        values = [run.summaries.get(metric) for _, metric, _, _ in present]
        cells = "".join(
            f"<td>{'-' if value is None else number(value.get(statistic))}</td>"
            for value, (_, _, statistic, _) in zip(values, present, strict=True)
        )
        rows.append(f"<tr><td>{first}</td>{cells}</tr>")
    body = "".join(rows)
    table = f"<table><thead><tr><th>load</th>{head}</tr></thead><tbody>{body}</tbody></table>"
    parts.append(f'<div class="scroll">{table}</div>')
    parts += [_notes(run, load_text(run.result.load) + ": ") for run in runs]
    return "".join(parts)


def _tiles(run: Measurement) -> str:
    tiles = []
    for title, metric, statistic, unit in _TILES:
        summary = run.summaries.get(metric)
        if summary is not None:
            value = (
                number(summary.get(statistic)) if metric != "error_request_count" else f"{summary.avg:.0f}"
            )
            tiles.append(f'<div class="tile"><b>{value} {unit}</b><span>{title}</span></div>')
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _notes(run: Measurement, where: str = "") -> str:
    errors = [f"{count} requests failed: {kind}. {message}" for kind, (count, message) in run.errors.items()]
    notes = [
        f'<div class="note error">{escape(where + text)}</div>' for text in (*run.result.errors, *errors)
    ]
    notes += [f'<div class="note">{escape(where + text)}</div>' for text in run.warnings]
    return "".join(notes)


def _file_name(title: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in title.lower()).split())
