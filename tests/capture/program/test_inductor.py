"""Programs through Inductor: near the step itself, with collectives in their order."""

from __future__ import annotations

import ctypes
import importlib
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.capture.twins import advance, nearly, run_twins, tensors_of
from tilework import _core
from tilework.capture import capture
from tilework.capture.modules import compiled_function
from tilework.capture.program import inductor, passes
from tilework.dtensor import Shard, distribute_module, distribute_tensor, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from tilework.testing import run_ranks

#: Compilers are slow where others are at work, too.
LIMIT = timedelta(minutes=5)
pytestmark = pytest.mark.timeout(LIMIT.total_seconds())


def need_compiler() -> None:
    """Skip where there is no C++ compiler. The import takes seconds: only tests that run do it."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        pytest.skip("Inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def compiler() -> None:
    need_compiler()


def sharded_rows(model: nn.Module) -> nn.Module:
    return distribute_module(model, init_device_mesh("cpu", (2,)))


def in_parallel(model: nn.Module) -> nn.Module:
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


@pytest.mark.parametrize("wrap", [in_parallel, fully_shard])
def test_training_with_adamw_a_schedule_and_dropout(wrap: Any) -> None:
    def program(rank: int) -> None:
        warnings.simplefilter("ignore")
        schedulers: list[Any] = []

        def make() -> Any:
            model = nn.Sequential(
                nn.Linear(8, 16, bias=False),
                nn.GELU(),
                nn.Dropout(0.2),
                nn.Linear(16, 8, bias=False),
            )
            wrapped = wrap(model)
            optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
            schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))

            def step(x: Tensor) -> Any:
                optimizer.zero_grad()
                loss = wrapped(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            return step, tensors_of(wrapped, optimizer)

        torch.manual_seed(1)
        batches = [(torch.randn(6, 8),) for _ in range(5)]
        run_twins(make, batches, lambda: advance(schedulers), nearly, backend="inductor")

    run_ranks(2, program, timeout=LIMIT)


def test_all_sizes_share_one_compiled_program() -> None:
    def program(rank: int) -> None:
        warnings.simplefilter("ignore")

        def make() -> Any:
            model = sharded_rows(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2)))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

            def step(x: Tensor) -> Any:
                optimizer.zero_grad()
                result = model(x)
                loss = result.view(-1, 4).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach(), result.detach()

            return step, tensors_of(model, optimizer)

        torch.manual_seed(1)
        mesh = init_device_mesh("cpu", (2,))
        sizes = (4, 6, 8, 10, 40, 12, 6)  # the first is not recorded, two are, the fourth checks
        batches = [(distribute_tensor(torch.randn(n, 8), mesh, [Shard(0)]),) for n in sizes]
        captured = run_twins(make, batches, same=nearly, backend="inductor")
        assert len(captured.records) == 1

    run_ranks(2, program, timeout=LIMIT)


def test_a_cache_that_grows_has_one_compiled_program() -> None:
    def make() -> Any:
        linear, cache = nn.Linear(8, 8), [torch.zeros(2, 1, 8)]

        @torch.no_grad()
        def step(x: Tensor) -> Any:
            cache[0] = torch.cat([cache[0], linear(x)], 1)
            result = nn.functional.scaled_dot_product_attention(x, cache[0], cache[0])
            length, number = cache[0].shape[1], x[0, 0, 0].item()
            quotient = torch.div(x[0, 0, 1], number, rounding_mode="floor")
            return result, length, length * number, number * x[0, 0, 1], quotient

        return step, lambda: {"keys": cache[0]}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [(torch.randn(2, 1, 8),) for _ in range(7)]
        captured = run_twins(make, batches, same=nearly, backend="inductor")
    assert len(captured.records) == 1


def test_where_no_program_of_several_sizes_compiles_python_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(size: int) -> Any:
        raise RuntimeError("no symbols")

    monkeypatch.setattr(inductor, "Symbols", refuse)
    layer = nn.Linear(4, 4)
    run = compiled_function(layer, "inductor")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11):
            x = torch.randn(rows, 4)
            assert nearly(run(x), layer(x))
            run(x).sum().backward()
    assert sum("cannot compile" in str(each.message) for each in told) == 2  # forward and backward


def test_a_truncated_library_in_the_cache_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "kernel.so"
    library.write_bytes(Path(_core.__file__).read_bytes()[:100])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch scripts functions there
        module: Any = importlib.import_module("torch._inductor.compile_fx")
    compile_fx = module.compile_fx

    def loading(*args: Any) -> Any:
        if library.exists():
            ctypes.CDLL(str(library))  # "file too short", as the loader of a kernel says
        return compile_fx(*args)

    monkeypatch.setattr(module, "compile_fx", loading)
    program = capture(lambda x: x.sin() + 1, backend="inductor")
    for _ in range(3):
        assert program(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    assert not library.exists()


def reduced(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.02)


def reduced_in_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    planned = parallelize_module(
        model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    return DistributedDataParallel(planned, device_mesh=mesh["dp"], bucket_cap_mb=0.02)


@pytest.mark.parametrize(("ranks", "width", "wrap"), [
    (2, 8, reduced), (2, 64, reduced), (4, 64, reduced_in_parallel),
])  # fmt: skip
def test_gradients_in_memory_of_the_group(ranks: int, width: int, wrap: Any) -> None:
    def program(rank: int) -> None:
        warnings.simplefilter("error")  # and nothing runs as Python

        def make() -> Any:
            model = wrap(nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

            def step(x: Tensor) -> Any:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            return step, tensors_of(model, optimizer)

        torch.manual_seed(2 * rank // ranks)
        batches = [(torch.randn(6, 8),) for _ in range(6)]
        program = run_twins(make, batches, same=nearly, backend="inductor")
        assert program.records[0].is_compiled

    run_ranks(ranks, program, timeout=LIMIT)


def test_views_that_change_their_shape_in_memory_that_inputs_share() -> None:
    def make() -> Any:
        memory = torch.zeros(24)
        first, second = memory[:16].view(2, 8), memory[8:]

        def step(x: Tensor) -> Any:
            first.add_(x)
            view = second.view(2, 8)
            view.t_()
            before = (view * 2).sum(1)
            second.mul_(0.5)
            return before, (view + 1) @ x, first.sum(1, keepdim=True) * first

        return step, lambda: {"memory": memory}

    batches = [(torch.randn(2, 8),) for _ in range(4)]
    program = run_twins(make, batches, same=nearly, backend="inductor")
    assert program.records[0].is_compiled


def test_an_overflow_undoes_what_ran_before_the_branch() -> None:
    def make() -> Any:
        layer, before, after = nn.Linear(6, 2), torch.zeros(300), torch.zeros(300)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            before.add_(1)
            scaler.scale(layer(x).square().mean()).backward()
            scaler.step(optimizer)
            after.add_(x.sum())
            scaler.update()

        return step, lambda: {"weight": layer.weight, "before": before, "after": after}

    batches = [(torch.randn(4, 6) * (1e38 if i == 4 else 1),) for i in range(7)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # recorded again
        run_twins(make, batches, same=nearly, backend="inductor")


def test_messages_between_ranks_in_a_compiled_program() -> None:
    def program(rank: int) -> None:
        def make() -> Any:
            layer = nn.Linear(8, 8)

            @torch.no_grad()
            def step(x: Tensor) -> Any:
                hidden, received = layer(x).relu() + 1, torch.empty_like(x)
                sent = dist.isend(hidden, 1 - rank)
                dist.recv(received, 1 - rank)
                result = (received * 2 + hidden).sum(0)
                assert sent is not None
                sent.wait()
                return result, received

            return step, tensors_of(layer)

        torch.manual_seed(rank)
        batches = [(torch.randn(6, 8),) for _ in range(4)]
        captured = run_twins(make, batches, same=nearly, backend="inductor")
        assert captured.records[0].is_compiled

    run_ranks(2, program, timeout=LIMIT)


def test_a_second_process_takes_the_program_from_torchs_cache() -> None:
    def hits() -> int:
        counters: Any = importlib.import_module("torch._dynamo.utils").counters
        return int(counters["aot_autograd"]["autograd_cache_hit"])

    layer, found = nn.Linear(3, 5), []
    for _ in range(2):  # as another process would: a program of its own
        program = capture(lambda x: layer(x).detach().sin(), backend="inductor")
        for _ in range(3):
            program(torch.ones(2, 3))
        found.append(hits())
    assert found[1] == found[0] + 1


def test_collectives_that_passes_merge_and_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "LEAST_BYTES", 1)
    monkeypatch.setattr(passes, "has_spare_core", lambda ranks: True)

    def program(rank: int) -> str:
        def step(x: Tensor, y: Tensor) -> Any:
            totals = [x * 1, y * 1]
            for each in totals:
                dist.all_reduce(each)
                each.mul_(0.5)
            return *totals, y.sin()

        batches = [(torch.randn(3), torch.randn(2, 3)) for _ in range(4)]
        return str(run_twins(lambda: (step, dict), batches, same=nearly, backend="inductor"))

    text = run_ranks(2, program, timeout=LIMIT)[0]
    assert text.count("allreduce([") == 1
    assert "wait(" in text
