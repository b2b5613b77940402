"""PyTorch programs for tests."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def script(module: Any) -> bytes:
    """Return `model.pt` of a module."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    return buffer.getvalue()


def trace(module: Any, *example: Any) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, example), buffer)
    return buffer.getvalue()


def export(
    module: Any, arguments: tuple[Any, ...], named: dict[str, Any] | None = None, shapes: Any = None
) -> bytes:
    """Return `model.pt2` of a module."""
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(module, arguments, named, dynamic_shapes=shapes), buffer)
    return buffer.getvalue()


class AddSub(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x))


class Identity(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class OfDict(torch.nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"SUM": x["A"] + x["B"], "DIFF": x["A"] - x["B"]}


class Upper(torch.nn.Module):
    def forward(self, words: list[str]) -> list[str]:
        return [word.upper() for word in words]


class Scaled(torch.nn.Module):
    """Has an optional argument."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if scale is not None:
            return x * scale
        return x


class Accumulator(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, start: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.where(start > 0, torch.zeros_like(state), state) + x
        return total, total


class Number(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n
