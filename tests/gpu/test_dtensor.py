"""DTensors on a mesh of CUDA devices: what programs do with them, against plain tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
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
    explain,
    full,
    local_map,
    ones,
    rand,
    randn,
    verify,
    zeros,
)
from tilework.dtensor import empty as empty_dtensor

require_device()
CHECKS = Checks()


@in_worlds(ONE_DEFAULT, TWO, THREE)
def test_dtensor(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def numbers(place: Place, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """The same on every rank and device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(place.device, dtype)


def sharded(place: Place, x: Tensor, *placements: Placement) -> Any:
    return distribute_tensor(x, place.mesh(), placements or (Shard(0),))


LAYOUTS = (Shard(0), Shard(1), Replicate(), Partial())


# -- making and moving ----------------------------------------------------------------------------


@CHECKS(Shard(0), Shard(1), Replicate())
def distributed_and_gathered(place: Place, placement: Placement) -> None:
    for shape in ((6, 4), (7, 5), (1, 2), (0, 3)):
        x = numbers(place, *shape)
        d = sharded(place, x, placement)
        on_device(place, d, d.to_local(), d.full_tensor())
        same(d, x)


@CHECKS(torch.bfloat16, torch.int64, torch.bool, torch.complex64)
def distributed_dtypes(place: Place, dtype: torch.dtype) -> None:
    x = (numbers(place, 7, 3) * 3).to(dtype)
    same(sharded(place, x), x)
    same(sharded(place, x).redistribute(placements=[Shard(1)]), x)


@CHECKS(*LAYOUTS)
def redistributed(place: Place, source: Placement) -> None:
    x = numbers(place, 7, 5)
    for target in LAYOUTS:
        local = x if source.is_replicate() or source.is_partial() else None
        if source.is_partial():
            d = DTensor.from_local(x / place.size, place.mesh(), [source])
        else:
            d = sharded(place, x, source)
        assert local is None or local is x
        found = d.redistribute(placements=[target])
        on_device(place, found)
        assert found.placements == (target,)
        close(found, x)


@CHECKS()
def from_cpu_values(place: Place) -> None:
    """A plain tensor on another device goes to the mesh's, as in torch."""
    x = numbers(place, 6, 4).cpu()
    d = sharded(place, x)
    on_device(place, d)
    same(d, x)


@CHECKS()
def from_local_parts(place: Place) -> None:
    x = numbers(place, 3 * place.size, 4)
    mine = x.chunk(place.size)[place.rank]
    d = DTensor.from_local(mine, place.mesh(), [Shard(0)])
    on_device(place, d)
    same(d, x)
    if place.cuda:
        moved = DTensor.from_local(mine.cpu(), place.mesh(), [Shard(0)])
        on_device(place, moved)
        same(moved, x)


@CHECKS()
def gradients_of_moves(place: Place) -> None:
    x = numbers(place, 7, 4).requires_grad_()
    d = sharded(place, x.detach(), Shard(0)).requires_grad_()
    (
        d.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]) ** 2
    ).sum().backward()
    (x**2).sum().backward()
    on_device(place, d.grad)
    close(d.grad, x.grad)


@CHECKS()
def factories(place: Place) -> None:
    mesh = place.mesh()
    made: Any
    for made in (
        ones(7, 2, device_mesh=mesh, placements=[Shard(0)]),
        full((7, 2), 1.0, device_mesh=mesh, placements=[Shard(0)]),
        zeros(7, 2, device_mesh=mesh, placements=[Shard(1)]) + 1,
        torch.ones_like(empty_dtensor(7, 2, device_mesh=mesh, placements=[Shard(0)])),
    ):
        on_device(place, made, made.to_local())
        same(made, torch.ones(7, 2))


@CHECKS()
def meshes_of_two_axes(place: Place) -> None:
    mesh = place.mesh(1, place.size, names=("dp", "tp"))
    assert mesh.device_type == place.kind
    x = numbers(place, 6, 5)
    d = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    same(d, x)
    close(d @ d.t(), x @ x.t(), 1e-4)
    tp = mesh["tp"]
    same(distribute_tensor(x, tp, [Shard(1)]), x)
    assert tp.get_group().size() == place.size


# -- operators ------------------------------------------------------------------------------------

Program = Callable[..., Any]


def matmul(x: Any) -> Any:
    return x @ x.t()


def linear(x: Any) -> Any:
    return F.linear(x, x[:3] * 2)


def softmax(x: Any) -> Any:
    return x.softmax(-1) + x.log_softmax(0)


def layer_norm(x: Any) -> Any:
    return F.layer_norm(x, (6,)) + F.rms_norm(x, (6,))


def group_norm(x: Any) -> Any:
    return F.group_norm(x.unsqueeze(0).expand(2, 7, 6), 7)


def attention(x: Any) -> Any:
    q = torch.stack([x, x * 0.5]).unsqueeze(0).expand(3, 2, 7, 6)
    return F.scaled_dot_product_attention(q, q * 0.3, q + 1, is_causal=True)


def attention_with_a_mask(x: Any) -> Any:
    q = x.unsqueeze(0).unsqueeze(0)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=(x @ x.t()) > 0)


def reductions(x: Any) -> Any:
    return x.sum() + x.mean(0).sum() + x.amax(1).sum() + x.std() + x.norm() + x.logsumexp(1).sum()


def cumulated(x: Any) -> Any:
    return x.cumsum(0) + x.cumsum(1)


def sorted_values(x: Any) -> Any:
    return x.sort(0).values + x.sort(1, descending=True).values


def top(x: Any) -> Any:
    return x.topk(2, 0).values.sum() + x.topk(3, 1).values


def views(x: Any) -> Any:
    return x.view(7, 2, 3).transpose(0, 1).flatten(1)[1] + x.t()[1, :1]


def slices(x: Any) -> Any:
    return x[1:5, ::2] * 2 + x[-1, :3]


def indexed(x: Any) -> Any:
    index = torch.tensor([3, 1, 0], device=x.device)
    return x[index] + x.index_select(0, index) + x[:, [0, 5, 2, 2, 1, 0]][index]


def masked(x: Any) -> Any:
    return x.masked_fill(x > 0, 2.0) + torch.where(x > 0.5, x, -x) + x.tril()


def gathered(x: Any) -> Any:
    index = x.argsort(1)
    return x.gather(1, index) + torch.zeros_like(x).scatter(1, index, x)


def in_place(x: Any) -> Any:
    y = x.clone()
    y.add_(1).mul_(2)
    y[2:4] = 5.0
    y[:, 0].zero_()
    y += x
    return y.clamp_(-3, 3)


def joined(x: Any) -> Any:
    return torch.cat([x, x * 2], 1) + torch.stack([x, x], 1).flatten(1)


def convolved(x: Any) -> Any:
    return F.conv1d(x.unsqueeze(1), x[:2, :3].unsqueeze(1), padding=1)


def einsum(x: Any) -> Any:
    return torch.einsum("ab,cb->ac", x, x) + torch.einsum("ab->b", x)[:1]


def activations(x: Any) -> Any:
    return F.gelu(x) + F.silu(x) + x.tanh() + x.sigmoid() + F.relu(x) + x.exp().log1p()


def inverse(x: Any) -> Any:
    return torch.linalg.inv(x.t() @ x + 3 * torch.eye(6, device=x.device))


def padded(x: Any) -> Any:
    return F.pad(x, (1, 2), value=3.0).roll(1, 0).flip(1)


def repeated(x: Any) -> Any:
    return x.repeat(2, 1) + torch.repeat_interleave(x, 2, 0)


def cross_entropy(x: Any) -> Any:
    target = torch.tensor([0, 1, 2, 3, 4, 5, 0], device=x.device)
    return F.cross_entropy(x, target) + F.cross_entropy(x, target, label_smoothing=0.1)


def embedding(x: Any) -> Any:
    return F.embedding(torch.tensor([[0, 6], [3, 3]], device=x.device), x)


def bilinear(x: Any) -> Any:
    images = x.view(1, 1, 7, 6)
    return F.interpolate(images, scale_factor=2, mode="bilinear") + 0


def mixed_precision(x: Any) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x @ x.t()).float() + F.softmax(x @ x.t(), -1)


def foreach(x: Any) -> Any:
    lists = [x, x * 2]
    return torch._foreach_add(lists, 1)[0] + torch._foreach_norm(lists)[1]


OPERATORS = (
    matmul,
    linear,
    softmax,
    layer_norm,
    group_norm,
    attention,
    attention_with_a_mask,
    reductions,
    cumulated,
    sorted_values,
    top,
    views,
    slices,
    indexed,
    masked,
    gathered,
    in_place,
    joined,
    convolved,
    einsum,
    activations,
    inverse,
    padded,
    repeated,
    cross_entropy,
    embedding,
    bilinear,
    mixed_precision,
    foreach,
)


def result_and_gradient(program: Program, x: Any) -> tuple[Any, Any]:
    x = x.detach().requires_grad_()
    y = program(x)
    y.float().sin().sum().backward()
    return y, x.grad


@CHECKS(*OPERATORS)
def operators(place: Place, program: Program) -> None:
    """The value and the gradient, in each layout, as of a plain tensor on the same device."""
    x = numbers(place, 7, 6)
    expected, slope = result_and_gradient(program, x)
    tolerance = 0.05 if program is mixed_precision else 2e-4
    for placement in (Shard(0), Shard(1), Replicate()):
        found, gradient = result_and_gradient(program, sharded(place, x, placement))
        assert isinstance(found, DTensor)
        on_device(place, found, gradient)
        close(found.float(), expected.float(), tolerance)
        close(gradient, slope, tolerance)


@CHECKS()
def operators_beside_plain_tensors(place: Place) -> None:
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    close(d * 2 + torch.tensor(3.0), x * 2 + 3)
    close(d + torch.tensor(1.5, device=place.device), x + 1.5)
    if place.cuda:
        with raising("device"):
            d + torch.ones(7, 6)
        with raising("device"):
            d @ torch.ones(6, 6)


def written_at(x: Any, index: Any, value: Any) -> Any:
    y = x.clone()
    y[index] = value
    return y


@CHECKS()
def indices_on_the_cpu(place: Place) -> None:
    """As in torch, indices and numbers to write may be on the CPU for a tensor of any device."""
    x = numbers(place, 7, 6)
    rows, mask = torch.tensor([3, 1, 0]), torch.arange(7) % 2 == 0
    indices: list[Any] = [rows, rows.view(3, 1), (slice(None), rows), (rows, rows), mask, [3, 1]]
    number = torch.tensor(5.0)
    for placement in (Shard(0), Shard(1), Replicate()):
        d = sharded(place, x, placement)
        for index in indices:
            on_device(place, d[index])
            same(d[index], x[index])
            for value in (5.0, number, number.to(place.device)):
                same(written_at(d, index, value), written_at(x, index, value))
        for accumulate in (False, True):
            found, expected = [t.index_put((rows,), number, accumulate) for t in (d, x)]
            same(found, expected)


@CHECKS()
def nonzero_and_masks(place: Place) -> None:
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    same(d[d > 0], x[x > 0])
    same((d > 0).nonzero(), (x > 0).nonzero())
    same(torch.unique((d * 2).round()), torch.unique((x * 2).round()))


@CHECKS(torch.float16, torch.bfloat16)
def half_precision_attention(place: Place, dtype: torch.dtype) -> None:
    """Flash attention is what torch takes for it on a GPU."""
    q = numbers(place, 2, 4, 16, 64, dtype=dtype)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    for placement in (Shard(0), Shard(1), Replicate()):
        d = sharded(place, q, placement).requires_grad_()
        found: Any = F.scaled_dot_product_attention(d, d, d, is_causal=True)
        close(found.float(), expected.float(), 0.02)
        found.float().sum().backward()
        assert d.grad is not None
        on_device(place, d.grad)


@CHECKS("flash", "efficient", "math", "cudnn")
def attention_kernels(place: Place, name: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not place.cuda:
        return
    kernel = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }[name]
    q = numbers(place, 2, 4, 64, 64, dtype=torch.bfloat16)
    with sdpa_kernel(kernel):
        expected, slope = result_and_gradient(
            lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), q
        )
        for placement in (Shard(0), Shard(1)):
            found, gradient = result_and_gradient(
                lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
                sharded(place, q, placement),
            )
            close(found.float(), expected.float(), 0.02)
            close(gradient.float(), slope.float(), 0.05)


# -- random numbers -------------------------------------------------------------------------------


def drawn(place: Place, name: str, placement: Placement, kind: str) -> Any:
    """What the operator draws on a mesh of that kind of device, from the same seed."""
    from tilework.mesh import init_device_mesh

    mesh = init_device_mesh(kind, (place.size,))
    torch.manual_seed(5)
    x = zeros(9, 4, device_mesh=mesh, placements=[placement])
    made: dict[str, Callable[[], Any]] = {
        "rand": lambda: rand(9, 4, device_mesh=mesh, placements=[placement]),
        "randn": lambda: randn(9, 4, device_mesh=mesh, placements=[placement]),
        "normal_": lambda: x.normal_(1.0, 2.0),
        "uniform_": lambda: x.uniform_(-1, 1),
        "bernoulli": lambda: torch.bernoulli(x + 0.3),
        "rand_like": lambda: torch.rand_like(x),
        "randint_like": lambda: torch.randint_like(x, 10),
        "dropout": lambda: F.dropout(x + 1, 0.4),
        "exponential_": lambda: x.exponential_(),
        "multinomial": lambda: torch.multinomial(x + 1, 2),
        "kaiming": lambda: nn.init.kaiming_uniform_(x),
        "trunc_normal": lambda: nn.init.trunc_normal_(x),
    }
    return made[name]()


@CHECKS(
    "rand", "randn", "normal_", "uniform_", "bernoulli", "rand_like", "randint_like", "dropout",
    "exponential_", "multinomial", "kaiming", "trunc_normal",
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
    if place.cuda:
        generator = torch.Generator("cuda").manual_seed(4)
        x = zeros(5, device_mesh=mesh, placements=[Shard(0)])
        x.normal_(generator=generator)
        generator.manual_seed(4)
        y = zeros(5, device_mesh=mesh)
        y.normal_(generator=generator)
        same(x, y)


# -- what else programs do with tensors -----------------------------------------------------------


@CHECKS()
def to_other_devices(place: Place) -> None:
    """As torch's DTensor or with an error that says what to do; never wrong values."""
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    same(d.to(place.device), x)
    same(d.to(place.kind), x)
    close(d.to(place.device, torch.bfloat16).float(), x.bfloat16().float())
    close(d.double(), x.double())
    assert d.device.type == place.kind
    assert d.is_cuda == place.cuda
    if place.cuda:
        same(d.cuda(), x)
        on_device(place, d.cuda())


@CHECKS("cpu", "to")
def to_the_cpu(place: Place, way: str) -> None:
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    moved = d.cpu() if way == "cpu" else d.to("cpu")
    assert moved.device.type == "cpu", moved.device
    assert moved.to_local().device.type == "cpu"
    same(moved, x)
    same(moved * 2 + 1, x * 2 + 1)


@CHECKS()
def numbers_out_of_tensors(place: Place) -> None:
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    assert abs(d.sum().item() - x.sum().item()) < 1e-3
    assert float(d[0, 0]) == x[0, 0].item()
    assert int(d.argmax()) == int(x.argmax())
    assert bool((d == d).all())
    assert d.tolist() == x.tolist()
    assert torch.equal(d, sharded(place, x))
    assert torch.allclose(d, sharded(place, x, Shard(1)))
    assert next(iter(d)).sum().item() == pytest.approx(x[0].sum().item(), 1e-5)


@CHECKS()
def numpy_arrays(place: Place) -> None:
    d = sharded(place, numbers(place, 7, 6))
    if place.cuda:
        with raising("cuda", TypeError):
            d.numpy()
    assert d.full_tensor().cpu().numpy().shape == (7, 6)


@CHECKS()
def texts(place: Place) -> None:
    d = sharded(place, numbers(place, 7, 6))
    assert "DTensor" in repr(d)
    assert str(d)
    assert f"{d.sum():.2f}"
    with explain() as explained:
        d @ d.t()
    assert str(explained)


@CHECKS()
def copies(place: Place) -> None:
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    for made in (copy.deepcopy(d), copy.copy(d), d.clone(), d.detach(), d.contiguous()):
        on_device(place, made)
        same(made, x)
    layer = distribute_module(nn.Linear(6, 4).to(place.device), place.mesh())
    twin = copy.deepcopy(layer)
    on_device(place, *twin.parameters())
    same(twin.weight, layer.weight)


@CHECKS("pickle", "torch.save")
def files(place: Place, way: str) -> None:
    x = numbers(place, 7, 6)
    d = sharded(place, x)
    if way == "pickle":
        again = pickle.loads(pickle.dumps(d))
    else:
        stream = io.BytesIO()
        torch.save({"d": d}, stream)
        stream.seek(0)
        again = torch.load(stream, weights_only=False)["d"]
    on_device(place, again)
    same(again, x)


@CHECKS()
def plain_layers_are_distributed(place: Place) -> None:
    for layer in (nn.Linear(6, 4), nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 4), nn.ReLU())):
        layer = layer.to(place.device)
        x = numbers(place, 7, 6)
        expected = layer(x)
        found = distribute_module(copy.deepcopy(layer), place.mesh())(sharded(place, x))
        close(found, expected)


@CHECKS()
def modules_move_to_the_device(place: Place) -> None:
    layer: Any = distribute_module(nn.Linear(6, 4).to(place.device), place.mesh())
    weight = layer.weight.full_tensor()
    layer.to(place.device)
    layer.bfloat16().float()
    close(layer.weight, weight, 0.01)
    on_device(place, *layer.parameters())


@CHECKS("meta", "to_empty")
def modules_without_memory(place: Place, way: str) -> None:
    with torch.device("meta"):
        layer: Any = nn.Linear(6, 4)
    layer = distribute_module(layer, place.mesh())
    layer.to_empty(device=place.device)
    torch.manual_seed(0)
    layer.reset_parameters()
    on_device(place, *layer.parameters())
    assert layer(sharded(place, numbers(place, 7, 6))).isfinite().all()


@CHECKS()
def functions_of_local_tensors(place: Place) -> None:
    x = numbers(place, 7, 6)
    double = local_map(
        lambda a: a * 2,
        out_placements=[Shard(0)],
        in_placements=([Shard(0)],),
        device_mesh=place.mesh(),
        redistribute_inputs=True,
    )
    same(double(sharded(place, x, Shard(1))), x * 2)


@CHECKS()
def verified(place: Place) -> None:
    x = numbers(place, 7, 6)
    d = sharded(place, x, Replicate())
    verify(d)
    if place.size > 1:
        d.to_local().add_(float(place.rank))
        with raising("rank"):
            verify(d)


@CHECKS("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")
def optimizers(place: Place, name: str) -> None:
    kind: Any = getattr(torch.optim, name)
    for settings in ({}, {"foreach": True}, {"fused": True}):
        if "fused" in settings and name in ("RMSprop", "Adagrad"):
            continue
        x = numbers(place, 7, 6)
        found = []
        for value in (x.clone(), sharded(place, x.clone())):
            parameter: Any = nn.Parameter(value)
            optimizer = kind([parameter], lr=0.1, **settings)
            for _ in range(3):
                optimizer.zero_grad()
                (parameter**2).sum().backward()
                nn.utils.clip_grad_norm_([parameter], 1.0)
                optimizer.step()
            found.append(parameter)
        on_device(place, found[1])
        close(found[1], found[0])


@CHECKS()
def scaled_gradients(place: Place) -> None:
    """GradScaler: its checks for infinity read all ranks' parts."""
    x = numbers(place, 7, 6)
    found = []
    for value in (x.clone(), sharded(place, x.clone())):
        parameter: Any = nn.Parameter(value)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler = torch.amp.GradScaler(place.kind, init_scale=8.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = (parameter**2).sum() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.append((parameter, scaler.get_scale()))
    close(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


@CHECKS()
def large_sharded_products(place: Place) -> None:
    """Integers in float32, so that every order of sums gives the same; 64 MiB of results."""
    if not place.cuda:
        return
    x = torch.randint(
        -3, 4, (4096, 4096), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    ).float()
    expected = x @ x
    a, b = sharded(place, x, Shard(1)), sharded(place, x, Shard(0))
    c = a @ b
    same(c.redistribute(placements=[Shard(0)]), expected)
    same((c + c).full_tensor(), expected * 2)


@CHECKS()
def groups_have_ranks_in_agreement(place: Place) -> None:
    dist.barrier()
    assert place.mesh().get_group().size() == place.size
