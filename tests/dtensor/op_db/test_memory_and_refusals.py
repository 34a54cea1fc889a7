"""Calls from torch's database: results lie in memory as torch's, and torch's refusals are made."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.dtensor.op_db.calls import named, operators, samples_of
from tilework.dtensor import DTensor, distribute_tensor
from tilework.dtensor.base import owner_of
from tilework.dtensor.debug.causes import explain
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
#: What asks for the memory of the whole tensor, which has no strides.
_REFUSED = ("as_strided", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_")
#: Their results share memory in torch, unseen by autograd: here they are copies.
_COPIED = ("unsafe_chunk", "unsafe_split", "slice")
#: Operators some refused calls of which move elements first: what is wrong is in their elements, or
#: torch does not refuse them of tensors without memory, or what is composed of others has begun.
_MOVED_FIRST = (
    *("amax", "amin", "aminmax", "bucketize", "cov", "gradient", "histogramdd", "index_add"),
    *("kthvalue", "linspace", "linspace.tensor_overload", "logspace", "logspace.tensor_overload"),
    *("masked_fill", "masked_scatter", "multinomial", "roll", "scatter", "scatter_add"),
    *(f"nn.functional.{name}" for name in ("conv1d", "conv2d", "conv3d", "embedding", "prelu")),
    *("nn.functional.gaussian_nll_loss", "nn.functional.multi_margin_loss"),
)
#: Older ones than what this is developed on say less of tensors without memory.
_TELLS_MOST = TorchVersion(torch.__version__) >= "2.13"


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


def _shares(result: Any, tensor: Any) -> bool:
    """True if a result shows memory of a tensor."""
    if isinstance(result, DTensor) and isinstance(tensor, DTensor):
        return owner_of(result) is owner_of(tensor)
    return bool(result.untyped_storage()._cdata == tensor.untyped_storage()._cdata)


def _memory_that_differs(part: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    found = []
    for info in operators()[part::PARTS]:
        if info.name in _REFUSED or torch.float64 not in info.supported_dtypes("cpu"):
            continue
        if named(info) in _OTHER_STRIDES:
            continue
        for sample in samples_of(info, torch.float64, 2):
            for arguments in _laid_out(sample):
                input, args, kwargs = arguments(_as_it_is)
                torch.manual_seed(0)
                try:
                    plain, want = input, info.op(input, *args, **kwargs)
                except Exception:
                    continue
                input, args, kwargs = arguments(lambda x: distribute_tensor(x, mesh, [Replicate()]))
                torch.manual_seed(0)
                got = info.op(input, *args, **kwargs)
                for a, b in zip(tree_flatten(want)[0], tree_flatten(got)[0], strict=True):
                    if not _strided(a) or not a.numel() or a.shape != b.shape:
                        continue
                    if _order(a) != _order(b):
                        found.append(f"{named(info)}: strides {b.stride()}, torch's {a.stride()}")
                    if named(info) not in _COPIED and _strided(plain):
                        shares = _shares(a, plain)
                        if shares != _shares(b, input):
                            found.append(f"{named(info)}: {'a copy' if shares else 'no copy'}")
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_results_lie_as_torchs_however_the_first_tensor_does(part: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run_ranks(1, lambda rank: _memory_that_differs(part))[0]
    assert not found, "\n".join(dict.fromkeys(found))


def _refused_calls(part: int) -> list[tuple[Any, Any]]:
    """Operators, and arguments that torch refuses."""
    found = []
    for info in operators()[part::PARTS]:
        with contextlib.suppress(Exception):  # of samples on devices that are not there
            for error in info.error_inputs("cpu") if info.error_inputs_func else ():
                sample = error.sample_input
                given = tree_map(
                    lambda x: x.detach() if isinstance(x, Tensor) else x,
                    (sample.input, tuple(sample.args), dict(sample.kwargs)),
                )
                tensors = [x for x in tree_flatten(given)[0] if _strided(x)]
                memories = {x.untyped_storage()._cdata for x in tensors}
                # What is distributed is copied: it shares no memory, and nothing in it repeats.
                apart = len(memories) == len(tensors) and all(x.is_contiguous() for x in tensors)
                if apart and _raises(info.op, given):
                    found.append((info, given))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_calls_that_torch_refuses_are_refused(part: int) -> None:
    calls = _refused_calls(part)
    assert len(calls) > 30

    def rank(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))

        def cut(x: Any) -> Any:
            if not _strided(x) or x.device.type != "cpu":
                return x
            return distribute_tensor(x.clone(), mesh, [Shard(0) if x.dim() else Replicate()])

        found = []
        for info, given in calls:
            arguments = tree_map(cut, given)
            with explain() as log:
                refused = _raises(info.op, arguments)
            moved = _TELLS_MOST and log.events and named(info) not in _MOVED_FIRST
            if not refused or moved:
                found.append(f"{named(info)} {given}: refused {refused}, {len(log.events)} moves")
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run_ranks(2, rank)[0]
    assert not found, "\n".join(found)


def _results(info: Any, given: Any) -> list[Tensor] | None:
    """The tensors that a call gives; None if it gives something else."""
    input, args, kwargs = given
    with contextlib.suppress(Exception):
        results = tree_flatten(info.op(input, *args, **kwargs))[0]
        return results if all(map(_strided, results)) else None
    return None


def _takes_out(info: Any, given: Any, out: list[Tensor]) -> bool:
    input, args, kwargs = tree_map(lambda x: x.clone() if _strided(x) else x, given)
    with contextlib.suppress(Exception):
        info.op(input, *args, **kwargs, out=out[0] if len(out) == 1 else tuple(out))
        return True
    return False


def _outs(results: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Tensors for ``out=`` that are not as results are, and what is otherwise."""
    for number, result in enumerate(results):
        for dtype in (torch.float64, torch.int64, torch.complex128):
            if dtype is not result.dtype:
                out = [torch.empty_like(each) for each in results]
                out[number] = torch.empty_like(result, dtype=dtype)
                yield f"{dtype} for {result.dtype}", out
    if all(result.shape != (7, 5) for result in results):
        yield "another shape", [result.new_empty(7, 5) for result in results]


def _other_outs_taken(part: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1,))

    def spread(x: Any) -> Any:
        return distribute_tensor(x, mesh, [Replicate()]) if _strided(x) else x

    found = []
    for info in operators()[part::PARTS]:
        if not info.supports_out or info.name in _REFUSED:
            continue
        for dtype in (torch.float32, torch.int64):
            supported = dtype in info.supported_dtypes("cpu")
            for sample in samples_of(info, dtype, 1) if supported else ():
                given = (sample.input, tuple(sample.args), dict(sample.kwargs))
                given = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, given)
                results = _results(info, given)
                if any(map(_strided, tree_flatten(given)[0])) and results:
                    outs = _outs(results)
                    others = [
                        w for w, out in outs if _takes_out(info, *tree_map(spread, (given, out)))
                    ]
                    found += [f"{named(info)} out= {what}" for what in others]
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_out_of_another_shape_or_dtype_is_refused(part: int) -> None:
    found = run_ranks(1, lambda rank: _other_outs_taken(part))[0]
    assert not found, "\n".join(found)


def _raises(op: Callable[..., Any], given: Any) -> bool:
    input, args, kwargs = tree_map(lambda x: x.clone() if _strided(x) else x, given)
    try:
        op(input, *args, **kwargs)
    except Exception:
        return True
    return False
