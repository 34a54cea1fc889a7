"""Steps of many kinds: captured, they do to every bit what they do without."""

from __future__ import annotations

import gc
import itertools
import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilework.distributed as dist
from tests.capture.twins import advance, run_twins, same_bits, tensors_of
from tilework.capture import Program, capture
from tilework.capture.step import MOST_REPLACED, MOST_UNUSED, key_of_call
from tilework.dtensor import (
    DeviceMesh,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.errors import CaptureError, CollectiveMismatchError, DistBackendError, PeerLostError
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
)
from tilework.testing import run_ranks

Case = Callable[[int], None]
CASES: dict[str, Case] = {}
#: The same, which pytest reads when all are there.
NAMES: list[str] = []


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_does_what_the_step_does(name: str, ranks: int) -> None:
    with warnings.catch_warnings():  # outside of the ranks' threads, which share the filters
        warnings.simplefilter("ignore")
        run_ranks(ranks, lambda rank: CASES[name](ranks))


@pytest.mark.parametrize("name", ["tensor_parallel_layers", "fully_sharded_layers"])
def test_captured_steps_run_on_engines_of_torch(name: str) -> None:
    run_ranks(2, lambda rank: CASES[name](2), backend="gloo")


def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


def rows(mesh: DeviceMesh, count: int, width: int = 8) -> Tensor:
    return distribute_tensor(torch.randn(count, width), mesh, [Shard(0)])


def perceptron(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 8))


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@case
def forward_and_backward_of_uneven_rows(ranks: int) -> None:
    mesh = mesh_of(ranks)

    def make() -> Any:
        model = distribute_module(perceptron(), mesh)

        def step(x: Tensor) -> Any:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step, tensors_of(model)

    run_twins(make, [(rows(mesh, 8 * ranks + 1),) for _ in range(4)])


@case
def adamw_with_clipping_and_a_scheduler(ranks: int) -> None:
    mesh, schedulers = mesh_of(ranks), []

    def make() -> Any:
        model = distribute_module(perceptron(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        schedulers.append(scheduler)

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss.detach(), scheduler.get_last_lr()

        return step, tensors_of(model, optimizer)

    program = run_twins(
        make,
        [(rows(mesh, 8 * ranks + 1),) for _ in range(20)],
        lambda: advance(schedulers),
    )
    assert len(program.records) == 1  # the learning rate is an input


@case
def optimizers_with_foreach_and_fused(ranks: int) -> None:
    mesh = mesh_of(ranks)

    def make() -> Any:
        model = distribute_module(perceptron(), mesh)
        first = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
        second = torch.optim.Adam(model.parameters(), fused=True)
        train = training(model, first)

        def step(x: Tensor) -> Any:
            loss = train(x)
            second.step()
            return loss

        return step, tensors_of(model, second)

    run_twins(make, [(rows(mesh, 8 * ranks),) for _ in range(5)])


@case
def micro_batches_in_a_list(ranks: int) -> None:
    mesh = mesh_of(ranks)

    def make() -> Any:
        model = distribute_module(perceptron(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(batches: list[Tensor]) -> Any:
            optimizer.zero_grad()
            total = torch.zeros(())
            for x in batches:
                loss = model(x).square().mean() / len(batches)
                loss.backward()
                total = total + loss.detach().full_tensor()
            optimizer.step()
            return total

        return step, tensors_of(model, optimizer)

    run_twins(make, [([rows(mesh, 4 * ranks) for _ in range(3)],) for _ in range(4)])


@case
def dropout_of_dtensors_in_a_checkpoint(ranks: int) -> None:
    mesh = mesh_of(ranks)

    def make() -> Any:
        model = distribute_module(perceptron(nn.Dropout(0.3)), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recomputed = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
        return training(recomputed, optimizer), tensors_of(model)  # type: ignore[arg-type]

    run_twins(make, [(rows(mesh, 4 * ranks),) for _ in range(5)])


@case
def a_plain_model_with_dropout_and_batch_norm(ranks: int) -> None:
    def make() -> Any:
        model = perceptron(nn.Dropout(0.3), nn.BatchNorm1d(16))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
            optimizer.step()
            return loss.item()

        return step, tensors_of(model, optimizer)

    run_twins(make, [(torch.randn(6, 8),) for _ in range(5)])


@case
def tensor_parallel_layers(ranks: int) -> None:
    mesh = mesh_of(ranks)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def make() -> Any:
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        model = parallelize_module(model, mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters())
        return training(model, optimizer), tensors_of(model, optimizer)

    torch.manual_seed(5)
    run_twins(make, [(torch.randn(6, 8),) for _ in range(4)])


@case
def embedding_of_cut_rows_and_loss_parallel(ranks: int) -> None:
    mesh = mesh_of(ranks)
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }

    def make() -> Any:
        model: Any = nn.ModuleDict({"table": nn.Embedding(16, 8), "head": nn.Linear(8, 16)})
        parallelize_module(model, mesh, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Any:
            optimizer.zero_grad()
            with loss_parallel():
                scores = model["head"](model["table"](x)).flatten(0, 1)
                loss: Any = F.cross_entropy(scores, y.flatten())
                loss.backward()
            optimizer.step()
            return loss.detach()

        return step, tensors_of(model)

    torch.manual_seed(3)
    run_twins(make, [(torch.randint(16, (2, 5)), torch.randint(16, (2, 5))) for _ in range(4)])


@case
def a_transformer_with_a_mask(ranks: int) -> None:
    mesh = mesh_of(ranks)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
            self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores: Tensor = self.head(self.encoder(self.table(x), mask))
            return scores

    def make() -> Any:
        model = distribute_module(Model(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mask = nn.Transformer.generate_square_subsequent_mask(5)

        def step(x: Tensor, y: Tensor) -> Any:
            optimizer.zero_grad()
            loss: Any = F.cross_entropy(model(x, mask).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, tensors_of(model)

    def tokens() -> Tensor:
        return distribute_tensor(torch.randint(16, (2 * ranks, 5)), mesh, [Shard(0)])

    run_twins(make, [(tokens(), tokens()) for _ in range(4)])


@case
def data_parallel_with_batch_norm(ranks: int) -> None:
    def make() -> Any:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), head)
        wrapped = DistributedDataParallel(model)
        return training(wrapped, torch.optim.SGD(model.parameters(), lr=0.1)), tensors_of(model)

    run_twins(make, [(torch.randn(4, 3, 8, 8),) for _ in range(5)])


@case
def data_parallel_without_synchronisation(ranks: int) -> None:
    def make() -> Any:
        model = nn.Sequential(nn.Linear(8, 300), nn.GELU(), nn.Linear(300, 8))
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(batches: list[Tensor]) -> Any:
            optimizer.zero_grad()
            with wrapped.no_sync():
                for x in batches[:-1]:
                    wrapped(x).square().mean().backward()
            loss: Any = wrapped(batches[-1]).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, tensors_of(model, optimizer)

    run_twins(make, [([torch.randn(6, 8) for _ in range(3)],) for _ in range(5)])


@case
def fully_sharded_layers(ranks: int) -> None:
    def make() -> Any:
        model = nn.Sequential(nn.Linear(8, 300), nn.GELU(), nn.Linear(300, 300), nn.Linear(300, 8))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        return training(model, optimizer), tensors_of(model, optimizer)

    run_twins(make, [(torch.randn(6, 8),) for _ in range(4)])


@case
def autocast_with_float32_masters(ranks: int) -> None:
    mesh = mesh_of(ranks)

    def make() -> Any:
        model = distribute_module(perceptron(), mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, tensors_of(model, optimizer)

    run_twins(make, [(rows(mesh, 8 * ranks),) for _ in range(4)])


@case
def decoding_with_a_cache(ranks: int) -> None:
    def make() -> Any:
        cache, place = torch.zeros(2, 16, 8), torch.zeros(1, dtype=torch.long)
        linear = nn.Linear(8, 8)

        @torch.inference_mode()
        def step(x: Tensor) -> Any:
            cache.index_copy_(1, place, linear(x))
            place.add_(1)
            return F.scaled_dot_product_attention(x, cache, cache)

        return step, lambda: {"cache": cache, "place": place}

    run_twins(make, [(torch.randn(2, 1, 8),) for _ in range(6)])


@case
def two_axes_a_double_backward_and_a_hook(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (max(ranks // 2, 1), min(ranks, 2)))

    def make() -> Any:
        whole = torch.randn(8, 8)
        weight: Any = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(1)]))
        weight.register_hook(lambda grad: grad * 2)

        def step(x: Tensor) -> Any:
            weight.grad = None
            y: Any = (x @ weight).redistribute(placements=[Shard(0), Replicate()])
            z = y.cumsum(1).topk(3, dim=1).values.sum()
            (grad,) = torch.autograd.grad(z, weight, create_graph=True)
            (grad.square().sum() + z).backward()
            return z.detach(), {"y": y.detach().full_tensor()}

        return step, lambda: {"grad": weight.grad}

    placements: Any = [Shard(0), Replicate()]
    batches = [(distribute_tensor(torch.randn(8, 8), mesh, placements),) for _ in range(4)]
    run_twins(make, batches)


@case
def several_sizes_in_one_program(ranks: int) -> None:
    mesh = mesh_of(ranks)

    def make() -> Any:
        model = distribute_module(perceptron(nn.Dropout(0.2)), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        train = training(model, optimizer)
        return lambda x: (train(x), model(x).detach()), tensors_of(model, optimizer)

    sizes = (4, 6, 8, 5, 20, 3, 6, 8)
    program = run_twins(make, [(rows(mesh, size * ranks),) for size in sizes])
    assert len(program.records) == 1
    assert "k0" in str(program)


@case
def a_cache_that_grows_in_one_program(ranks: int) -> None:
    class Cache:
        keys = torch.zeros(2, 1, 8)

    def make() -> Any:
        cache, linear = Cache(), nn.Linear(8, 8)

        @torch.no_grad()
        def step(x: Tensor) -> Tensor:
            cache.keys = torch.cat([cache.keys, linear(x)], 1)
            return F.scaled_dot_product_attention(x, cache.keys, cache.keys)

        return step, lambda: {"keys": cache.keys}

    program = run_twins(make, [(torch.randn(2, 1, 8),) for _ in range(9)])
    assert len(program.records) == 1


NAMES.extend(CASES)


# -- what must hold ------------------------------------------------------------------------------


def test_schedules_flags_and_numbers_are_not_constants() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
            self.scale = 1.0
            self.table = torch.ones(4).numpy()

        def step(self, x: Tensor) -> Any:
            return (self.model(x) * self.scale * float(self.table[1])).detach()

    trainer = Trainer()
    program = capture(trainer.step)
    x = torch.ones(2, 4)
    trainer.model.eval()
    for scale in (1.0, 1.0, 1.0, 3.0, 1.0, 3.0):
        trainer.scale = scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert same_bits(program(x), trainer.step(x))
    assert len(program.records) == 1
    trainer.model.train()
    with pytest.warns(UserWarning, match=r"training was False and is True"):
        program(x)
    assert len(program.records) == 2
    trainer.table[1] = 2.0
    trainer.model.eval()
    assert same_bits(program(x), trainer.step(x))  # the array is read, and the program is shared


def test_a_variable_that_is_given_another_tensor_is_read_anew() -> None:
    factor = torch.tensor(1.0)

    def step(x: Tensor) -> Any:
        return x * factor

    program = capture(step)
    for value in (1.0, 2.0, 3.0, 4.0):
        factor = torch.tensor(value)
        assert program(torch.ones(3)).tolist() == [value] * 3
    assert len(program.records) == 1


def test_numbers_that_are_equal_but_not_the_same_have_programs_of_their_own() -> None:
    program = capture(lambda x, y: x / y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (0.0, 0.0, -0.0, 0.0, -0.0):
            expected = torch.ones(1) / number
            assert torch.equal(program(torch.ones(1), number), expected)
    assert len(program.records) == 1


def test_constants_of_another_class_or_sign_have_programs_of_their_own() -> None:
    class Settings:
        factor: float = 2

    def step(x: Tensor) -> Tensor:
        return x * Settings.factor

    program = capture(step)
    x = torch.tensor([3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for Settings.factor in (2, 2, 2.0, 2, 1, True, 0.0, -0.0, -0.0):
            found, expected = program(x), step(x)
            assert found.dtype is expected.dtype
            assert same_bits(found, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_of_each_device_has_programs_of_its_own(device: str) -> None:
    before = key_of_call((torch.ones(2),), {})[1]
    torch.set_autocast_enabled(device, True)
    try:
        assert key_of_call((torch.ones(2),), {})[1] != before
    finally:
        torch.set_autocast_enabled(device, False)


@pytest.mark.parametrize(
    ("kind", "options", "records"),
    [
        (torch.optim.Adam, lambda x: {"lr": np.float64(x), "betas": [x, 0.99]}, 1),
        (torch.optim.SGD, lambda x: {"lr": np.float32(x)}, 3),
    ],
)
def test_options_in_numbers_of_numpy_and_in_lists_are_read(
    kind: Any, options: Any, records: int
) -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def make() -> Any:
        model = nn.Linear(8, 8)
        optimizers.append(kind(model.parameters(), **options(0.1)))
        return training(model, optimizers[-1]), tensors_of(model, optimizers[-1])

    def halve() -> None:
        for optimizer in optimizers:
            group = optimizer.param_groups[0]
            group.update(options(group["lr"] / 2))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = run_twins(make, [(torch.randn(2, 8),) for _ in range(4)], halve)
    assert len(program.records) == 1


def test_a_program_keeps_no_copy_of_what_the_step_writes() -> None:
    model = nn.Linear(50, 50)
    program = capture(training(model, torch.optim.AdamW(model.parameters())))
    for _ in range(3):
        program(torch.ones(2, 50))
    gc.collect()
    size = model.weight.untyped_storage().nbytes()
    copies = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype is torch.uint8]
    assert not [x for x in copies if x.untyped_storage().nbytes() == size]


def test_eager_steps_and_loading_between_calls() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step = training(model, optimizer)
    program = capture(step)
    x = torch.randn(3, 4)
    for _ in range(3):
        program(x)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = program(x)
    step(x)
    model.load_state_dict(kept)
    assert same_bits(program(x), first)


def test_calls_run_uncaptured_once_no_record_serves_a_second_call() -> None:
    program, ran = capture(lambda x, n: x * n), MOST_UNUSED + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(ran):
            assert program(torch.ones(2), number).tolist() == [number] * 2
    with pytest.warns(match=r"uncaptured.*argument 2 was .*32.* and is .*33"):
        assert program(torch.ones(2), ran).tolist() == [ran] * 2
    assert program(torch.ones(2), 3).tolist() == [3.0, 3.0]


def test_records_of_models_that_were_replaced_do_not_keep_them() -> None:
    models = [nn.Linear(2, 2) for _ in range(20)]
    alive = [weakref.ref(model) for model in models]
    holder: Any = nn.Module()

    def step(x: Tensor) -> Tensor:
        return holder.model(x).detach()  # type: ignore[no-any-return]

    program = capture(step)
    while models:
        holder.model = models.pop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert all(torch.equal(program(x), step(x)) for x in [torch.ones(2)] * 3)
    gc.collect()
    assert sum(each() is not None for each in alive) <= MOST_REPLACED + 2


def refused(step: Callable[..., Any], message: str, *args: Any) -> None:
    program = capture(step)
    program(*args)
    with pytest.raises(CaptureError, match=message):
        program(*args)


ARRAY: Any = torch.ones(3).numpy()
COUNT = itertools.count(1)
ITEMS = (tensor for tensor in [torch.ones(3)] * 4)
#: What a method in C refers to cannot be seen.
HIDDEN: Any = iter([torch.ones(3)] * 4).__next__


class Counter:
    """Collects in Python."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.last: deque[Tensor] = deque(maxlen=9)

    def collect(self, x: Tensor) -> Tensor:
        self.seen.append(x.sum())
        return x

    def keep(self, x: Tensor) -> Tensor:
        self.last.append(x.sum())
        return x


def prints(x: Tensor) -> Tensor:
    print(f"{x.sum().item():.2f}")
    return x


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (prints, r"printed in Python, at .*in prints"),
        (lambda x: print(x) or x, r"prints the value of a tensor at .*test_program"),
        (lambda x: x * float(x.numpy()[0]), r"makes a numpy array of a tensor at .*test_program"),
        (lambda x: x * x.tolist()[0], r"makes a list of a tensor"),
        (lambda x: x * math.isclose(1.0, 2.0, abs_tol=x.sum().item()), r"given to math.isclose"),
        (lambda x: x if math.fsum([1.0, x.sum().item()]) < 3 else -x, r"given to math.fsum"),
        (Counter().collect, r"puts a tensor into the list self.seen"),
        (Counter().keep, r"puts a tensor into the list self.last\[1\]"),
        (lambda x: x * torch.from_numpy(ARRAY), r"makes a tensor of a numpy array"),
        (lambda x: Counter(), "makes and returns an object of class Counter"),
        (lambda x: x * next(ITEMS), r"refers to ITEMS, a generator"),
        (lambda x: x * next(COUNT), r"refers to COUNT, a count"),
        (lambda x: x * HIDDEN(), r"can't be seen to hold"),
        (
            lambda x: x * torch.rand(3, generator=torch.Generator().manual_seed(1)),
            r"generator that the step has made",
        ),
    ],
)
def test_what_a_program_cannot_do_again_raises_and_names_the_line(
    step: Callable[..., Any], message: str
) -> None:
    refused(step, message, torch.tensor([1.0, 2.0, 0.5]))


@pytest.mark.parametrize("every", [1, 1000])
def test_a_scheduler_within_the_step_is_refused_and_nothing_has_changed(every: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, every)
    train = training(model, optimizer)

    def step(x: Tensor) -> Any:
        loss = train(x)
        scheduler.step()
        return loss

    program = capture(step)
    program(torch.ones(2, 4))
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError, match=r"changes .*lr.* in Python.*after the captured step"):
        program(torch.ones(2, 4))
    assert all(same_bits(kept[name], x) for name, x in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*recorded again")
def test_a_parameter_of_another_layout_is_recorded_again() -> None:
    def program(rank: int) -> None:
        mesh = mesh_of(2)
        model: Any = distribute_module(nn.Linear(8, 8), mesh)
        captured = capture(lambda x: model(x).sum().detach())
        x = rows(mesh, 4)
        for _ in range(3):
            captured(x)
        model.weight.data = model.weight.data.redistribute(placements=[Shard(0)])
        assert same_bits(captured(x), model(x).sum().detach())

    run_ranks(2, program)


def trained() -> tuple[Program[..., Any], Callable[..., Any], Tensor]:
    mesh = mesh_of(2)
    model = distribute_module(nn.Linear(8, 8), mesh)

    def step(x: Tensor) -> Any:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    captured, x = capture(step, check=False), rows(mesh, 4)
    for _ in range(3):
        captured(x)
    return captured, step, x


def test_a_rank_that_runs_the_program_beside_one_that_does_not_raises_on_both() -> None:
    def program(rank: int) -> None:
        captured, step, x = trained()
        with pytest.raises(CollectiveMismatchError, match="the captured step: the vote"):
            (captured if rank else step)(x)

    run_ranks(2, program)


def test_ranks_that_come_to_other_collectives_raise() -> None:
    def program(rank: int) -> None:
        x = torch.ones(2)

        def step() -> None:
            dist.all_reduce(x)
            if rank:
                dist.all_reduce(x)
            else:
                dist.all_reduce(x)

        captured = capture(step)
        captured()
        with pytest.raises(CaptureError, match=r"different programs of step: collective 1 is"):
            captured()

    run_ranks(2, program)


def test_a_destroyed_group_and_a_lost_rank_raise() -> None:
    def destroyed(rank: int) -> None:
        captured, _, x = trained()
        dist.destroy_process_group()
        with pytest.raises(DistBackendError, match="the group was closed on this rank"):
            captured(x)

    def lost(rank: int) -> None:
        captured, _, x = trained()
        if not rank:
            with pytest.raises(PeerLostError, match="the captured step"):
                captured(x)

    run_ranks(2, destroyed)
    run_ranks(2, lost)


def test_an_index_out_of_range_raises_in_a_later_call() -> None:
    def program(rank: int) -> None:
        mesh = mesh_of(1)
        table: Any = parallelize_module(
            nn.Embedding(4, 2), mesh, RowwiseParallel(input_layouts=Replicate())
        )
        captured = capture(lambda x: table(x).detach())
        for _ in range(3):
            captured(torch.tensor([0, 3]))
        errors = (CaptureError, IndexError)
        with pytest.raises(errors):
            captured(torch.tensor([0, 4]))

    run_ranks(1, program)


class _Marked(Tensor):
    """Torch gives results of operators on it this class, but not in a backward pass."""


def test_a_recording_leaves_classes_of_gradients_as_they_are() -> None:
    w, x = nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(_Marked)

    def step() -> Tensor | None:
        w.grad = None
        (w * x).as_subclass(Tensor).sum().backward()  # type: ignore[no-untyped-call]
        return w.grad

    program = capture(step)
    for _ in range(3):
        assert type(program()) is type(w.grad) is Tensor
