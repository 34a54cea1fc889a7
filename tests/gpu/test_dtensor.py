"""DTensors on a mesh of CUDA devices, against plain tensors there."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dtensor.op_checks import noting_gatherings
from tests.gpu.world import (
    ONE_DEFAULT,
    THREE,
    TWO,
    Checks,
    Place,
    World,
    close,
    in_worlds,
    on_device,
    plain,
    raising,
    require_device,
    run_checks,
    same,
)
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    full,
    init_device_mesh,
    local_map,
    ones,
    rand,
    randn,
    verify,
    zeros,
)

require_device()
CHECKS = Checks()
LAYOUTS = (Shard(0), Shard(1), Replicate(), Partial())


@in_worlds(ONE_DEFAULT, TWO, THREE)
def test_dtensor(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def numbers(place: Place, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """The same on every rank and device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(place.device, dtype)


def sharded(place: Place, x: Tensor, *placements: Placement) -> Any:
    return distribute_tensor(x, place.mesh(), placements or (Shard(0),))


# -- making and moving ----------------------------------------------------------------------------


@CHECKS(torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
def distributed_and_gathered(place: Place, dtype: torch.dtype) -> None:
    for shape in ((7, 5), (1, 2), (0, 3)):
        x = (numbers(place, *shape) * 3).to(dtype)
        for placement in (Shard(0), Shard(1), Replicate()):
            d = sharded(place, x, placement)
            on_device(place, d, d.to_local(), d.full_tensor())
            same(d, x)


@CHECKS(*LAYOUTS)
def redistributed(place: Place, source: Placement) -> None:
    """With gradients of the moves, and from plain parts on another device."""
    x = numbers(place, 7, 5)
    for target in LAYOUTS:
        whole = sharded(place, x.cpu(), Replicate())
        d = whole.redistribute(placements=[source]).detach().requires_grad_()
        found = d.redistribute(placements=[target])
        on_device(place, whole, d, found)
        assert found.placements == (target,)
        close(found, x)
        (found.redistribute(placements=[Replicate()]) ** 2).sum().backward()
        on_device(place, d.grad)
        close(d.grad, 2 * x)


@CHECKS()
def from_parts_and_nothing(place: Place) -> None:
    mesh, x = place.mesh(), numbers(place, 3 * place.size, 4)
    mine = x.chunk(place.size)[place.rank]
    parts = [DTensor.from_local(part, mesh, [Shard(0)]) for part in (mine, mine.cpu())]
    on_device(place, *parts)
    for part in parts:
        same(part, x)
    made: Any = (
        ones(7, 2, device_mesh=mesh, placements=[Shard(0)]),
        full((7, 2), 1.0, device_mesh=mesh, placements=[Shard(0)]),
        torch.ones_like(zeros(7, 2, device_mesh=mesh, placements=[Shard(1)])),
    )
    on_device(place, *made)
    for each in made:
        same(each, torch.ones(7, 2))


@CHECKS()
def meshes_of_two_axes(place: Place) -> None:
    mesh = place.mesh(1, place.size, names=("dp", "tp"))
    assert mesh.device_type == place.kind
    x = numbers(place, 6, 5)
    d = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    same(d, x)
    close(d @ d.t(), x @ x.t(), 1e-4)
    same(distribute_tensor(x, mesh["tp"], [Shard(1)]), x)


# -- operators ------------------------------------------------------------------------------------

#: Operators of torch's database, of which the suite runs all on the CPU.
OPERATORS = re.findall(
    r"\S+",
    """
    matmul nn.functional.linear bmm einsum linalg.inv softmax log_softmax nn.functional.layer_norm
    nn.functional.rms_norm nn.functional.group_norm nn.functional.batch_norm
    nn.functional.scaled_dot_product_attention nn.functional.conv1d nn.functional.conv2d
    nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu nn.functional.silu
    nn.functional.relu nn.functional.pad.constant nn.functional.interpolate.bilinear tanh
    sigmoid exp log1p sum mean amax std var norm logsumexp prod cumsum sort argsort topk view
    transpose flatten __getitem__ select index_select index_put index_add masked_fill
    masked_select nonzero where tril gather scatter cat stack repeat repeat_interleave
    roll flip unique clamp addcmul fill
    """,
)


@CHECKS(*range(0, len(OPERATORS), 8), seconds=60.0)
def operators(place: Place, first: int) -> None:
    """Values, gradients and layouts of each form of operators, on tensors of any layouts."""
    from tests.dtensor.op_db.calls import cases, named
    from tests.dtensor.op_db.calls import operators as every
    from tests.dtensor.op_db.running import run_case

    names = {*OPERATORS[first : first + 8]}
    chosen = [info for info in every() if named(info) in names]
    assert len(chosen) == len(names)
    mesh, results = place.mesh(), []
    with noting_gatherings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in chosen:
            for case in cases(info, torch.float64, 3, [(place.size,)], device=place.kind):
                assert all(x.device.type == place.kind for x in case.call.tensors)
                results.append(run_case(case, mesh))
    wrong = [str(result) for result in results if result.outcome not in ("right", "refused")]
    assert not wrong, "\n".join(wrong)
    assert len(results) >= 3 * len(names)


def in_place(x: Any) -> Any:
    y = x.clone()
    y.add_(1).mul_(2)
    y[2:4] = 5.0
    y[:, 0].zero_()
    y += x
    return y.clamp_(-3, 3)


def mixed_precision(x: Any) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x @ x.t()).float() + F.softmax(x @ x.t(), -1)


def lists(x: Any) -> Any:
    return torch._foreach_add([x, x * 2], 1)[0] + torch._foreach_norm([x, x * 2])[1]


def result_and_gradient(program: Callable[[Any], Any], x: Any) -> tuple[Any, Any]:
    x = x.detach().requires_grad_()
    y = program(x)
    y.float().sin().sum().backward()
    return y, x.grad


@CHECKS(in_place, mixed_precision, lists)
def programs(place: Place, program: Callable[[Any], Any]) -> None:
    x = numbers(place, 7, 6)
    expected, slope = result_and_gradient(program, x)
    tolerance = 0.05 if program is mixed_precision else 2e-4
    for placement in (Shard(0), Shard(1), Replicate()):
        found, gradient = result_and_gradient(program, sharded(place, x, placement))
        on_device(place, found, gradient)
        close(found.float(), expected.float(), tolerance)
        close(gradient, slope, tolerance)


@CHECKS()
def plain_tensors_of_the_cpu(place: Place) -> None:
    """As in torch, numbers, indices and what is written may be on the CPU; other tensors not."""
    x = numbers(place, 7, 6)
    rows, mask, number = torch.tensor([3, 1, 0]), torch.arange(7) % 2 == 0, torch.tensor(5.0)
    indices: list[Any] = [rows, rows.view(3, 1), (slice(None), rows), (rows, rows), mask, [3, 1]]
    for placement in (Shard(0), Shard(1), Replicate()):
        d = sharded(place, x, placement)
        close(d * 2 + torch.tensor(3.0), x * 2 + 3)
        for index in indices:
            on_device(place, d[index])
            same(d[index], x[index])
            for value in (5.0, number, number.to(place.device)):
                found, expected = d.clone(), x.clone()
                found[index] = expected[index] = value
                same(found, expected)
        for accumulate in (False, True):
            found, expected = [t.index_put((rows,), number, accumulate) for t in (d, x)]
            same(found, expected)
        for fn in (torch.add, torch.matmul) if place.cuda else ():
            with raising("device"):
                fn(d, torch.ones(6, 6)[:1])


@CHECKS("flash", "efficient", "math", "cudnn", None)
def attention_kernels(place: Place, name: str | None) -> None:
    """Each of torch's on a GPU, and the one that it takes by itself."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if name is not None and not place.cuda:
        return
    kernels: Any = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        None: [*SDPBackend.__members__.values()][1:],
    }
    q = numbers(place, 2, 4, 64, 64, dtype=torch.bfloat16)

    def attention(x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    with sdpa_kernel(kernels[name]):
        expected, slope = result_and_gradient(attention, q)
        for placement in (Shard(0), Shard(1), Replicate()):
            found, gradient = result_and_gradient(attention, sharded(place, q, placement))
            on_device(place, found, gradient)
            close(found.float(), expected.float(), 0.02)
            close(gradient.float(), slope.float(), 0.05)


# -- random numbers -------------------------------------------------------------------------------


def drawn(place: Place, name: str, placement: Placement, kind: str) -> Any:
    """The values that the operator draws on a mesh of that kind of device, from the same seed."""
    mesh = init_device_mesh(kind, (place.size,))
    torch.manual_seed(5)
    x = zeros(9, 4, device_mesh=mesh, placements=[placement])
    made: dict[str, Callable[[], Any]] = {
        "rand": lambda: rand(9, 4, device_mesh=mesh, placements=[placement]),
        "randn": lambda: randn(9, 4, device_mesh=mesh, placements=[placement]),
        "normal_": lambda: x.normal_(1.0, 2.0),
        "bernoulli": lambda: torch.bernoulli(x + 0.3),
        "randint_like": lambda: torch.randint_like(x, 10),
        "dropout": lambda: F.dropout(x + 1, 0.4),
        "exponential_": lambda: x.exponential_(),
        "multinomial": lambda: torch.multinomial(x + 1, 2),
        "trunc_normal": lambda: nn.init.trunc_normal_(x),
    }
    return made[name]()


@CHECKS(
    "rand", "randn", "normal_", "bernoulli", "randint_like", "dropout", "exponential_",
    "multinomial", "trunc_normal",
)  # fmt: skip
def random_numbers(place: Place, name: str) -> None:
    """The same in each layout; on a GPU those of the CPU but for rounding."""
    first = drawn(place, name, Replicate(), place.kind)
    on_device(place, first)
    for placement in (Shard(0), Shard(1)):
        same(drawn(place, name, placement, place.kind), first)
    if name != "multinomial":
        close(drawn(place, name, Shard(0), "cpu"), first, 1e-5)


@CHECKS()
def dropout_in_attention(place: Place) -> None:
    q = numbers(place, 2, 4, 8, 16)
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        torch.manual_seed(1)
        d = sharded(place, q, placement)
        found.append(plain(F.scaled_dot_product_attention(d, d, d, dropout_p=0.5)))
    close(found[0], found[1])
    close(found[0], found[2])


@CHECKS()
def seeds_and_states(place: Place) -> None:
    mesh = place.mesh()
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[0] if place.cuda else []):
        a = rand(5, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    same(rand(5, device_mesh=mesh, placements=[Shard(0)]), a)
    generator = torch.Generator(place.kind)
    x, y = zeros(5, device_mesh=mesh, placements=[Shard(0)]), zeros(5, device_mesh=mesh)
    for each in (x, y):
        generator.manual_seed(4)
        each.normal_(generator=generator)
    same(x, y)


# -- what else programs do with tensors -----------------------------------------------------------


@CHECKS()
def to_other_devices(place: Place) -> None:
    """As torch's DTensor or with an error that says what to do; never wrong values."""
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    same(d.to(place.device), x)
    close(d.to(place.device, torch.bfloat16).float(), x.bfloat16().float())
    assert d.device.type == place.kind
    assert d.is_cuda == place.cuda
    for moved in (d.cpu(), d.to("cpu")):
        assert moved.device.type == moved.to_local().device.type == "cpu"
        same(moved * 2 + 1, x * 2 + 1)
    if place.cuda:
        on_device(place, d.cuda(), d.cpu().cuda())
        with raising("cuda", TypeError):
            d.numpy()


@CHECKS()
def numbers_out_of_tensors(place: Place) -> None:
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    assert abs(d.sum().item() - x.sum().item()) < 1e-3
    assert d.tolist() == x.tolist()
    assert torch.equal(d, sharded(place, x, Shard(1)))
    assert "DTensor" in repr(d)
    assert f"{d.sum():.2f}"


@CHECKS()
def copies_and_files(place: Place) -> None:
    d = sharded(place, x := numbers(place, 7, 6))
    stream = io.BytesIO()
    torch.save({"d": d}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)["d"]
    for made in (copy.deepcopy(d), d.clone(), loaded):
        on_device(place, made)
        same(made, x)


@CHECKS("made", "moved", "meta")
def modules(place: Place, way: str) -> None:
    with torch.device("meta" if way == "meta" else place.device):
        layer: Any = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    x, twin = numbers(place, 7, 6), copy.deepcopy(layer)
    layer = distribute_module(layer, place.mesh())
    if way == "meta":
        layer.to_empty(device=place.device)
        for part in layer:
            part.reset_parameters()
        assert layer(sharded(place, x)).isfinite().all()
    else:
        if way == "moved":
            layer = copy.deepcopy(layer).to(place.device)
        close(layer(sharded(place, x)), twin(x))
    on_device(place, *layer.parameters())


@CHECKS()
def local_functions_and_verify(place: Place) -> None:
    x = numbers(place, 7, 6)
    double = local_map(
        lambda a: a * 2,
        out_placements=[Shard(0)],
        in_placements=([Shard(0)],),
        device_mesh=place.mesh(),
        redistribute_inputs=True,
    )
    same(double(sharded(place, x, Shard(1))), x * 2)
    d = sharded(place, x, Replicate())
    verify(d)
    if place.size > 1:
        d.to_local().add_(float(place.rank))
        with raising("rank"):
            verify(d)


@CHECKS("SGD", "Adam", "AdamW", "RMSprop")
def optimizers(place: Place, name: str) -> None:
    """With clipped gradients, for lists of tensors and fused; with a scaler of gradients."""
    x = numbers(place, 7, 6)
    for settings in ({}, {"foreach": True}, *([{"fused": True}] if name != "RMSprop" else [])):
        found = []
        for value in (x.clone(), sharded(place, x.clone())):
            parameter: Any = nn.Parameter(value)
            optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **settings)
            scaler = torch.amp.GradScaler(place.kind, init_scale=8.0, growth_interval=2)
            for step in range(4):
                optimizer.zero_grad()
                loss = (parameter**2).sum() * (float("inf") if step == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([parameter], 1.0)
                scaler.step(optimizer)
                scaler.update()
            found.append((parameter, scaler.get_scale()))
        on_device(place, found[1][0])
        close(found[1][0], found[0][0])
        assert found[1][1] == found[0][1]
