"""``varlen_attn`` on DTensors: packed documents, windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from tests.tables import each
from tilework.dtensor import DTensor, Shard, distribute_tensor, explain, init_device_mesh
from tilework.dtensor.rules.attention_blocks import KeyPattern
from tilework.layout import Placement
from tilework.testing import run_ranks

packed: Any = varlen_attn
sdpa: Any = F.scaled_dot_product_attention
ENDS = (0, 5, 5, 17, 24)


def tensors(tokens: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(tokens, heads, 8) for heads in (4, 2, 2, 4)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def allowed(ends: tuple[int, ...], window: tuple[int, int]) -> Tensor:
    places = torch.arange(ends[-1])
    document = torch.searchsorted(torch.tensor(ends[1:]), places, right=True)
    ahead = places - places.unsqueeze(-1)
    result = document == document.unsqueeze(-1)
    for side, bound in zip((-ahead, ahead), window, strict=True):
        result = result if bound < 0 else result & (side <= bound)
    return result


def attend(ends: tuple[int, ...], window: tuple[int, int], *given: Any, **options: Any) -> Any:
    lengths = torch.tensor(ends, dtype=torch.int32)
    return packed(*given, lengths, lengths, 9, 9, window_size=window, enable_gqa=True, **options)


@each("window", [(-1, -1), (-1, 0), (2, 0), (3, 1)])
@each("placement", [Shard(0), Shard(1)])
def test_documents_and_windows(window: tuple[int, int], placement: Placement) -> None:
    *given, weight = tensors()
    plain = [x.clone().requires_grad_() for x in given]
    heads = [x.transpose(0, 1).unsqueeze(0) for x in plain]
    out = sdpa(*heads, allowed(ENDS, window), enable_gqa=True)
    want = out.squeeze(0).transpose(0, 1)
    torch.autograd.backward((want * weight).sum())

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in given]
        out = attend(ENDS, window, *mine)
        assert out.placements == (placement,)
        (out * weight).sum().backward()
        torch.testing.assert_close(out.full_tensor(), want)
        for x, other in zip(mine, plain, strict=True):
            assert isinstance(x.grad, DTensor)
            torch.testing.assert_close(x.grad.full_tensor(), other.grad)

    run_ranks(2, program)


@each("window, rows", [((3, 0), 3), ((0, 0), 0), ((-1, 0), 100)])
def test_only_the_keys_that_are_needed_are_sent(window: tuple[int, int], rows: int) -> None:
    def program(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,))
        given = [distribute_tensor(x, mesh, [Shard(0)]) for x in tensors(400)[:3]]
        with explain() as log:
            attend((0, 100, 300, 400), window, *given)
        return log.nbytes

    assert run_ranks(2, program)[0] == rows * 2 * (2 * 8 * 8)


def test_the_sums_of_weights() -> None:
    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        given = [distribute_tensor(x, mesh, [Shard(0)]) for x in tensors()[:3]]
        logs = attend(ENDS, (-1, 0), *given, return_aux=AuxRequest(lse=True))[1]
        full: Tensor = logs.full_tensor()
        return full

    q, k = (x.transpose(0, 1) for x in tensors()[:2])
    scores = q @ k.repeat_interleave(2, 0).mT / 8**0.5
    scores = scores.masked_fill(~allowed(ENDS, (-1, 0)), -torch.inf)
    torch.testing.assert_close(run_ranks(2, program)[0], scores.logsumexp(-1).T)


def test_lengths_that_do_not_add_up() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        attend((0, 9), (-1, 0), *[distribute_tensor(x, mesh, [Shard(0)]) for x in tensors()[:3]])

    with pytest.raises(ValueError, match="from 0 to the number of queries, 24, got"):
        run_ranks(2, program)


def test_blocks_cover_what_a_window_allows() -> None:
    ends, queries, keys = (0, 250, 600), ((0, 150), (450, 600)), ((100, 300), (400, 600))
    for window in ((-1, -1), (-1, 0), (20, 0), (5, 7), (0, 300)):
        pattern = KeyPattern.of(*window, ends)
        found = torch.zeros(300, 400, dtype=torch.int64)
        for piece in pattern.pieces(queries, keys):
            shape = found[piece.queries, piece.keys].shape
            ones = torch.ones(shape, dtype=torch.bool)
            if piece.masked:
                rows, columns = ((at, at + n) for at, n in zip(piece.first, shape, strict=True))
                ones = pattern.allowed(rows, columns)
            found[piece.queries, piece.keys] += ones.tril() if piece.causal else ones
        q, k = (torch.cat([torch.arange(*r) for r in each]) for each in (queries, keys))
        assert torch.equal(found, allowed(ends, window)[q][:, k].long()), window
