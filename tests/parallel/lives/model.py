"""The model of lives, and rows for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, OUT, ROWS = 4, 2, 12

#: The parts that a forward pass runs besides scale and head.
ROUTES: tuple[tuple[str, ...], ...] = (
    ("first", "second", "spare", "norm"),
    ("first", "second", "norm"),
    ("first", "norm"),
    (),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks, a layer that some rows leave out, a norm, a parameter of its own, and a head."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.first, self.second, self.spare = Block(), Block(), nn.Linear(WIDTH, WIDTH)
        self.norm: Any = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor, route: int = 0, mode: str = "") -> Tensor:
        x = x * self.scale
        for name in ROUTES[route]:
            part = getattr(self, name)
            if mode in ("recomputed", "reentrant") and isinstance(part, Block):
                x = checkpoint(part, x, use_reentrant=mode == "reentrant")
            else:
                x = part(x)
        return self.head(x)  # type: ignore[no-any-return]


def made(batch_norm: bool, seed: int, dtype: torch.dtype) -> Net:
    model = Net(batch_norm).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.7, 0.7, generator=generator)
    return model


def rows(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole batch."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (WIDTH, OUT))
    return x.to(dtype), y.to(dtype)


def routed(model: Any, x: Tensor, routes: Sequence[int], mode: str) -> Tensor:
    """The outputs of a plain model, in which parts of the rows take routes of their own."""
    if len(set(routes)) == 1:
        return model(x, routes[0], mode)  # type: ignore[no-any-return]
    parts = zip(x.chunk(len(routes)), routes, strict=True)
    return torch.cat([model(part, route, mode) for part, route in parts])
