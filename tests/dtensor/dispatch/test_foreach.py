"""Operators on lists of tensors, of whatever layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dtensor.sharded_values import cut, full
from tests.fuzz.programs import compare
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import CommDebugMode, DTensor, Partial, Replicate, Shard, init_device_mesh
from tilework.testing import run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
torch.manual_seed(3)
WHOLE = [torch.rand(5, 5) / 2 + 0.2, torch.rand(4, 4) / 2 + 0.2]
#: What each operator takes after the first list.
MORE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "copy"), (WHOLE,)),
    **dict.fromkeys(("addcdiv", "addcmul"), (WHOLE, WHOLE)),
    **dict.fromkeys(("clamp_max", "clamp_min", "pow", "powsum", "norm"), (2.0,)),
    "lerp": (WHOLE, 0.25),
    "mm": (WHOLE,),
}
NAMES = sorted(
    name.removeprefix("_foreach_")
    for name in dir(torch)
    if name.startswith("_foreach_") and not name.endswith("_")
)


def test_every_operator_on_lists() -> None:
    """In one layout, in several at once, and partial."""
    wanted: dict[str, list[Tensor]] = {}
    for name in NAMES:
        copies = [one.clone() for one in WHOLE]
        wanted[name] = list(getattr(torch, f"_foreach_{name}")(copies, *MORE.get(name, ())))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        terms: list[Any] = [
            DTensor.from_local(one * (0.25 if rank else 0.75), mesh, [Partial()]) for one in WHOLE
        ]
        for lists in (
            [cut(one, mesh, [Shard(0)]) for one in WHOLE],
            [cut(WHOLE[0], mesh, [Shard(1)]), cut(WHOLE[1], mesh, [Replicate()])],
            terms,
        ):
            others = [cut(one, mesh, [Replicate()]) for one in WHOLE]
            for name in NAMES:
                for second in (lists, others):
                    more = [second if arg is WHOLE else arg for arg in MORE.get(name, ())]
                    found = getattr(torch, f"_foreach_{name}")(lists, *more)
                    for got, want in zip(found, wanted[name], strict=True):
                        assert_close(full(got), want)

    run_ranks(2, program)


def test_every_operator_on_lists_in_place() -> None:
    """Also where torch has none in place for one tensor, as for maximum."""
    names = [name for name in NAMES if hasattr(torch, f"_foreach_{name}_")]
    wanted: dict[str, list[Tensor]] = {}
    for name in names:
        wanted[name] = [one.clone() for one in WHOLE]
        getattr(torch, f"_foreach_{name}_")(wanted[name], *MORE.get(name, ()))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        others = [cut(one, mesh, [Replicate()]) for one in WHOLE]
        for name in names:
            for dim in (0, 1):
                bases = [cut(one, mesh, [Shard(dim)]).t().clone() for one in WHOLE]
                for tensors, second in (
                    ([cut(one, mesh, [Shard(dim)]) for one in WHOLE], others),
                    ([base.t()[:] for base in bases], others),
                ):
                    more = [second if arg is WHOLE else arg for arg in MORE.get(name, ())]
                    assert getattr(torch, f"_foreach_{name}_")(tensors, *more) is None
                    for got, want in zip(tensors, wanted[name], strict=True):
                        assert_close(full(got), want)
                for base, want in zip(bases, wanted[name], strict=True):
                    assert_close(full(base).t(), want)

    run_ranks(2, program)


def test_operators_that_take_named_tensors_in_any_order() -> None:
    a, b, c = (torch.rand(4, 3) + 1 for _ in range(3))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, y = cut(a, mesh, [Replicate()]), cut(c, mesh, [Replicate()])
        terms: Any = DTensor.from_local(b * (0.25 if rank else 0.75), mesh, [Partial()])
        for function in (torch.addcdiv, torch.addcmul):
            got = function(x, tensor2=terms, tensor1=y)
            assert_close(full(got), function(a, tensor2=b, tensor1=c))
        integers: Any = DTensor.from_local(
            torch.tensor([2**30 + 1, 70000] if rank else [-(2**30), -69990]), mesh, [Partial()]
        )
        assert full(integers.float()).tolist() == [1.0, 10.0]
        assert full(integers.half()).tolist() == [1.0, 10.0]

    run_ranks(2, program)


@pytest.mark.parametrize("number", ["v0.mean()", "plain((), 3).requires_grad_()"])
def test_a_number_gets_the_gradient_of_all_ranks(number: str) -> None:
    compare(
        f"v0 = leaf('v0', (4, 2), 59, 'S0')\nv1 = v0.detach() * 2\nv2 = {number}\n"
        "torch._foreach_add_([v1], v2)\nv3 = torch._foreach_mul([v0], v2)[0]\n"
        "v4 = gradient(v3, v2)"
    )


@each("name", ["addcdiv", "addcmul"])
@each("number", [0.25, [0.25, 4.0], torch.tensor([0.25, 4.0])])
def test_the_numbers_of_products_come_last(name: str, number: Any) -> None:
    others = [one + 1 for one in WHOLE]
    wanted = getattr(torch, f"_foreach_{name}")(WHOLE, WHOLE, others, number)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        first, second, third = (
            [cut(one, mesh, [placement]) for one in tensors]
            for tensors, placement in ((WHOLE, Shard(0)), (WHOLE, Shard(1)), (others, Shard(0)))
        )
        for got, want in zip(
            getattr(torch, f"_foreach_{name}")(first, second, third, number), wanted, strict=True
        ):
            assert_close(full(got), want)
        getattr(torch, f"_foreach_{name}_")(first, second, third, number)
        for got, want in zip(first, wanted, strict=True):
            assert_close(full(got), want)

    run_ranks(2, program)


@each("name", ["_foreach_add_", "_foreach_mul", "_foreach_div_"])
def test_a_tensor_with_dims_is_no_number(name: str) -> None:
    compare(
        "v0 = data((0, 4), 1, 'S0')\nv1 = data((0,), 2, 'R')\n"
        f"refused: torch.{name}([v0[:, 3]], v1)"
    )


@pytest.mark.parametrize("order", [1.0, 2.0, torch.inf])
def test_norms_of_a_list_take_a_single_collective(order: float) -> None:
    whole = [torch.rand(5, 3), torch.rand(1), torch.rand(2, 2), torch.rand(7), torch.rand(3)]
    whole[3][6] = torch.nan
    layouts: Any = [[S0, S1], [S0, R], [R, R], [R, S0], [R, S0]]

    def program(rank: int) -> tuple[list[Tensor], int]:
        mesh = init_device_mesh("cpu", (2, 2))
        lists = [cut(one, mesh, each) for one, each in zip(whole, layouts, strict=True)]
        with CommDebugMode() as counts:
            found = torch._foreach_norm(lists, order)
        return [full(norm) for norm in found], counts.get_total_counts()

    for norms, count in run_ranks(4, program):
        assert_close(norms, list(torch._foreach_norm(whole, order)), equal_nan=True)
        assert count == 1
