"""Attention on DTensors."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dtensor.op_checks import Layout, check_op, count_op, distributed
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import DTensor, distribute_tensor, init_device_mesh, manual_seed
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.testing import run_ranks

R, P = Replicate(), Partial()
MESHES = [(3,), (2, 2)]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def heads(batch: int = 2, heads: int = 4, length: int = 5, keys: int = 6) -> list[Tensor]:
    return [
        drawn(batch, heads, length, 4),
        drawn(batch, heads, keys, 4),
        drawn(batch, heads, keys, 3),
    ]


def attend(**kwargs: Any) -> Any:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **kwargs)

    return fn


@each("kwargs", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_attention_of_parts(kwargs: dict[str, Any]) -> None:
    check_op(attend(**kwargs), *heads(), meshes=MESHES, most=6, gathers=False)


def test_attention_without_batch_or_heads() -> None:
    check_op(
        attend(is_causal=True),
        *[one[0, 0] for one in heads()],
        meshes=MESHES,
        most=3,
        gathers=False,
    )
    check_op(attend(), *[one[0] for one in heads()], meshes=MESHES, most=2, gathers=False)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The elements of the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        tensors = (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return made


@each("dtype", [torch.float32, torch.bfloat16])
def test_causal_attention_of_parts_of_the_queries_makes_no_mask(dtype: torch.dtype) -> None:
    whole = [drawn(1, 2, 64, 4, dtype=dtype).requires_grad_() for _ in range(3)]
    attend(is_causal=True)(*whole).sum().backward()

    def program(rank: int) -> int:
        mesh = init_device_mesh("cpu", (4,))
        q, k, v = (distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in whole)
        with Largest() as largest:  # type: ignore[no-untyped-call]
            attend(is_causal=True)(q, k, v).sum().backward()
        for part, full in zip((q, k, v), whole, strict=True):
            assert isinstance(part.grad, DTensor)
            assert_close(part.grad.full_tensor(), full.grad)
        return int(largest.elements)

    assert max(run_ranks(4, program)) <= whole[0].numel()


def test_more_queries_than_keys() -> None:
    check_op(attend(is_causal=True), *heads(length=7, keys=3), meshes=MESHES, most=2, gathers=False)


@each("shape", [(5, 6), (4, 1, 6), (2, 1, 5, 6), (2, 4, 5, 6)])
def test_masks_are_broadcast(shape: tuple[int, ...]) -> None:
    check_op(attend(), *heads(), drawn(*shape), meshes=MESHES, most=2, gathers=False)
    check_op(attend(), *heads(), drawn(*shape) > -1, meshes=MESHES, most=2, gathers=False)


def test_a_row_of_masked_keys_is_nothing() -> None:
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[2] = False
    check_op(attend(), *heads(), mask, meshes=MESHES, most=4, gathers=False)


@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}])
def test_heads_share_keys(kwargs: dict[str, Any]) -> None:
    q, k, v = heads(heads=6)
    fn = attend(enable_gqa=True, **kwargs)
    check_op(fn, q, k[:, :2], v[:, :2], meshes=MESHES, most=4, gathers=False)
    if not kwargs:
        check_op(fn, q, k[:, :2], v[:, :2], drawn(6, 1, 6), meshes=MESHES, most=2, gathers=False)


def test_heads_need_not_communicate() -> None:
    for placement in (Shard(0), Shard(1)):
        found = count_op(attend(is_causal=True), *heads(), layouts=[[placement]] * 3)
        assert (found.forward, found.backward) == ([], [])
        assert found.placements == [(placement,)]


def test_cut_queries_gather_keys_only() -> None:
    found = count_op(attend(is_causal=True), *heads(keys=5), layouts=[[Shard(2)]] * 3)
    assert len(found.forward) == 2
    assert found.placements == [(Shard(2),)]


def test_cut_keys_stay() -> None:
    """As where a cache of keys is cut: rows of maxima and sums move, no keys."""
    layouts: list[list[Placement]] = [[R], [Shard(2)], [Shard(2)]]
    found = count_op(attend(), *heads(length=1, keys=64), layouts=layouts, grads=False)
    assert found.placements == [(P,)]
    assert set(found.forward) == {"all_reduce"}


# -- multi-head ------------------------------------------------------------------------------


def multihead(**kwargs: Any) -> tuple[Any, list[Tensor]]:
    """A call of the module as a function of its inputs and parameters; each has a copy of it."""
    torch.manual_seed(0)
    width = kwargs.pop("width", 8)
    calling = {k: kwargs.pop(k) for k in [*kwargs] if k in CALLING}
    module = nn.MultiheadAttention(width, 4, dtype=torch.float64, **kwargs)
    names = [name for name, _ in module.named_parameters()]

    def fn(query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor) -> Any:
        named = dict(zip(names, parameters, strict=True))
        return functional_call(copy.deepcopy(module), named, (query, key, value), calling)

    return fn, [one.detach() for one in module.parameters()]


CALLING = ("need_weights", "attn_mask", "key_padding_mask", "is_causal", "average_attn_weights")
PADDED = torch.zeros(3, 6, dtype=torch.bool)
PADDED[1, 4:] = True


@each(
    "kwargs",
    [
        {},
        {"need_weights": False},
        {"need_weights": False, "bias": False, "attn_mask": torch.ones(5, 6).tril(1) == 0},
        {"key_padding_mask": PADDED, "average_attn_weights": False},
        {
            "need_weights": False,
            "key_padding_mask": PADDED * drawn(1) * 9,
            "attn_mask": drawn(12, 5, 6),
        },
        {"kdim": 8, "vdim": 8},
        {"need_weights": False, "batch_first": True},
        {"add_zero_attn": True, "add_bias_kv": True},
    ],
)
def test_multi_head_attention(kwargs: dict[str, Any]) -> None:
    fn, parameters = multihead(**kwargs)
    inputs = [drawn(5, 3, 8), drawn(6, 3, 8), drawn(6, 3, 8) * 2]
    if kwargs.get("batch_first"):
        inputs = [one.transpose(0, 1).contiguous() for one in inputs]
    check_op(fn, *inputs, *parameters, meshes=[(2,)], most=3)


# -- what is drawn ---------------------------------------------------------------------------


def test_what_is_dropped_does_not_depend_on_the_layout() -> None:
    q, k, v = heads()

    def program(rank: int) -> list[Tensor]:
        found = []
        mesh = init_device_mesh("cpu", (2,))
        for placement in (R, Shard(0), Shard(1), Shard(2)):
            manual_seed(7, mesh)
            given: list[Any] = [distribute_tensor(one, mesh, [placement]) for one in (q, k, v)]
            found.append(attend(dropout_p=0.5)(*given).full_tensor())
        return found

    whole, *others = run_ranks(2, program)[0]
    assert (whole != F.scaled_dot_product_attention(q, k, v)).any()
    for other in others:
        assert_close(other, whole)


def test_the_fast_path_of_inference_is_not_taken_but_right() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x = torch.randn(4, 3, 8)

    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        mine = copy.deepcopy(encoder)
        for owner in mine.modules():
            for name, one in list(owner.named_parameters(recurse=False)):
                given = distribute_tensor(one.detach(), mesh, [R])
                setattr(owner, name, nn.Parameter(given))
        with torch.no_grad():
            out = mine(distribute_tensor(x, mesh, [Shard(0)]))
        assert out.placements == (Shard(0),)
        found: Tensor = out.full_tensor()
        return found

    with torch.no_grad():
        want = encoder(x)
    assert_close(run_ranks(2, program)[0], want)


def test_gradients_that_differ_by_rounding_are_no_fault() -> None:
    """Ranks without a part of the keys sum the replicated gradient of a bias in another order."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 3))
        layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
        layouts: list[list[Placement]] = [
            [Shard(0), Shard(0)],
            [Replicate(), Shard(0)],
            [Shard(1), Partial()],
            [Shard(0), Shard(0)],
        ]
        generator = torch.Generator().manual_seed(0)
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        names = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
        for name, layout in zip(names, layouts, strict=True):
            shape = layer.get_parameter(name).shape
            value = distributed(normal(shape), mesh, Layout(tuple(layout)))
            module = layer.out_proj if "." in name else layer
            setattr(module, name.rpartition(".")[2], nn.Parameter(value))
        for _ in range(5):
            query = distributed(normal(2, 3, 8), mesh, Layout((Replicate(), Partial())))
            key = distributed(normal(2, 5, 8), mesh, Layout((Shard(2), Shard(2))))
            key.requires_grad_()
            out, _ = layer(query, key, key, average_attn_weights=False)
            out.square().sum().backward()
            assert isinstance(key.grad, DTensor)
            key.grad.full_tensor()

    run_ranks(6, program)
