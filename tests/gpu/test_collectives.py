"""Every collective on CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@in_worlds(ONE, ONE_DEFAULT, TWO, THREE)
def test_collectives(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def value(place: Place, rank: int, dtype: torch.dtype, rows: int = 4) -> Tensor:
    """What a rank contributes: small whole numbers, so that sums are exact."""
    numbers = (torch.arange(rows * 3).reshape(rows, 3) * (rank + 2)) % 5 + rank
    return (numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)).to(place.device)


def values(place: Place, dtype: torch.dtype, rows: int = 4) -> list[Tensor]:
    return [value(place, rank, dtype, rows) for rank in range(place.size)]


def total(parts: list[Tensor]) -> Tensor:
    stacked = torch.stack([part.cpu() for part in parts])
    return stacked.any(0) if stacked.dtype is torch.bool else stacked.sum(0).to(stacked.dtype)


def ways(tensor: Tensor) -> list[Tensor]:
    """The tensor, contiguous and not: transposed memory, and every other column."""
    apart = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1]).to(tensor)
    apart[..., ::2] = tensor
    return [tensor.clone(), tensor.t().clone().t(), apart[..., ::2]]


def done(work: Any) -> None:
    if work is not None:
        assert work.wait()


@CHECKS(*DTYPES)
def all_reduce(place: Place, dtype: torch.dtype) -> None:
    for later in (False, True):
        for x in ways(value(place, place.rank, dtype)):
            done(dist.all_reduce(x, async_op=later))
            same(x, total(values(place, dtype)))


@CHECKS(*DTYPES)
def broadcast(place: Place, dtype: torch.dtype) -> None:
    for later in (False, True):
        for src in range(place.size):
            for x in ways(value(place, place.rank, dtype)):
                done(dist.broadcast(x, src, async_op=later))
                same(x, value(place, src, dtype))


@CHECKS(*DTYPES)
def reduce(place: Place, dtype: torch.dtype) -> None:
    last = place.size - 1
    for later in (False, True):
        for x in ways(value(place, place.rank, dtype)):
            done(dist.reduce(x, last, async_op=later))
            mine = value(place, place.rank, dtype)
            same(x, total(values(place, dtype)) if place.rank == last else mine)


@CHECKS(*DTYPES)
def all_gather(place: Place, dtype: torch.dtype) -> None:
    for later in (False, True):
        for x in ways(value(place, place.rank, dtype)):
            out = [torch.zeros_like(x) for _ in range(place.size)]
            done(dist.all_gather(out, x, async_op=later))
            for found, expected in zip(out, values(place, dtype), strict=True):
                same(found, expected)


@CHECKS(*DTYPES)
def all_gather_into_tensor(place: Place, dtype: torch.dtype) -> None:
    expected = torch.cat(values(place, dtype))
    for later in (False, True):
        for x in ways(value(place, place.rank, dtype)):
            out = torch.zeros_like(expected)
            done(dist.all_gather_into_tensor(out, x, async_op=later))
            same(out, expected)
            stacked = torch.zeros_like(torch.stack(values(place, dtype)))
            done(dist.all_gather_into_tensor(stacked, x, async_op=later))
            same(stacked.flatten(0, 1), expected)


@CHECKS(*DTYPES)
def gather(place: Place, dtype: torch.dtype) -> None:
    for later in (False, True):
        x = value(place, place.rank, dtype).t()
        root = place.size - 1
        out = [torch.zeros_like(x) for _ in range(place.size)] if place.rank == root else None
        done(dist.gather(x, out, root, async_op=later))
        for found, expected in zip(out or [], values(place, dtype), strict=bool(out)):
            same(found, expected.t())


@CHECKS(*DTYPES)
def scatter(place: Place, dtype: torch.dtype) -> None:
    for later in (False, True):
        parts = values(place, dtype) if place.rank == 0 else None
        x = torch.zeros_like(value(place, 0, dtype)).t().clone().t()
        done(dist.scatter(x, parts, 0, async_op=later))
        same(x, value(place, place.rank, dtype))


@CHECKS(*DTYPES)
def reduce_scatter(place: Place, dtype: torch.dtype) -> None:
    for later in (False, True):
        parts = [value(place, place.rank + each, dtype).t() for each in range(place.size)]
        x = torch.zeros_like(parts[0])
        done(dist.reduce_scatter(x, parts, async_op=later))
        every = [value(place, rank + place.rank, dtype).t() for rank in range(place.size)]
        same(x, total(every))


@CHECKS(*DTYPES)
def reduce_scatter_tensor(place: Place, dtype: torch.dtype) -> None:
    rows = 2 * place.size
    expected = total(values(place, dtype, rows))[2 * place.rank : 2 * place.rank + 2]
    for later in (False, True):
        for x in ways(value(place, place.rank, dtype, rows)):
            out = torch.zeros(2, 3, dtype=dtype, device=place.device)
            done(dist.reduce_scatter_tensor(out, x, async_op=later))
            same(out, expected)


@CHECKS(*DTYPES)
def all_to_all(place: Place, dtype: torch.dtype) -> None:
    for later in (False, True):
        sent = [value(place, 10 * place.rank + to, dtype, to + 1) for to in range(place.size)]
        out = [torch.zeros_like(sent[place.rank]) for _ in range(place.size)]
        done(dist.all_to_all(out, sent, async_op=later))
        for rank, found in enumerate(out):
            same(found, value(place, 10 * rank + place.rank, dtype, place.rank + 1))


@CHECKS(*DTYPES)
def all_to_all_single(place: Place, dtype: torch.dtype) -> None:
    sizes = [to + 1 for to in range(place.size)]
    for later in (False, True):
        sent = torch.cat(
            [value(place, 10 * place.rank + to, dtype, to + 1) for to in range(place.size)]
        )
        out = torch.zeros(place.size * (place.rank + 1), 3, dtype=dtype, device=place.device)
        splits = [place.rank + 1] * place.size
        done(dist.all_to_all_single(out, sent, splits, sizes, async_op=later))
        same(out, torch.cat([value(place, 10 * rank + place.rank, dtype, place.rank + 1)
                             for rank in range(place.size)]))  # fmt: skip
        even = value(place, place.rank, dtype, place.size)
        out = torch.zeros_like(even)
        done(dist.all_to_all_single(out, even, async_op=later))
        same(out, torch.stack([v[place.rank] for v in values(place, dtype, place.size)]))


@CHECKS("AVG", "MAX", "MIN", "PRODUCT", "PREMUL_SUM")
def reductions(place: Place, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        op: Any = (
            dist.make_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
        )
        x = value(place, place.rank, dtype)
        every = torch.stack([v.cpu().float() for v in values(place, dtype)])
        expected = {
            "AVG": every.mean(0),
            "MAX": every.amax(0),
            "MIN": every.amin(0),
            "PRODUCT": every.prod(0),
            "PREMUL_SUM": every.sum(0) / 2,
        }[name]
        if lacking("'gloo' has no ReduceOp.PREMUL_SUM", partial(dist.all_reduce, x, op)):
            return  # as in torch
        close(x.float(), expected, 0.02 if dtype is torch.bfloat16 else 1e-6)


@CHECKS("AVG", "MAX")
def reductions_that_scatter(place: Place, name: str) -> None:
    x = value(place, place.rank, torch.float32, place.size)
    out = torch.zeros(1, 3, device=place.device)
    dist.reduce_scatter_tensor(out, x, getattr(dist.ReduceOp, name))
    every = torch.stack(values(place, torch.float32, place.size)).cpu()
    expected = every.mean(0) if name == "AVG" else every.amax(0)
    close(out[0], expected[place.rank])


@CHECKS()
def integers_are_averaged_or_refused(place: Place) -> None:
    x = torch.full((4,), 3, device=place.device)
    try:
        dist.all_reduce(x, dist.ReduceOp.AVG)
    except (NotImplementedError, ValueError, TypeError):
        return
    same(x, torch.full((4,), 3))


@CHECKS("BAND", "BOR", "BXOR")
def bits(place: Place, name: str) -> None:
    x = value(place, place.rank, torch.int64)
    if lacking("'nccl'", lambda: dist.all_reduce(x, getattr(dist.ReduceOp, name))):
        return
    operator = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[name]
    expected = value(place, 0, torch.int64)
    for each in values(place, torch.int64)[1:]:
        expected = operator(expected, each)
    same(x, expected)


@CHECKS(torch.float16, torch.float64, torch.uint8, torch.int32, torch.int16, torch.complex128)
def more_dtypes(place: Place, dtype: torch.dtype) -> None:
    x = value(place, place.rank, dtype)
    out = torch.zeros_like(torch.cat(values(place, dtype)))
    dist.all_gather_into_tensor(out, x)
    same(out, torch.cat(values(place, dtype)))
    if dtype is not torch.int16:  # which no engine of torch's adds
        dist.all_reduce(x)
        same(x, total(values(place, dtype)))


@CHECKS()
def float8_is_moved(place: Place) -> None:
    x = value(place, place.rank, torch.float32).to(torch.float8_e4m3fn)
    out = [torch.zeros_like(x) for _ in range(place.size)]
    dist.all_gather(out, x)
    same(torch.stack([o.float() for o in out]), torch.stack(values(place, torch.float32)))


@CHECKS()
def coalesced(place: Place) -> None:
    expected = total(values(place, torch.float32))
    for later in (False, True):
        a, b = value(place, place.rank, torch.float32), value(place, place.rank, torch.float32)
        with dist.coalescing_manager(async_ops=later) as block:
            dist.all_reduce(a)
            dist.all_reduce(b)
        if later:
            block.wait()
        same(a, expected)
        same(b, expected)
    xs = [value(place, place.rank, torch.float32), value(place, place.rank, torch.float32, 2)]
    dist.all_reduce_coalesced(xs)
    same(xs[1], total(values(place, torch.float32, 2)))
    outs = [[torch.zeros_like(xs[0])] for _ in range(place.size)]
    dist.all_gather_coalesced(outs, [value(place, place.rank, torch.float32)])
    same(outs[-1][0], value(place, place.size - 1, torch.float32))


@CHECKS()
def coalesced_gathers(place: Place) -> None:
    xs = [value(place, place.rank, torch.float32) for _ in range(3)]
    outs = [torch.zeros(4 * place.size, 3, device=place.device) for _ in xs]
    with dist.coalescing_manager():
        for out, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(out, x)
    for out in outs:
        same(out, torch.cat(values(place, torch.float32)))


def refuse_messages(x: Tensor, peer: int) -> None:
    """Gloo's messages take CPU tensors only; a refusal leaves the group as it was."""
    messages: tuple[Callable[..., Any], ...] = (dist.isend, dist.send, dist.irecv, dist.recv)
    for call in messages:
        with raising("of cuda tensors", NotImplementedError):
            call(x, peer)
    dist.all_reduce(x)


@CHECKS(torch.float32, torch.bool)
def messages(place: Place, dtype: torch.dtype) -> None:
    if place.size == 1:
        return
    right, left = (place.rank + 1) % place.size, (place.rank - 1) % place.size
    x = value(place, place.rank, dtype).t()
    out = torch.zeros_like(x)
    if place.cuda:
        refuse_messages(x, right)
        return
    work = dist.isend(x, right)
    dist.recv(out, left)
    done(work)
    same(out, value(place, left, dtype).t())
    out = torch.zeros_like(x)
    pending = dist.irecv(out, left)
    dist.send(x, right)
    done(pending)
    same(out, value(place, left, dtype).t())


@CHECKS()
def batches_of_messages(place: Place) -> None:
    if place.size == 1:
        return
    right, left = (place.rank + 1) % place.size, (place.rank - 1) % place.size
    x = value(place, place.rank, torch.float32)
    out = torch.zeros_like(x)
    ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, out, left)]
    if place.cuda:
        with raising("'gloo' has no send of cuda tensors", NotImplementedError):
            dist.batch_isend_irecv(ops)
        dist.barrier()
        return
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(out, value(place, left, torch.float32))


@CHECKS()
def barriers(place: Place) -> None:
    dist.barrier()
    done(dist.barrier(async_op=True))
    dist.monitored_barrier()
    if place.cuda:
        dist.barrier(device_ids=[0])


@CHECKS()
def objects(place: Place) -> None:
    mine = {"rank": place.rank, "tensor": value(place, place.rank, torch.float32)}
    out: list[Any] = [None] * place.size
    dist.all_gather_object(out, mine)
    for rank, found in enumerate(out):
        same(found["tensor"], value(place, rank, torch.float32))
    shared: list[Any] = [mine, "text"] if place.rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    assert shared[0]["rank"] == 0
    dist.broadcast_object_list(shared, 0, device=place.device)
    gathered = [None] * place.size if place.rank == 0 else None
    dist.gather_object(mine, gathered, 0)
    part: list[Any] = [None]
    every = [{"for": rank} for rank in range(place.size)] if place.rank == 0 else None
    dist.scatter_object_list(part, every, 0)
    assert part == [{"for": place.rank}]


@CHECKS()
def cpu_tensors_beside(place: Place) -> None:
    x = value(place, place.rank, torch.float32)
    here = x.cpu()
    dist.all_reduce(x)
    dist.all_reduce(here)
    same(x, here)
    on_device(place, x)
    assert here.device.type == "cpu"


@CHECKS()
def a_group_of_the_device_alone(place: Place) -> None:
    engine = ("nccl" if place.size == 1 else "cuda:gloo") if place.cuda else "gloo"
    group = dist.new_group(backend=engine)
    x = value(place, place.rank, torch.float32)
    dist.all_reduce(x, group=group)
    same(x, total(values(place, torch.float32)))
    dist.barrier(group=group)
    out: list[Any] = [None] * place.size
    dist.all_gather_object(out, place.rank, group=group)
    assert out == list(range(place.size))
    if place.cuda:
        with raising("cpu", ValueError):
            dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(x, group=group)  # a refusal leaves the group as it was
    dist.destroy_process_group(group)


@CHECKS()
def groups_of_some(place: Place) -> None:
    first = dist.new_group([0])
    x = value(place, place.rank, torch.float32)
    if place.rank == 0:
        dist.all_reduce(x, group=first)
    same(x, value(place, place.rank, torch.float32))
    whole = dist.new_group(list(range(place.size)))
    dist.all_reduce(x, group=whole)
    same(x, total(values(place, torch.float32)))


@CHECKS()
def tensors_of_two_devices_are_refused(place: Place) -> None:
    if not place.cuda:
        return
    x = value(place, place.rank, torch.float32)
    with raising("device", ValueError, TypeError):
        dist.all_gather([torch.zeros(4, 3) for _ in range(place.size)], x)
    with raising("device", ValueError, TypeError):
        dist.all_gather_into_tensor(torch.zeros(4 * place.size, 3), x)
    with raising("device", ValueError, TypeError):
        dist.reduce_scatter(x, [torch.zeros(4, 3) for _ in range(place.size)])
    with raising("device", ValueError, TypeError):
        dist.all_to_all_single(
            torch.zeros(4 * place.size, 3), torch.zeros(4 * place.size, 3).cuda()
        )
    with raising("device", ValueError, TypeError):
        dist.all_reduce_coalesced([x, torch.zeros(3)])
    dist.all_reduce(x)
    same(x, total(values(place, torch.float32)))


@CHECKS()
def outputs_that_overlap_are_refused(place: Place) -> None:
    with raising("share memory", ValueError):
        dist.all_reduce(torch.ones(1, device=place.device).expand(4))
    x = torch.zeros(4 * place.size + 2, device=place.device)
    with raising("overlap", ValueError):
        dist.all_gather_into_tensor(x[: 4 * place.size], x[2:6])


@CHECKS()
def in_place(place: Place) -> None:
    whole = torch.zeros(4 * place.size, 3, device=place.device)
    mine = whole[4 * place.rank : 4 * place.rank + 4]
    mine.copy_(value(place, place.rank, torch.float32))
    dist.all_gather_into_tensor(whole, mine)
    same(whole, torch.cat(values(place, torch.float32)))


@CHECKS()
def unusual_tensors(place: Place) -> None:
    scalar = torch.tensor(2.0, device=place.device)
    dist.all_reduce(scalar)
    assert scalar.item() == 2 * place.size
    empty = torch.empty(0, 3, device=place.device)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    conjugate = value(place, place.rank, torch.complex64).mul_(1j).conj()
    dist.broadcast(conjugate, 0)
    same(conjugate, value(place, 0, torch.complex64).mul_(1j).conj())
    with torch.inference_mode():
        x = value(place, place.rank, torch.float32)
        dist.all_reduce(x)
        same(x, total(values(place, torch.float32)))
    parameter = torch.nn.Parameter(value(place, place.rank, torch.float32))
    with torch.no_grad():
        dist.all_reduce(parameter)
    same(parameter, total(values(place, torch.float32)))


@CHECKS()
def a_saved_tensor_that_is_overwritten_is_noticed(place: Place) -> None:
    x = torch.ones(3, device=place.device, requires_grad=True)
    y = x * 2
    z: Any = y * y
    dist.all_reduce(y.detach())
    with raising("modified by an inplace operation", RuntimeError):
        z.sum().backward()


@CHECKS()
def works(place: Place) -> None:
    x = value(place, place.rank, torch.float32)
    work: Any = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    assert work.exception() is None
    same(work.result()[0], total(values(place, torch.float32)))
    x = value(place, place.rank, torch.float32)
    work = dist.all_reduce(x, async_op=True)
    found = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    same(found, total(values(place, torch.float32)) * 2)


@CHECKS()
def many_in_flight(place: Place) -> None:
    xs = [value(place, place.rank, torch.float32) + number for number in range(50)]
    every: list[Any] = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(every):
        work.wait()
    for number, x in enumerate(xs):
        same(x, total([v + number for v in values(place, torch.float32)]))


@CHECKS()
def names_and_devices_of_groups(place: Place) -> None:
    group = dist.get_default_group()
    assert group.size() == place.size
    text = f"{group} {dist.get_backend_config()}"
    assert dist.get_backend() in text
    if place.cuda:
        assert "cuda" in str(dist.get_backend_config()), text
        x = torch.ones(3, device="cuda")
        dist.all_reduce(x)


@CHECKS()
def same_values_are_asserted(place: Place) -> None:
    dist.assert_same({"x": torch.ones(3, device=place.device)}, "the tensors")
    assert dist.on_rank(0, lambda: torch.ones(2, device=place.device).sum().item()) == 2.0


@CHECKS()
def profiles(place: Place) -> None:
    x = value(place, place.rank, torch.float32)
    with torch.profiler.profile() as profile:
        dist.all_reduce(x)
        done(dist.all_reduce(x, async_op=True))
    assert any("all_reduce" in event.key for event in profile.key_averages())
