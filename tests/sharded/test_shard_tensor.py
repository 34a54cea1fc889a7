"""shard_tensor and shard_parameter: from plain to sharded, from any rank, checked on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor, nn

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import (
    boxes,
    check_all_raise,
    chunks,
    examples,
    join,
    numbered,
    on,
    parts_of,
    specs,
)
from tests.tables import each
from tilework.sharded import PartialCoverError, ShardedTensor, shard_parameter, shard_tensor

ROWS = chunks(0, range(4))


def joined(results: list[Any], size: tuple[int, ...]) -> Tensor:
    return join([part for parts in results for part in parts], size)


# -- values --------------------------------------------------------------------------------------


@examples(40)
@given(data=hs.data())
def test_any_spec_from_any_rank(data: hs.DataObject) -> None:
    size = tuple(data.draw(hs.lists(hs.integers(0, 5), min_size=1, max_size=3)))
    n = data.draw(hs.integers(1, 4))
    spec: Any = data.draw(specs(size, tuple(range(n))))
    if data.draw(hs.integers(0, 9)) == 0:
        size, spec = (), boxes(((), (), n - 1))
    src_rank, by_spec = data.draw(hs.integers(0, n - 1)), data.draw(hs.booleans())

    def program(rank: int) -> Any:
        # The values of other ranks must not come through.
        tensor = numbered(size, torch.int64) if rank == src_rank else torch.full(size, -1)
        made = spec.shard(tensor, src_rank) if by_spec else shard_tensor(tensor, spec, src_rank)
        assert made.sharding_spec() == spec
        return parts_of(made)

    assert torch.equal(joined(on(n, program), size), numbered(size, torch.int64))


def test_only_the_source_needs_values() -> None:
    def program(rank: int) -> list[float]:
        tensor = torch.arange(5.0) if rank == 1 else torch.empty(5, device="meta")
        return shard_tensor(tensor, chunks(0, [0, 1]), src_rank=1).local_tensor().tolist()

    assert on(2, program) == [[0, 1, 2], [3, 4]]


def test_shards_without_values_need_none_moved() -> None:
    def program(rank: int) -> bool:
        spec = chunks(0, [0, 1], device="meta")
        return shard_tensor(torch.arange(5.0), spec).local_tensor().is_meta

    assert on(2, program) == [True, True]


@each("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    def program(rank: int) -> Any:
        made = shard_tensor(numbered((5, 2), dtype), chunks(0, [1, 0]))
        assert made.dtype == dtype
        return parts_of(made)

    assert torch.equal(joined(on(2, program), (5, 2)), numbered((5, 2), dtype))


def test_the_result_is_a_leaf_of_its_own() -> None:
    def program(rank: int) -> None:
        tensor = torch.ones(4, requires_grad=True)
        made = shard_tensor(tensor * 1, chunks(0, [0, 1]))
        tile = made.local_tensor()
        assert made.requires_grad
        assert tile.requires_grad
        assert tile.is_leaf
        with torch.no_grad():
            tile.fill_(5)
        assert tensor.tolist() == [1, 1, 1, 1]

    on(2, program)


def test_a_group_of_some_ranks() -> None:
    spec = chunks(0, [3, 1])

    def program(rank: int) -> Any:
        group = dist.new_group([1, 3])
        made = shard_tensor(numbered((5, 2)), spec, src_rank=3, process_group=group)
        assert made.metadata() == shard_tensor(numbered((5, 2)), spec).metadata()
        return parts_of(made)

    results = on(4, program)
    assert [len(parts) for parts in results] == [0, 1, 0, 1]
    assert torch.equal(joined(results, (5, 2)), numbered((5, 2)))


# -- what raises, on all ranks ---------------------------------------------------------------------

Case = tuple[Callable[[int], object], type[Exception], str]
SHORT = boxes(((0, 0), (5, 5), 0), ((5, 0), (5, 5), 1))
WRONG: dict[str, Case] = {
    "src_rank": (
        lambda rank: shard_tensor(numbered((4, 4)), ROWS, src_rank=rank),
        ValueError, r"src_rank=\d on rank \d does not match with src_rank=\d on rank \d"),
    "spec": (
        lambda rank: shard_tensor(numbered((4, 4)), chunks(0, [rank, 1, 2, 3])),
        ValueError, "does not match with sharding_spec"),
    "spec on one rank": (
        lambda rank: shard_tensor(numbered((4, 4)), chunks(rank // 3, range(4))),
        ValueError, "does not match with sharding_spec"),
    "size": (
        lambda rank: shard_tensor(numbered((4, 4 + rank // 3)), ROWS),
        ValueError, "does not match with size"),
    "dtype": (
        lambda rank: shard_tensor(numbered((4,), [torch.int64, torch.int32][rank % 2]), ROWS),
        ValueError, "does not match with dtype"),
    "strides": (
        lambda rank: shard_tensor(numbered((4, 4)).t(), ROWS),
        ValueError, "not a contiguous Tensor"),
    "strides on one rank": (
        lambda rank: shard_tensor(numbered((4, 4)).t() if rank == 2 else numbered((4, 4)), ROWS),
        ValueError, "not a contiguous Tensor"),
    "cover": (
        lambda rank: shard_tensor(numbered((12, 12)), SHORT),
        NotImplementedError, "not implemented yet!"),
    "cover, on one rank": (
        lambda rank: shard_tensor(numbered((12, 12)), SHORT if rank == 1 else ROWS),
        NotImplementedError, "not implemented yet!"),
    "dim": (
        lambda rank: shard_tensor(numbered((4, 4)), chunks(2, range(4))),
        ValueError, "Invalid sharding dim"),
    "rank of a shard": (
        lambda rank: shard_tensor(numbered((4, 4)), chunks(0, [7])),
        ValueError, "Global rank 7 does not exist"),
    "rank of the source": (
        lambda rank: shard_tensor(numbered((4, 4)), ROWS, src_rank=4),
        ValueError, "src_rank=4 is not part of"),
    "no spec": (
        lambda rank: shard_tensor(numbered((4, 4)), "rows"),  # type: ignore[arg-type]
        ValueError, "Expecting ShardingSpec but got: str"),
    "sharded": (
        lambda rank: shard_tensor(shard_tensor(numbered((4, 4)), ROWS), ROWS),
        ValueError, "sharded already"),
    "no values": (
        lambda rank: shard_tensor(torch.empty(4, 4, device="meta"), ROWS),
        ValueError, "meta tensor on src_rank=0"),
}  # fmt: skip


@each("case", WRONG)
def test_all_ranks_raise(case: str) -> None:
    program, kind, pattern = WRONG[case]
    check_all_raise(4, program, kind, pattern)


def test_a_partial_cover_is_a_value_error_too() -> None:
    assert issubclass(PartialCoverError, ValueError)
    check_all_raise(
        2, lambda rank: shard_tensor(numbered((12, 12)), SHORT), PartialCoverError, r"12, 12"
    )


# -- parameters ------------------------------------------------------------------------------------


def test_a_parameter_becomes_sharded() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(12, 12)

    def program(rank: int) -> None:
        linear: Any = nn.Linear(12, 12)  # other values
        if rank == 0:
            linear.load_state_dict(whole.state_dict())
        shard_parameter(linear, "weight", ROWS)
        assert isinstance(linear.weight, ShardedTensor)
        assert isinstance(linear.weight, nn.Parameter)
        assert linear.weight.requires_grad
        part = whole.weight[3 * rank : 3 * rank + 3]
        assert torch.equal(linear.weight.local_tensor(), part)
        assert linear.weight.local_tensor().is_leaf
        assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]

    on(4, program)


@each("kind", ["parameter", "frozen parameter", "buffer", "attribute"])
def test_what_can_be_replaced(kind: str) -> None:
    def program(rank: int) -> None:
        module: Any = nn.Module()
        if kind == "buffer":
            module.register_buffer("table", numbered((6,), torch.int64))
        elif kind == "attribute":
            module.table = numbered((6,))
        else:
            frozen = kind == "frozen parameter"
            module.table = nn.Parameter(numbered((6,)), requires_grad=not frozen)
        shard_parameter(module, "table", chunks(0, [0, 1]))
        ((name, found),) = module.named_parameters()
        assert name == "table"
        assert found is module.table
        assert found.requires_grad == (kind == "parameter")
        assert module.table.local_tensor().tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]
        assert not module._buffers

    on(2, program)


def linear() -> nn.Linear:
    return nn.Linear(12, 12)


def with_bias(value: object) -> nn.Linear:
    module = linear()
    del module.bias
    module.bias = value  # type: ignore[assignment]
    return module


class Computed(nn.Module):
    """Has a tensor that nobody can replace."""

    @property
    def weight(self) -> Tensor:
        return torch.ones(4)


WRONG_PARAMETERS: dict[str, tuple[Callable[[int], nn.Module], str, type[Exception], str]] = {
    "name": (lambda rank: linear(), "foo", AttributeError, "Linear has no attribute `foo`"),
    "name on one rank": (
        lambda rank: with_bias("x") if rank else nn.Linear(12, 12, bias=False),
        "bias",
        ValueError,
        "Expected Linear.bias to be a Tensor, but found",
    ),
    "a string": (
        lambda rank: with_bias("foo"),
        "bias",
        ValueError,
        "Expected Linear.bias to be a Tensor, but found str",
    ),
    "strides": (
        lambda rank: with_bias(numbered((10, 10)).t()),
        "bias",
        ValueError,
        "param: bias is not a contiguous Tensor",
    ),
    "a property": (lambda rank: Computed(), "weight", ValueError, "Computed.weight is computed"),
}


@each("case", WRONG_PARAMETERS)
def test_parameters_that_raise_on_all_ranks(case: str) -> None:
    make, name, kind, pattern = WRONG_PARAMETERS[case]
    check_all_raise(4, lambda rank: shard_parameter(make(rank), name, ROWS), kind, pattern)


def test_a_parameter_that_raises_is_as_it_was() -> None:
    def program(rank: int) -> None:
        module = linear()
        before = module.weight
        with pytest.raises(ValueError, match="does not match with src_rank"):
            shard_parameter(module, "weight", ROWS, src_rank=rank)
        assert module.weight is before

    on(4, program)


def test_a_parameter_is_not_sharded_twice() -> None:
    def program(rank: int) -> None:
        module = linear()
        shard_parameter(module, "weight", ROWS)
        shard_parameter(module, "weight", ROWS)

    check_all_raise(4, program, ValueError, r"sharded already: use its reshard\(spec\)")
