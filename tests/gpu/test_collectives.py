"""Every collective on CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilework.distributed as dist
from tests.gpu.world import (
    ONE,
    ONE_DEFAULT,
    THREE,
    TWO,
    Checks,
    Place,
    World,
    close,
    in_worlds,
    lacking,
    on_device,
    raising,
    require_device,
    run_checks,
    same,
)

require_device()
CHECKS = Checks()
FLOAT = torch.float32
DTYPES = (FLOAT, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@in_worlds(ONE, ONE_DEFAULT, TWO, THREE)
def test_collectives(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def value(place: Place, rank: int, dtype: torch.dtype = FLOAT, rows: int = 4) -> Tensor:
    """What a rank contributes: small whole numbers, so that sums are exact."""
    numbers = (torch.arange(rows * 3).reshape(rows, 3) * (rank + 2)) % 5 + rank
    return (numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)).to(place.device)


def values(place: Place, dtype: torch.dtype = FLOAT, rows: int = 4) -> Tensor:
    return torch.stack([value(place, rank, dtype, rows) for rank in range(place.size)]).cpu()


def total(stacked: Tensor) -> Tensor:
    return stacked.any(0) if stacked.dtype is torch.bool else stacked.sum(0).to(stacked.dtype)


def ways(tensor: Tensor) -> list[Tensor]:
    """The tensor, contiguous and not: transposed memory, and every other column."""
    apart = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1]).to(tensor)
    apart[..., ::2] = tensor
    return [tensor.clone(), tensor.t().clone().t(), apart[..., ::2]]


def done(work: Any) -> None:
    if work is not None:
        assert work.wait()


# -- values ---------------------------------------------------------------------------------------

#: Of a rank's tensor, with as many rows as ranks: (the call's Work or None, what it writes).
Call = Callable[[Place, Tensor, bool], tuple[Any, Any]]
#: Of all ranks' tensors: what a rank then has.
Expected = Callable[[Place, Tensor], Tensor]


def into(shape: Callable[[Place, Tensor], Tensor], call: Callable[..., Any]) -> Call:
    """A call that writes to a new tensor, which it takes before the input."""

    def run(place: Place, x: Tensor, later: bool) -> tuple[Any, Tensor]:
        out = torch.zeros_like(shape(place, x), memory_format=torch.contiguous_format)
        return call(out, x, async_op=later), out

    return run


def in_place(call: Callable[..., Any], *args: Any) -> Call:
    return lambda place, x, later: (call(x, *args, async_op=later), x)


def to_list(place: Place, x: Tensor, later: bool) -> tuple[Any, list[Tensor]]:
    out = [torch.zeros_like(x) for _ in range(place.size)]
    return dist.all_gather(out, x, async_op=later), out


def gathered(place: Place, x: Tensor, later: bool) -> tuple[Any, Any]:
    out = [torch.zeros_like(x) for _ in range(place.size)] if place.rank == 0 else None
    return dist.gather(x, out, 0, async_op=later), out or [torch.zeros_like(x)] * place.size


def scattered(place: Place, x: Tensor, later: bool) -> tuple[Any, Tensor]:
    out = torch.zeros_like(x[:1])
    parts = list(x.split(1)) if place.rank == 0 else None  # type: ignore[no-untyped-call]
    return dist.scatter(out, parts, 0, async_op=later), out


def summed(place: Place, x: Tensor, later: bool) -> tuple[Any, Tensor]:
    out, parts = torch.zeros_like(x[:1]), list(x.split(1))  # type: ignore[no-untyped-call]
    return dist.reduce_scatter(out, parts, async_op=later), out


def exchanged(place: Place, x: Tensor, later: bool) -> tuple[Any, list[Tensor]]:
    parts = list(x.split(1))  # type: ignore[no-untyped-call]
    out = [torch.zeros_like(part) for part in parts]
    return dist.all_to_all(out, parts, async_op=later), out


COLLECTIVES: dict[str, tuple[Call, Expected]] = {
    "all_reduce": (in_place(dist.all_reduce), lambda p, xs: total(xs)),
    "broadcast": (in_place(dist.broadcast, 0), lambda p, xs: xs[0]),
    "reduce": (in_place(dist.reduce, 0), lambda p, xs: xs[p.rank] if p.rank else total(xs)),
    "all_gather": (to_list, lambda p, xs: xs),
    "all_gather_into_tensor": (
        into(lambda p, x: torch.cat([x] * p.size), dist.all_gather_into_tensor),
        lambda p, xs: xs.flatten(0, 1),
    ),
    "stacked": (
        into(lambda p, x: torch.stack([x] * p.size), dist.all_gather_into_tensor),
        lambda p, xs: xs,
    ),
    "gather": (gathered, lambda p, xs: xs if p.rank == 0 else torch.zeros_like(xs)),
    "scatter": (scattered, lambda p, xs: xs[0, p.rank : p.rank + 1]),
    "reduce_scatter": (summed, lambda p, xs: total(xs)[p.rank : p.rank + 1]),
    "reduce_scatter_tensor": (
        into(lambda p, x: x[:1], dist.reduce_scatter_tensor),
        lambda p, xs: total(xs)[p.rank : p.rank + 1],
    ),
    "all_to_all": (exchanged, lambda p, xs: xs[:, p.rank : p.rank + 1]),
    "all_to_all_single": (
        into(lambda p, x: x, dist.all_to_all_single),
        lambda p, xs: xs[:, p.rank],
    ),
}


@CHECKS(*COLLECTIVES)
def of_all_dtypes_and_layouts(place: Place, name: str) -> None:
    call, expected = COLLECTIVES[name]
    for dtype in DTYPES:
        every = values(place, dtype, place.size)
        for later in (False, True):
            for x in ways(value(place, place.rank, dtype, place.size)):
                work, out = call(place, x, later)
                done(work)
                on_device(place, *out)
                found = torch.stack(out) if isinstance(out, list) else out
                same(found, expected(place, every))


@CHECKS()
def uneven_exchanges(place: Place) -> None:
    def rows(source: int, to: int) -> Tensor:
        return value(place, 10 * source + to, rows=to + 1)

    sizes, splits = [to + 1 for to in range(place.size)], [place.rank + 1] * place.size
    sent = [rows(place.rank, to) for to in range(place.size)]
    expected = torch.cat([rows(source, place.rank) for source in range(place.size)])
    for later in (False, True):
        out = torch.zeros_like(expected)
        done(dist.all_to_all_single(out, torch.cat(sent), splits, sizes, async_op=later))
        same(out, expected)
        parts = list(torch.zeros_like(expected).split(splits))  # type: ignore[no-untyped-call]
        done(dist.all_to_all(parts, sent, async_op=later))
        same(torch.cat(parts), expected)


@CHECKS("AVG", "MAX", "MIN", "PRODUCT", "PREMUL_SUM", "BAND", "BOR", "BXOR")
def reductions(place: Place, name: str) -> None:
    """Exact for these numbers; those that an engine lacks are refused by name, as in torch."""
    bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    for dtype in (torch.int64,) if name in bits else (FLOAT, torch.bfloat16):
        op: Any = (
            dist.make_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
        )
        every, x = values(place, dtype), value(place, place.rank, dtype)
        expected = every[0]
        for each in every[1:]:
            expected = bits[name](expected, each) if name in bits else expected
        if name not in bits:
            wide = every.float()
            expected = {
                "AVG": wide.mean(0),
                "MAX": wide.amax(0),
                "MIN": wide.amin(0),
                "PRODUCT": wide.prod(0),
                "PREMUL_SUM": wide.sum(0) / 2,
            }[name]
        words = "'gloo' has no ReduceOp.PREMUL_SUM" if name == "PREMUL_SUM" else "'nccl'"
        if lacking(words, lambda x=x, op=op: dist.all_reduce(x, op)):  # type: ignore[misc]
            return
        close(x.float(), expected.float(), 0.02 if dtype is torch.bfloat16 else 1e-6)
        if name in ("AVG", "MAX"):
            out = torch.zeros(1, 3, device=place.device)
            mine = value(place, place.rank, FLOAT, place.size)
            dist.reduce_scatter_tensor(out, mine, op)
            every = values(place, FLOAT, place.size)
            close(out[0], (every.mean(0) if name == "AVG" else every.amax(0))[place.rank])


@CHECKS(torch.float16, torch.float64, torch.uint8, torch.int32, torch.int16, torch.float8_e4m3fn)
def more_dtypes(place: Place, dtype: torch.dtype) -> None:
    x = value(place, place.rank).to(dtype)
    out = torch.zeros(4 * place.size, 3, device=place.device).to(dtype)
    dist.all_gather_into_tensor(out, x)
    same(out.double(), values(place).flatten(0, 1).double())
    if dtype not in (torch.int16, torch.float8_e4m3fn):  # which no engine of torch's adds
        dist.all_reduce(x)
        same(x.double(), total(values(place)).double())


@CHECKS()
def coalesced(place: Place) -> None:
    expected = total(values(place))
    for later in (False, True):
        a, b = value(place, place.rank), value(place, place.rank)
        with dist.coalescing_manager(async_ops=later) as block:
            dist.all_reduce(a)
            dist.all_reduce(b)
        if later:
            block.wait()
        same(a, expected)
        same(b, expected)
    xs = [value(place, place.rank), value(place, place.rank, rows=2)]
    dist.all_reduce_coalesced(xs)
    same(xs[1], total(values(place, rows=2)))
    outs = [torch.zeros(4 * place.size, 3, device=place.device) for _ in range(3)]
    with dist.coalescing_manager():
        for out in outs:
            dist.all_gather_into_tensor(out, value(place, place.rank))
    for out in outs:
        same(out, values(place).flatten(0, 1))


# -- messages, objects, groups --------------------------------------------------------------------


@CHECKS()
def messages(place: Place) -> None:
    """Gloo's messages take CPU tensors only; a refusal leaves the group as it was."""
    if place.size == 1:
        return
    right, left = (place.rank + 1) % place.size, (place.rank - 1) % place.size
    x = value(place, place.rank).t()
    out = torch.zeros_like(x)
    if place.cuda:
        calls: tuple[Callable[..., Any], ...] = (dist.isend, dist.send, dist.irecv, dist.recv)
        for call in calls:
            with raising("of cuda tensors", NotImplementedError):
                call(x, right)
        with raising("'gloo' has no send of cuda tensors", NotImplementedError):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right)])
        dist.barrier()
        return
    work = dist.isend(x, right)
    dist.recv(out, left)
    done(work)
    same(out, value(place, left).t())


@CHECKS()
def barriers_and_objects(place: Place) -> None:
    dist.barrier()
    done(dist.barrier(async_op=True))
    dist.monitored_barrier()
    if place.cuda:
        dist.barrier(device_ids=[0])
    mine = {"rank": place.rank, "tensor": value(place, place.rank)}
    out: list[Any] = [None] * place.size
    dist.all_gather_object(out, mine)
    for rank, found in enumerate(out):
        same(found["tensor"], value(place, rank))
    shared: list[Any] = [mine, "text"] if place.rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0, device=place.device)
    assert shared[0]["rank"] == 0
    dist.assert_same({"x": torch.ones(3, device=place.device)}, "the tensors")
    assert dist.on_rank(0, lambda: torch.ones(2, device=place.device).sum().item()) == 2.0


@CHECKS()
def groups(place: Place) -> None:
    """Of the device alone, of some ranks; the CPU's tensors beside, which have their engine."""
    x = value(place, place.rank)
    here = x.cpu()
    dist.all_reduce(here)
    engine = ("nccl" if place.size == 1 else "cuda:gloo") if place.cuda else "gloo"
    group = dist.new_group(backend=engine)
    dist.all_reduce(x, group=group)
    same(x, here)
    assert here.device.type == "cpu"
    out: list[Any] = [None] * place.size
    dist.all_gather_object(out, place.rank, group=group)
    assert out == list(range(place.size))
    if place.cuda:
        assert "cuda" in str(dist.get_backend_config())
        with raising("cpu", ValueError):
            dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(x, group=group)  # a refusal leaves the group as it was
    dist.destroy_process_group(group)
    first, x = dist.new_group([0]), value(place, place.rank)
    if place.rank == 0:
        dist.all_reduce(x, group=first)
    same(x, value(place, place.rank))


# -- misuse and unusual tensors -------------------------------------------------------------------


@CHECKS()
def tensors_of_two_devices_are_refused(place: Place) -> None:
    if not place.cuda:
        return
    x, many = value(place, place.rank), torch.zeros(4 * place.size, 3)
    parts = [torch.zeros(4, 3) for _ in range(place.size)]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: dist.all_gather(parts, x),
        lambda: dist.all_gather_into_tensor(many, x),
        lambda: dist.reduce_scatter(x, parts),
        lambda: dist.all_to_all_single(many, many.cuda()),
        lambda: dist.all_reduce_coalesced([x, torch.zeros(3)]),
    )
    for call in calls:
        with raising("device", ValueError, TypeError):
            call()
    dist.all_reduce(x)
    same(x, total(values(place)))


@CHECKS()
def outputs_that_overlap_are_refused(place: Place) -> None:
    with raising("share memory", ValueError):
        dist.all_reduce(torch.ones(1, device=place.device).expand(4))
    x = torch.zeros(4 * place.size + 2, device=place.device)
    with raising("overlap", ValueError):
        dist.all_gather_into_tensor(x[: 4 * place.size], x[2:6])
    whole = torch.zeros(4 * place.size, 3, device=place.device)
    mine = whole[4 * place.rank : 4 * place.rank + 4]
    mine.copy_(value(place, place.rank))
    dist.all_gather_into_tensor(whole, mine)  # which lies in its own place
    same(whole, values(place).flatten(0, 1))


@CHECKS()
def unusual_tensors(place: Place) -> None:
    scalar = torch.tensor(2.0, device=place.device)
    dist.all_reduce(scalar)
    assert scalar.item() == 2 * place.size
    dist.all_reduce(torch.empty(0, 3, device=place.device))
    conjugate = value(place, place.rank, torch.complex64).mul_(1j).conj()
    dist.broadcast(conjugate, 0)
    same(conjugate, value(place, 0, torch.complex64).mul_(1j).conj())
    with torch.inference_mode():
        x = value(place, place.rank)
        dist.all_reduce(x)
        same(x, total(values(place)))
    parameter = torch.nn.Parameter(value(place, place.rank))
    with torch.no_grad():
        dist.all_reduce(parameter)
    same(parameter, total(values(place)))
    saved = torch.ones(3, device=place.device, requires_grad=True) * 2
    squared: Any = saved * saved
    dist.all_reduce(saved.detach())
    with raising("modified by an inplace operation", RuntimeError):
        squared.sum().backward()


@CHECKS()
def works(place: Place) -> None:
    expected = total(values(place))
    x = value(place, place.rank)
    work: Any = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    assert work.exception() is None
    same(work.result()[0], expected)
    x = value(place, place.rank)
    work = dist.all_reduce(x, async_op=True)
    same(work.get_future().then(lambda future: future.value()[0] * 2).wait(), expected * 2)
    xs = [value(place, place.rank) + number for number in range(50)]
    every: list[Any] = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(every):
        work.wait()
    for number, x in enumerate(xs):
        same(x, expected + number * place.size)
    with torch.profiler.profile() as profile:
        dist.all_reduce(x)
    assert any("all_reduce" in event.key for event in profile.key_averages())
