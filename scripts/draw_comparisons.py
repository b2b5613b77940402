"""Draw docs/images/comparisons.svg from bench/results/comparisons.json: `python scripts/draw_comparisons.py`."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "comparisons.json"
CHART = ROOT / "docs" / "images" / "comparisons.svg"

WIDTH, LEFT, RIGHT = 760, 250, 60
ROW, GROUP, TOP = 24, 34, 48
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.group { font-weight: 600; fill: #57606a; }
.value { font-weight: 600; }
.bar { fill: #2f6fdf; }
.slower { fill: #b35900; }
.baseline { stroke: #57606a; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .group { fill: #9aa4ae; }
  .bar { fill: #6ea8fe; }
  .slower { fill: #f0a35e; }
  .baseline { stroke: #9aa4ae; }
}
"""


def draw(results: list[dict[str, Any]]) -> str:
    """Draw an SVG of horizontal bars, one group per result. A ratio above 1 means that Neso is faster."""
    largest = max(ratio for result in results for ratio in result["ratios"].values())
    scale = (WIDTH - LEFT - RIGHT) / largest
    parts = ['<text x="12" y="22" class="title">Neso relative to other servers (dashed line: equal)</text>']
    y = TOP
    for result in results:
        parts.append(f'<text x="12" y="{y + 12}" class="group">{escape(result["title"])}</text>')
        y += ROW
        for label, ratio in result["ratios"].items():
            kind = "bar" if ratio >= 1 else "bar slower"
            length = ratio * scale
            parts.append(f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 6}" rx="3" class="{kind}"/>'
            )
            parts.append(f'<text x="{LEFT + length + 8:.1f}" y="{y + 13}" class="value">{ratio:.2f} ×</text>')
            y += ROW
        y += GROUP - ROW
    one = LEFT + scale
    parts.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{TOP + ROW - 6}" y2="{y - 8}" class="baseline"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">\n'
        f"<title>Speed of Neso relative to Triton, vLLM and llama.cpp</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def main() -> None:
    CHART.write_text(draw(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
