"""What programs do with tensors besides computing: DTensors answer as plain tensors do."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.dtensor.op_checks import (
    Layout,
    add_note,
    describe,
    distributed,
    noting_gatherings,
    partial_tensor,
)
from tests.dtensor.sharded_values import cut
from tests.tables import each
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    strict,
)
from tilework.testing import run_ranks

#: Called with a matrix of 4 x 3, a single number, and indices.
Use = Callable[[Any, Any, Any], Any]

USES: dict[str, Use] = {
    "tolist": lambda x, s, i: x.tolist(),
    "item": lambda x, s, i: s.item(),
    "bool": lambda x, s, i: bool((x > 0).any()),
    "int, float, complex": lambda x, s, i: (int(s), float(s), complex(s)),
    "an index of a list": lambda x, s, i: [10, 20, 30][i[1]],
    "iteration": lambda x, s, i: list(x),
    "zip": lambda x, s, i: [a + b for a, b in zip(x, x, strict=True)],
    "reversed": lambda x, s, i: reversed(x),
    "sum, max and sorted of Python": lambda x, s, i: (sum(x), max(i), [int(a) for a in sorted(i)]),
    "in": lambda x, s, i: (1.0 in x, 77.0 in x),
    "len": lambda x, s, i: len(x),
    "f-string": lambda x, s, i: f"{s:.2f}",
    "math": lambda x, s, i: math.sqrt(s),
    "type": lambda x, s, i: (x.type(), x.type(torch.float32), x.type("torch.FloatTensor")),
    "to a dtype": lambda x, s, i: (x.to(torch.int32), x.double(), x.to("cpu", torch.float32)),
    "to, by name": lambda x, s, i: x.to(device="cpu", dtype=torch.float16, copy=True),
    "to another's": lambda x, s, i: (x.to(i), x.type_as(i)),
    "sizes": lambda x, s, i: (x.shape, x.size(-1), x.numel(), x.dim(), x.nbytes, x.itemsize),
    "strides": lambda x, s, i: (x.stride(), x.is_contiguous()),
    "kinds": lambda x, s, i: (x.layout, x.device, x.is_sparse, x.is_floating_point()),
    "result types": lambda x, s, i: (torch.result_type(x, 1), torch.result_type(i, x)),
    "unique": lambda x, s, i: torch.unique(i, return_inverse=True, return_counts=True),
    "nonzero": lambda x, s, i: (x.nonzero(), x.nonzero(as_tuple=True), torch.where(x > 0)),
    "masked": lambda x, s, i: (x[x > 0], torch.masked_select(x, x > 0)),
    "new": lambda x, s, i: (x.new_zeros(2, 3), x.new_tensor([1.0, 2.0]), x.new_full((2,), 3.0)),
    "new, of sizes": lambda x, s, i: (
        *(x.new(2, 3).shape, x.new(x.size()).fill_(2), x.new(s.size()).shape, x.new()),
        *(x.new([1.0, 2.0]), x.new(x)),
    ),
    "numbers to torch's functions": lambda x, s, i: (
        torch.arange(i.max()),
        torch.linspace(0, i.sum(), 3),
    ),
    "several results": lambda x, s, i: torch.aminmax(x),
    "lists": lambda x, s, i: (torch.stack(list(x)), torch.cat([row[None] for row in x])),
    "einsum": lambda x, s, i: torch.einsum("ij,kj->ik", [x, x]),
    "numbers first": lambda x, s, i: (1 - x, 1 / (x + 5), 2**i, 7 // (x + 5), 7 % (x + 5)),
    "bits": lambda x, s, i: (1 & i, 1 ^ i, i << 1, 1 << i, 16 >> i, ~i),
    "nothing is equal to it": lambda x, s, i: (x == None, x == "a"),  # noqa: E711
    "comparisons": lambda x, s, i: (torch.equal(x, x + 0), torch.allclose(x, x + 1e-9)),
    "copies": lambda x, s, i: (copy.copy(x), copy.deepcopy(x), x.clone(), x.data),
    "transposed": lambda x, s, i: (x.T, x.mT, x.H, x.real),
    "broadcast": lambda x, s, i: (s.expand(2, 3) + 1, torch.broadcast_to(s, (2, 2))),
    "out=": lambda x, s, i: torch.add(x, 1, out=torch.empty_like(x)),
    "out= of several": lambda x, s, i: torch.max(x, 0, out=(x.new_empty(0), i.new_empty(0))),
    "each element": lambda x, s, i: x.clone().apply_(lambda a: a + 1),
    "sparse": lambda x, s, i: x.to_sparse().to_dense(),
    "foreach": lambda x, s, i: torch._foreach_add([x, s], 1),
    "in place": lambda x, s, i: x.clone().add_(1).mul_(2),
    "in place, by part": lambda x, s, i: _after(x.clone(), lambda y: y[1].add_(5)),
    "in place, through views": lambda x, s, i: _after(x.clone(), lambda y: y.view(-1)[3:7].zero_()),
    "in place, transposed": lambda x, s, i: _after(x.clone(), lambda y: y.t()[1].mul_(5)),
    "in place, seen by views": lambda x, s, i: _seen(x.clone(), lambda y: y[1:3]),
    "in place, reshaped": lambda x, s, i: _after(x.clone(), lambda y: y.reshape(-1).add_(1)),
    "items set": lambda x, s, i: _after(x.clone(), lambda y: y.__setitem__((slice(0, 2), 1), 9.0)),
    "items set by a mask": lambda x, s, i: _after(x.clone(), lambda y: y.__setitem__(y > 0, 0.0)),
    "items set by indices": lambda x, s, i: _after(
        x.clone(), lambda y: y.__setitem__(i, y[:3] * 2)
    ),
}


def _after(value: Any, write: Callable[[Any], Any]) -> Any:
    write(value)
    return value


def _seen(value: Any, view: Callable[[Any], Any]) -> Any:
    before = view(value)
    value.add_(1)
    return before + 0


def _plain(value: Any) -> Any:
    """A result without DTensors, to be compared."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "__next__"):
        return [_plain(one) for one in value]
    return value


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    matrix = torch.arange(12, dtype=torch.float64).reshape(4, 3) / 4 - 1
    return matrix, torch.tensor(2.5, dtype=torch.float64), torch.tensor([2, 0, 1])


@each("placement", [Shard(0), Shard(1), Partial()])
def test_dtensors_are_used_as_plain_tensors_are(placement: Placement) -> None:
    want = {name: _plain(use(*_inputs())) for name, use in USES.items()}

    def program(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        found = {}
        for name, use in USES.items():
            matrix, number, indices = _inputs()
            x = distributed(matrix, mesh, Layout((placement,)))
            s = distributed(number, mesh, Layout((Replicate(),)))
            i = distributed(indices, mesh, Layout((Shard(0),)))
            try:
                found[name] = _plain(use(x, s, i))
            except Exception as error:
                add_note(error, name)
                raise
        return found

    with noting_gatherings():
        for found in run_ranks(2, program):
            assert found == want


#: Calls with two tensors, and shapes of which torch says that they do not fit.
MISTAKES: list[tuple[Callable[[Any, Any], Any], tuple[int, ...], tuple[int, ...]]] = [
    (torch.add, (4,), (2,)),
    (torch.mul, (4, 3), (2, 3)),
    (torch.mm, (4, 6), (3, 5)),
    (torch.matmul, (2, 4, 6), (2, 3, 5)),
    (torch.bmm, (4, 2, 6), (2, 6, 5)),
    (torch.dot, (4,), (2,)),
    (functional.linear, (4, 6), (5, 3)),
    (lambda a, b: torch.cat([a, b]), (4, 6), (4, 3)),
    (lambda a, b: torch.stack([a, b]), (4, 6), (2, 6)),
    (lambda a, b: torch.where(a > 0, b, 0.0), (4, 3), (2, 3)),
    (lambda a, b: a.clone().add_(b), (2,), (4,)),
    (lambda a, b: a.clone().copy_(b), (4,), (2,)),
    (lambda a, b: a.view(3, 5) + b.sum(), (4, 6), (3,)),
    (lambda a, b: a.expand(4, 3) + b, (2, 3), (1,)),
    (lambda a, b: a[b > 0], (4, 3), (2,)),
    (lambda a, b: functional.layer_norm(a, (6,), b), (4, 6), (3,)),
    (lambda a, b: functional.mse_loss(a, b), (4, 6), (2, 6)),
    (lambda a, b: functional.conv1d(a, b), (2, 4, 6), (2, 3, 3)),
]


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_shapes_that_do_not_fit_are_an_error_in_every_layout_on_every_rank() -> None:
    def program(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        silent = []
        for number, (fn, *shapes) in enumerate(MISTAKES):
            plain = [torch.ones(shape) for shape in shapes]
            ways = [[Layout((p,)) for p in _placements(shape)] for shape in shapes]
            for layouts in itertools.product(*ways):
                pair = zip(plain, layouts, strict=True)
                try:
                    fn(*[distributed(one, mesh, layout) for one, layout in pair])
                except (RuntimeError, IndexError, ValueError):
                    continue
                silent.append(f"{number}: {shapes} as {describe(layouts)}")
        return silent

    with noting_gatherings():
        assert run_ranks(2, program) == [[], []]


def _placements(shape: tuple[int, ...]) -> list[Placement]:
    return [Replicate(), *map(Shard, range(len(shape)))]


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_item_of_a_partial_value_is_the_value() -> None:
    """pytorch#167213: with all that makes a number of a tensor."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = partial_tensor(torch.tensor(3.5), mesh)
        assert x.item() == float(x) == x.tolist() == 3.5  # type: ignore[comparison-overlap]
        assert int(x) == 3
        assert bool(x)
        assert f"{x:.1f} {x}" == "3.5 3.5"
        assert f"{x!r}" == str(x) != "3.5"
        assert "partial" in f"{nn.Parameter(x)}"
        with pytest.raises(TypeError, match="is for one number"):
            f"{x.expand(2):.1f}"
        assert round(float(x), 1) == 3.5
        assert cut(GRID, mesh, [Shard(0), Shard(1)]).sum().item() == pytest.approx(GRID.sum())
        assert [0, 1, 2, 3][partial_tensor(torch.tensor(2), mesh)] == 2

    run_ranks(4, program)


@each("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_arrays_have_the_full_value_and_are_read_only(placement: Placement) -> None:
    """As metrics, plots and solvers outside of torch take them."""
    values = torch.arange(6.0).view(3, 2)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(values, mesh, [placement])
        with strict():  # whoever asks for all values knows that they are gathered
            assert x.numpy().tolist() == x.tolist() == values.tolist()
        assert np.asarray(x).mean() == 2.5
        assert np.asarray(x, dtype=np.float64).dtype == np.float64
        with pytest.raises(ValueError, match="read-only"):
            x.detach().cpu().numpy()[0] = 7
        own = np.array(x)
        own[0] = 7  # a copy
        assert x.full_tensor().tolist() == values.tolist()
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="detach"):
            x.numpy()
        assert x.numpy(force=True).shape == (3, 2)
        with torch.no_grad():
            assert x.numpy().shape == (3, 2)

    run_ranks(2, program)
