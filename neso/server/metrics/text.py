"""The text exposition format of Prometheus, written as Triton writes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LAST = ("le", "quantile")  # labels of a sample within a metric


class LabelSet(dict[str, str]):
    """Labels that do not change and are written often: their text is made once."""

    __slots__ = ("text",)

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self.text = _labels(labels)


def metric_lines(metric: Metric) -> Iterator[str]:
    """The text of a family, about line by line, none for one without samples.

    prometheus_client's own writer puts `_total` on every counter; Triton's counters have no suffix.
    """
    name, total, created = metric.name, f"{metric.name}_total", f"{metric.name}_created"
    headed = False
    for sample in metric.samples:
        if sample.name == created:
            continue
        if not headed:
            headed = True
            if sample.name == total:
                name = total
            yield f"# HELP {name} {_escape(metric.documentation)}\n# TYPE {name} {metric.type}\n"
        labels = sample.labels
        text = labels.text if isinstance(labels, LabelSet) else _labels(labels)
        yield f"{sample.name}{text} {number(sample.value)}\n"


def number(value: float) -> str:
    """A value: whole ones without a decimal point."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value)):
        return str(int(value))
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    names = sorted(labels, key=lambda name: (name in _LAST, name))
    return "{" + ",".join(f'{name}="{_escape(labels[name], quote=True)}"' for name in names) + "}"


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
