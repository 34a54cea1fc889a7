"""Calls from torch's database: results have torch's strides, and what torch refuses is refused."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.dtensor.op_db.calls import named, operators, samples_of
from tilework.dtensor import distribute_tensor
from tilework.layout import Replicate, Shard
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

PARTS = 8

#: Why some results lie in memory in another order than torch's.
_OTHER_STRIDES = {
    "nn.functional.max_unpool2d": "it lies as the images or as the places, which torch chooses",
    "nn.functional.conv_transpose2d": "images of one channel are images in either format",
    "nn.functional.pixel_unshuffle": "images of one channel are images in either format",
    "nn.functional.pad circular": "it is composed of other operators",
    **dict.fromkeys(
        ["argmax", "argmin", "amax", "amin", "mean", "sum", "nn.functional.max_pool1d"],
        "images with dims of one element are images in either format",
    ),
}
#: What is written to out= is cast where torch wants the very dtype.
_CASTS_TO_OUT = ("aminmax", "complex", "gather", "multinomial")


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


#: Ways to have a tensor in memory otherwise: what is kept, and how the tensor is seen in it.
_Way = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def _ways(ndim: int) -> Iterator[_Way]:
    yield _as_it_is, _as_it_is
    if ndim >= 2:
        yield (lambda t: t.mT.contiguous()), (lambda t: t.mT)
    if ndim == 3:
        yield (lambda t: t.transpose(0, 1).contiguous()), (lambda t: t.transpose(0, 1))
    if ndim == 4:
        yield (lambda t: t.permute(0, 2, 3, 1).contiguous()), (lambda t: t.permute(0, 3, 1, 2))
    if ndim:
        yield (lambda t: torch.stack([t, t], -1).flatten(-2)), (lambda t: t[..., ::2])


def _strided(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def _laid_out(sample: Any) -> Iterator[Callable[[Callable[[Tensor], Tensor]], Any]]:
    """The arguments of a call, the first tensor in memory in one way or another.

    Each is a function of what makes tensors of plain ones.
    """
    flat, structure = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    first = next((i for i, x in enumerate(flat) if _strided(x)), None)
    if first is None:
        return
    for keep, see in _ways(flat[first].dim()):

        def arguments(make: Callable[[Tensor], Tensor], keep: Any = keep, see: Any = see) -> Any:
            made = [make(x.detach().clone()) if _strided(x) else x for x in flat]
            made[first] = see(make(keep(flat[first].detach())))
            return tree_unflatten(made, structure)

        yield arguments


def _order(tensor: Tensor) -> list[int]:
    """The strides that tell where elements lie."""
    return [its for size, its in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _strides_that_differ(part: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    found = []
    for info in operators()[part::PARTS]:
        if named(info) in _OTHER_STRIDES or torch.float64 not in info.supported_dtypes("cpu"):
            continue
        for sample in samples_of(info, torch.float64, 2):
            for arguments in _laid_out(sample):
                input, args, kwargs = arguments(_as_it_is)
                torch.manual_seed(0)
                try:
                    want = info.op(input, *args, **kwargs)
                except Exception:
                    continue
                input, args, kwargs = arguments(lambda x: distribute_tensor(x, mesh, [Replicate()]))
                torch.manual_seed(0)
                got = info.op(input, *args, **kwargs)
                pairs = zip(tree_flatten(want)[0], tree_flatten(got)[0], strict=True)
                found += [
                    f"{named(info)}: {list(a.shape)} lies in {b.stride()}, torch's in {a.stride()}"
                    for a, b in pairs
                    if _strided(a) and a.numel() and a.shape == b.shape and _order(a) != _order(b)
                ]
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_results_have_torchs_strides_however_the_first_tensor_lies(part: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run_ranks(1, lambda rank: _strides_that_differ(part))[0]
    assert not found, "\n".join(dict.fromkeys(found))


def test_calls_that_torch_refuses_are_refused() -> None:
    def rank(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))

        def cut(x: Any) -> Any:
            if not _strided(x) or x.device.type != "cpu":
                return x
            return distribute_tensor(x.clone(), mesh, [Shard(0) if x.dim() else Replicate()])

        accepted = []
        for info in operators():
            if info.error_inputs_func is None:
                continue
            with contextlib.suppress(Exception):
                for error in info.error_inputs("cpu"):
                    sample = error.sample_input
                    given = (sample.input, tuple(sample.args), dict(sample.kwargs))
                    if not _raises(info.op, given):
                        continue
                    cast = info.name in _CASTS_TO_OUT and "out" in sample.kwargs
                    if not cast and not _raises(info.op, tree_map(cut, given)):
                        accepted.append(f"{named(info)}: {error.error_regex}")
        return accepted

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accepted = run_ranks(2, rank)[0]
    assert not accepted, "\n".join(accepted)


def _raises(op: Callable[..., Any], given: Any) -> bool:
    input, args, kwargs = tree_map(lambda x: x.clone() if _strided(x) else x, given)
    try:
        op(input, *args, **kwargs)
    except Exception:
        return True
    return False
