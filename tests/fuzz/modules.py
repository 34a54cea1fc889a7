"""Modules of random programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tilework.dtensor import distribute_module, distribute_tensor
from tilework.layout import Placement, Replicate, Shard
from tilework.mesh import DeviceMesh

functional = nn.functional


class _Tied(nn.Module):
    """An embedding whose weight is that of the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width, padding_idx=2)
        self.output = nn.Linear(width, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        words = self.embedding(torch.tensor([1, 4, 2, 1]))
        result: Tensor = self.output(functional.gelu(words.sum(0) + x))
        return result


class _Block(nn.Module):
    """Normalization, a layer and one back, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.scale * self.down(functional.gelu(self.up(self.norm(x))))
        return result


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class _Buffers(nn.Module):
    """Batch normalization, whose statistics follow what it sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.norm.double()

    def forward(self, x: Tensor) -> Tensor:
        result = self.norm(x)
        mean = self.norm.running_mean
        assert mean is not None
        summed: Tensor = result + mean.detach()
        return summed


class _Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(6, width, padding_idx=0), nn.Embedding(3, width)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(torch.tensor([[0, 5, 5], [2, 0, 1]])) + self.places(torch.arange(3))
        result: Tensor = words * x.mean()
        return result


_KINDS: Mapping[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, 3),
    "norm": nn.LayerNorm,
    "tied": _Tied,
    "mlp": _Block,
    "attention": _Attention,
    "embedding": _Embedding,
    "buffers": _Buffers,
}


def made(kind: str, width: int) -> nn.Module:
    """A module of a kind, for tensors whose last dim has this size."""
    return _KINDS[kind](width).double()


def distribute(module: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Distribute a module's parameters, where they have the dims that are to be sharded."""

    def partition(name: str, child: nn.Module, mesh: DeviceMesh) -> None:
        for its, parameter in list(child.named_parameters(recurse=False)):
            fits = [
                Replicate() if isinstance(p, Shard) and p.dim >= parameter.dim() else p
                for p in placements
            ]
            cut = known.get(id(parameter))
            if cut is None:
                cut = known[id(parameter)] = nn.Parameter(distribute_tensor(parameter, mesh, fits))
            setattr(child, its, cut)

    known: dict[int, nn.Parameter] = {}
    distribute_module(module, mesh, partition)
