"""Replicas train as one module does on all rows; what is wrong is said by name, on all ranks."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.parallel.data_parallel.models import (
    ROWS,
    WIDTH,
    batch,
    compare_training,
    gradients,
    mlp,
    mse,
    same_gradients,
    seeded,
)
from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    MixedPrecision,
    RowwiseParallel,
    parallelize_module,
)
from tilework.testing import run_ranks

SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]
EACH_SETTING = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "plain")


def train(model: nn.Module, ranks: int = 2, **settings: Any) -> None:
    run_ranks(ranks, lambda rank: compare_training(rank, ranks, model, **settings))


# -- values ------------------------------------------------------------------------------------


@EACH_SETTING
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_those_of_all_rows(settings: dict[str, Any], ranks: int) -> None:
    train(mlp(), ranks, **settings)


@EACH_SETTING
def test_between_processes(settings: dict[str, Any]) -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        compare_training(rank, 2, model, **settings)

    run_ranks(2, program, kind="processes")


def test_bits_do_not_depend_on_buckets_or_runs() -> None:
    model: Any = mlp()

    def program(rank: int) -> list[Sequence[Tensor]]:
        results = []
        for megabytes in (1e-5, 1e-4, 1e-3, 25):
            ddp: Any = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=megabytes)
            for step in range(2):
                ddp.zero_grad()
                x, y = batch(2, step)
                mse(ddp(x[rank::2]), y[rank::2]).backward()
            results.append(gradients(ddp))
        return results

    first, *others = [result for ranks in run_ranks(2, program) for result in ranks]
    for other in others:
        assert all(map(torch.equal, first, other))


class Shared(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).tanh())
        return y


@EACH_SETTING
def test_shared_weights(settings: dict[str, Any]) -> None:
    train(seeded(Shared), **settings)


class Branches(nn.Module):
    """Two layers, of which inputs choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, right: bool) -> Tensor:
        y: Tensor = self.right(x) if right else self.left(x)
        return y


@pytest.mark.parametrize("view", [False, True])
def test_parameters_that_some_ranks_do_not_use(view: bool) -> None:
    model: Any = seeded(Branches)

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(
            copy.deepcopy(model), find_unused_parameters=True, gradient_as_bucket_view=view
        )
        x, y = batch(2)
        for _ in range(3):
            plain: Any = copy.deepcopy(ddp.module)
            plain.zero_grad()
            ddp.zero_grad()
            for r in range(2):
                own = slice(r * ROWS, (r + 1) * ROWS)
                (mse(plain(x[own], bool(r)), y[own]) / 2).backward()
            own = slice(rank * ROWS, (rank + 1) * ROWS)
            mse(ddp(x[own], bool(rank)), y[own]).backward()
            same_gradients(ddp.module, plain)

    run_ranks(2, program)


@pytest.mark.parametrize("view", [False, True])
def test_what_no_rank_uses_keeps_its_gradient(view: bool) -> None:
    model: Any = seeded(Branches)

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(
            copy.deepcopy(model), find_unused_parameters=True, gradient_as_bucket_view=view
        )
        x, _ = batch(2)
        ddp(x[:ROWS], True).sum().backward()
        assert ddp.module.left.weight.grad is None
        before = ddp.module.right.weight.grad.clone()
        ddp(x[:ROWS], False).sum().backward()
        assert torch.equal(ddp.module.right.weight.grad, before)

    run_ranks(2, program)


class Frozen(nn.Module):
    """A layer that can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.base(x))
        return y


def test_frozen_parameters_that_are_unfrozen_later() -> None:
    model: Any = seeded(Frozen)

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        x, y = batch(2)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for frozen in (True, True, False, False, True):
            for each in (plain, ddp.module):
                each.base.requires_grad_(not frozen)
                each.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp.module, plain)

    run_ranks(2, program)


def test_a_module_that_changes_between_steps() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        x, y = batch(2)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for step in range(3):
            if step == 1:
                extra = seeded(lambda: nn.Linear(WIDTH, WIDTH))
                for each in (plain, ddp.module):
                    each.append(copy.deepcopy(extra))
            plain.zero_grad()
            ddp.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp.module, plain)

    run_ranks(2, program)


@pytest.mark.parametrize("view", [False, True])
def test_gradients_accumulate_without_synchronisation(view: bool) -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=view)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for _ in range(2):
            plain.zero_grad()
            ddp.zero_grad()
            for part in range(3):
                x, y = batch(2, part)
                mse(plain(x), y).backward()
                if part < 2:
                    with ddp.no_sync():
                        mse(ddp(x[own]), y[own]).backward()
                else:
                    mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp, plain)

    run_ranks(2, program)


def test_accumulation_without_zeroing() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for step in range(3):
            x, y = batch(2, step)
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp, plain)

    run_ranks(2, program)


@EACH_SETTING
def test_two_forward_passes_before_one_backward(settings: dict[str, Any]) -> None:
    train(mlp(), run=lambda model, x: model(x) + model(2 * x), **settings)


def test_two_forward_passes_and_two_backward_passes() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for each, rows in ((plain, slice(None)), (ddp, own)):
            losses = [mse(each(x[rows]), y[rows]) for x, y in (batch(2, 0), batch(2, 1))]
            for loss in losses:
                loss.backward()
        same_gradients(ddp, plain)

    run_ranks(2, program)


class Embedded(nn.Module):
    """A table with sparse gradients before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.layer(self.table(ids))
        return y


@pytest.mark.parametrize("view", [False, True])
def test_sparse_gradients(view: bool) -> None:
    model: Any = seeded(Embedded)

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=view)
        for step in range(3):
            ids = torch.randint(10, (4, 3), generator=torch.Generator().manual_seed(step))
            plain.zero_grad()
            ddp.zero_grad()
            plain(ids).square().mean().backward()
            ddp(ids[rank * 2 : rank * 2 + 2]).square().mean().backward()
            assert ddp.module.table.weight.grad.is_sparse
            same_gradients(ddp, plain)

    run_ranks(2, program)


class ManyKinds(nn.Module):
    """Parameters of several dtypes, one of them complex, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.half_param = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.double_param = nn.Parameter(torch.ones(WIDTH, dtype=torch.double))
        self.complex_param = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.ones(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.half_param + x * self.double_param + (x * self.complex_param).abs()
        return y + self.empty.sum()


def test_parameters_of_many_dtypes() -> None:
    model = ManyKinds()
    train(model, tolerance={"rtol": 2e-2, "atol": 2e-2}, steps=2)


def test_a_module_on_two_devices() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = nn.Linear(2, 2)
            self.there = nn.Linear(2, 2, device="meta")

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.here(x), self.there(x.to("meta"))

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(seeded(Split), bucket_cap_mb=0.001)
        assert ddp.get_ddp_logging_data()["is_multi_device_module"]
        y, elsewhere = ddp(torch.full((1, 2), float(rank)))
        torch.autograd.backward([y.sum(), elsewhere.sum()])
        assert ddp.module.there.weight.grad.is_meta
        torch.testing.assert_close(ddp.module.here.weight.grad, torch.full((2, 2), 0.5))

    run_ranks(2, program)


# -- outputs -----------------------------------------------------------------------------------


@dataclass
class Result:
    first: Tensor | None
    others: dict[str, Tensor]


@dataclass(frozen=True)
class Fixed:
    first: Tensor
    others: tuple[Tensor, ...]


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


def outputs(kind: str, a: Tensor, b: Tensor) -> Any:
    if kind == "dataclass":
        return Result(a, {"b": b})
    if kind == "frozen":
        return Fixed(a, (b,))
    return Pair(a, [b]) if kind == "named" else {"a": a, "nested": {"b": (b, None, 3)}}


def read(output: Any) -> Tensor:
    if isinstance(output, Result):
        return output.others["b"] if output.first is None else output.first + output.others["b"]
    if isinstance(output, Fixed):
        return output.first + output.others[0]
    if isinstance(output, Pair):
        return output.left + output.right[0]
    both: Tensor = output["a"] + output["nested"]["b"][0]
    return both


class Packed(nn.Module):
    """Returns the outputs of two layers in a structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Any:
        return outputs(self.kind, self.a(x), self.b(x).relu())


@EACH_SETTING
@pytest.mark.parametrize("kind", ["dataclass", "frozen", "named", "dict"])
def test_structured_outputs(kind: str, settings: dict[str, Any]) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        result = model(x)
        assert type(result) is type(outputs(kind, x, x))
        return read(result)

    train(seeded(lambda: Packed(kind)), run=run, steps=2, **settings)


def test_a_dataclass_without_one_of_its_tensors() -> None:
    class Half(Packed):
        def forward(self, x: Tensor) -> Any:
            return Result(None, {"b": self.b(x)})

    train(
        seeded(lambda: Half("dataclass")),
        run=lambda model, x: read(model(x)),
        find_unused_parameters=True,
    )


# -- what is wrong is said by name -------------------------------------------------------------


def raised(ranks: int, program: Callable[[int], Any]) -> list[str]:
    """What each rank raised, as text; "" for none."""

    def guarded(rank: int) -> str:
        try:
            program(rank)
        except (RuntimeError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(ranks, guarded)


def test_unused_parameters_are_named_on_all_ranks() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(seeded(Branches))
        ddp(torch.ones(1, WIDTH), True).sum().backward()

    for text in raised(2, program):
        assert "have a gradient on no rank" in text
        assert "left.weight (Linear, [8, 8]), left.bias (Linear, [8])" in text
        assert "right" not in text
        assert "find_unused_parameters=True" in text


def test_ranks_with_different_graphs_all_raise() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(seeded(Branches), bucket_cap_mb=0.0001)
        ddp(torch.ones(1, WIDTH), rank == 1).sum().backward()

    for text in raised(3, program):
        assert "have a gradient not on all ranks" in text
        assert re.search(r"rank 0: right\.weight.*\n  rank 1: left\.weight", text)


def test_a_step_after_such_an_error_works() -> None:
    def program(rank: int) -> Tensor:
        ddp: Any = DistributedDataParallel(seeded(Branches))
        with pytest.raises(RuntimeError, match="on no rank"):
            ddp(torch.ones(1, WIDTH), True).sum().backward()
        ddp.zero_grad()
        x = torch.full((1, WIDTH), float(rank))
        (ddp(x, True) + ddp(x, False)).sum().backward()
        grad: Tensor = ddp.module.left.weight.grad
        return grad

    torch.testing.assert_close(run_ranks(2, program)[0], torch.full((WIDTH, WIDTH), 0.5))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda rank: nn.Linear(2, 2 + rank), r"weight is float32 \[2, 2\] on rank 0 and float32 "),
        (
            lambda rank: nn.Linear(2, 2).to(torch.double if rank else torch.float),
            r"weight is float32 \[2, 2\] on rank 0 and float64 \[2, 2\] on rank 1",
        ),
        (
            lambda rank: nn.Sequential(*[nn.Linear(2, 2)] * (1 + rank), nn.Linear(2, 1)),
            r"where rank 0 has 1\.weight, rank 1 has 2\.weight",
        ),
        (lambda rank: nn.Linear(2, 2, bias=rank == 0), r"rank 1 lacks bias, which rank 0 has"),
    ],
)
def test_replicas_that_differ(module: Callable[[int], nn.Module], message: str) -> None:
    for text in raised(2, lambda rank: DistributedDataParallel(module(rank))):
        assert text.startswith("ValueError: DistributedDataParallel needs the same parameters")
        assert re.search(message, text), text


def test_values_are_those_of_the_first_rank() -> None:
    def program(rank: int) -> tuple[float, float]:
        model: Any = nn.BatchNorm1d(2)
        with torch.no_grad():
            model.weight.fill_(rank + 1.0)
            model.running_mean.fill_(rank + 5.0)
        ddp: Any = DistributedDataParallel(model)
        return ddp.module.weight[0].item(), ddp.module.running_mean[0].item()

    assert run_ranks(2, program) == [(1.0, 5.0)] * 2


def test_values_that_are_not_sent_are_compared() -> None:
    def program(rank: int, same: bool) -> None:
        model: Any = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 1.0 if same else float(rank))
        nn.init.zeros_(model.bias)
        DistributedDataParallel(model, init_sync=False)

    assert raised(2, lambda rank: program(rank, True)) == ["", ""]
    for text in raised(2, lambda rank: program(rank, False)):
        assert re.search(r"weight is .* elements with hash \w+ on rank 0 and", text)


def test_misuse() -> None:
    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match="is not needed when a module doesn't have any"):
            DistributedDataParallel(nn.ReLU())
        ddp: Any = DistributedDataParallel(nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match="is a DistributedDataParallel already"):
            DistributedDataParallel(ddp)
        with pytest.raises(RuntimeError, match="its module '0' is a DistributedDataParallel"):
            DistributedDataParallel(nn.Sequential(ddp))
        with pytest.raises(TypeError, match=r"wraps an nn\.Module, got int"):
            DistributedDataParallel(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="only work with single-device modules"):
            DistributedDataParallel(nn.Linear(1, 1), device_ids=[0])
        with pytest.raises(ValueError, match="device_ids can only be None or contain a single"):
            DistributedDataParallel(nn.Linear(1, 1), device_ids=[0, 1])
        with pytest.raises(ValueError, match="bucket_cap_mb must be positive"):
            DistributedDataParallel(nn.Linear(1, 1), bucket_cap_mb=-1)
        mesh = init_device_mesh("cpu", (1, 1))
        with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
            DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh)
        with pytest.raises(RuntimeError, match="Cannot specify both"):
            DistributedDataParallel(
                nn.Linear(1, 1), device_mesh=mesh, process_group=dist.get_default_group()
            )
        with pytest.raises(ValueError, match="needs param_to_hook_all_reduce"):
            DistributedDataParallel(
                nn.Linear(1, 1), delay_all_reduce_named_params=[("bias", nn.Parameter())]
            )

    run_ranks(1, program)


# -- settings ----------------------------------------------------------------------------------


def test_buffers_are_those_of_the_first_rank() -> None:
    def program(rank: int, broadcast: bool | None) -> float:
        ddp: Any = DistributedDataParallel(nn.BatchNorm1d(1), broadcast_buffers=broadcast)
        for _ in range(2):
            ddp(torch.tensor([[rank + 0.0], [rank + 2.0]])).sum().backward()
        mean: float = ddp.module.running_mean.item()
        return round(mean, 4)

    assert run_ranks(2, lambda rank: program(rank, None)) == [0.19, 0.29]
    assert run_ranks(2, lambda rank: program(rank, False)) == [0.19, 0.38]


def test_reductions_that_are_delayed() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain, replica = copy.deepcopy(model), copy.deepcopy(model)
        delayed = [("0.weight", replica[0].weight), ("0.bias", replica[0].bias)]
        ddp: Any = DistributedDataParallel(
            replica,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=replica[0].weight,
        )
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for step in range(2):
            x, y = batch(2, step)
            plain.zero_grad()
            ddp.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp, plain)

    run_ranks(2, program)


def test_mixed_precision() -> None:
    model: Any = mlp()

    def program(rank: int) -> tuple[torch.dtype, torch.dtype, float]:
        precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model), mixed_precision=precision)
        plain: Any = copy.deepcopy(model)
        x, y = batch(2)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        out = ddp(x[own])
        mse(out.float(), y[own]).backward()
        mse(plain(x), y).backward()
        same_gradients(ddp, plain, rtol=0.05, atol=0.02)
        return out.dtype, next(ddp.parameters()).dtype, 0.0

    assert run_ranks(2, program)[0][:2] == (torch.bfloat16, torch.float32)


def test_state_dicts() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(mlp())
        saved = ddp.state_dict()
        assert all(name.startswith("module.") for name in saved)
        ddp.load_state_dict(saved)
        other: Any = mlp()
        nn.init.zeros_(other[0].weight)
        ddp.load_state_dict(other.state_dict())
        assert not ddp.module[0].weight.any()
        other.load_state_dict(ddp.module.state_dict())

    run_ranks(2, program)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda ddp: pickle.loads(pickle.dumps(ddp)),
        lambda ddp: _through_file(ddp),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_replicas_of_their_own(copied: Callable[[Any], Any]) -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
        x, y = batch(2)
        mse(ddp(x[rank::2]), y[rank::2]).backward()
        made = copied(ddp)
        for each in (ddp, made):
            each.zero_grad()
            mse(each(x[rank::2]), y[rank::2]).backward()
        assert all(map(torch.equal, gradients(ddp), gradients(made)))

    run_ranks(2, program)


def _through_file(ddp: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def test_inference_does_not_communicate() -> None:
    def program(rank: int) -> int:
        ddp: Any = DistributedDataParallel(nn.BatchNorm1d(2))
        before = dist.get_default_group().get_sequence_number_for_group()
        with torch.no_grad():
            ddp.eval()(torch.ones(2, 2))
        return dist.get_default_group().get_sequence_number_for_group() - before

    assert run_ranks(2, program) == [0, 0]


def test_the_module_may_be_compiled() -> None:
    train(seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())), steps=2)


def test_what_only_a_penalty_uses() -> None:
    """Its gradient may come before backward reaches an output."""
    train(
        mlp(),
        run=lambda m, x: m(x) + 0.01 * sum(p.square().sum() for p in m.parameters()),
        tolerance={"rtol": 1e-4, "atol": 1e-5},
    )
    model: Any = seeded(Branches)

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        out = ddp(torch.full((1, WIDTH), float(rank)), True)
        (out.sum() + ddp.module.left.weight.sum() + ddp.module.left.bias.sum()).backward()
        assert ddp.module.left.bias.grad.tolist() == [1.0] * WIDTH

    run_ranks(2, program)


def test_the_module_by_itself_is_not_synchronised() -> None:
    def program(rank: int) -> float:
        ddp: Any = DistributedDataParallel(nn.Linear(1, 1))
        ddp.module(torch.full((1, 1), float(rank))).sum().backward()
        grad: float = ddp.module.weight.grad.item()
        return grad

    assert run_ranks(2, program) == [0.0, 1.0]


# -- with other kinds of parallelism -----------------------------------------------------------


def test_beside_tensor_parallelism() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        inner: Any = copy.deepcopy(model)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(inner, mesh["tp"], plan)
        ddp: Any = DistributedDataParallel(inner, device_mesh=mesh["dp"], bucket_cap_mb=0.001)
        plain: Any = copy.deepcopy(model)
        own = slice(rank // 2 * ROWS, (rank // 2 + 1) * ROWS)
        for step in range(3):
            x, y = batch(2, step)
            plain.zero_grad()
            ddp.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            for own_param, wanted in zip(ddp.parameters(), plain.parameters(), strict=True):
                grad: Any = own_param.grad
                torch.testing.assert_close(grad.full_tensor(), wanted.grad)

    run_ranks(4, program)


def test_dtensor_parameters_on_another_axis() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module: Any = nn.Module()
        for name, placement in (("cut", Shard(0)), ("same", Replicate())):
            value = distribute_tensor(torch.ones(4), mesh["tp"], [placement])
            module.register_parameter(name, nn.Parameter(value))
        module.forward = lambda x: (module.cut * x + module.same).sum()
        ddp: Any = DistributedDataParallel(module, device_mesh=mesh["dp"])
        ddp(float(rank // 2)).backward()
        assert module.cut.grad.full_tensor().tolist() == [0.5] * 4
        assert module.same.grad.full_tensor().tolist() == [1.0] * 4

    run_ranks(4, program)


# -- logging data ------------------------------------------------------------------------------


def test_logging_data() -> None:
    def program(rank: int) -> dict[str, Any]:
        ddp: Any = DistributedDataParallel(mlp(), bucket_cap_mb=0.0001, static_graph=True)
        for step in range(3):
            x, _ = batch(2, step)
            ddp(x).sum().backward()
        data: dict[str, Any] = ddp.get_ddp_logging_data()
        return data

    data = run_ranks(2, program)[1]
    assert data["world_size"] == 2
    assert data["rank"] == 1
    assert data["module_name"] == "Sequential"
    assert data["static_graph"] is True
    assert data["dtypes"] == "float32"
    assert data["iteration"] == 3
    assert data["has_rebuilt_buckets"] is True
    assert sum(map(int, data["bucket_sizes"].split(", "))) == data["total_parameter_size_bytes"]
