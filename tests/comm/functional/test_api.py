"""Functional collectives: new tensors, which wait by themselves; errors; groups."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad

import tilework.distributed as dist
from tests.rounding import assert_close
from tests.tables import each
from tests.user_functions import Squared
from tilework.comm.functional import running
from tilework.distributed import functional
from tilework.distributed.functional import AsyncTensor, wait_tensor
from tilework.testing import run_ranks

forward_ad: Any = _forward_ad  # not annotated
LIMIT = timedelta(seconds=120)
BACKENDS = ("threads", "shm")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result is asynchronous, however small."""
    monkeypatch.setattr(running, "AT_ONCE_BYTES", -1)


@pytest.fixture(params=["at once", "later"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "later":
        monkeypatch.setattr(running, "AT_ONCE_BYTES", -1)


# -- new tensors -----------------------------------------------------------------------------

EVERY: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": functional.all_reduce,
    "reduce": lambda x: functional.reduce(x, dst=0),
    "broadcast": lambda x: functional.broadcast(x, src=0),
    "scan": functional.scan,
    "exscan": lambda x: functional.exscan(x, reverse=True),
    "all_gather_tensor": functional.all_gather_tensor,
    "all_gather_tensor along 1": lambda x: functional.all_gather_tensor(x, 1),
    "reduce_scatter_tensor": functional.reduce_scatter_tensor,
    "reduce_scatter_tensor along 1": lambda x: functional.reduce_scatter_tensor(x, "sum", 1),
    "all_to_all_single": functional.all_to_all_single,
    "gather": lambda x: functional.gather(x, dst=0),
    "scatter": lambda x: functional.scatter(x if dist.get_rank() == 0 else x[:0], 0, [1, 1]),
    "permute_tensor": lambda x: functional.permute_tensor(x, [1, 0]),
    "all_reduce_coalesced": lambda x: functional.all_reduce_coalesced([x, x + 1]),
    "all_gather_coalesced": lambda x: functional.all_gather_into_tensor_coalesced([x, x + 1]),
    "reduce_scatter_coalesced": lambda x: functional.reduce_scatter_tensor_coalesced(
        [x, x + 1], "sum", [0, 1]
    ),
    "reduce_from_group": functional.reduce_from_group,
    "scatter_to_group": functional.scatter_to_group,
    "gather_from_group": functional.gather_from_group,
}


def plain(result: Tensor | list[Tensor]) -> list[Tensor]:
    return [wait_tensor(y) for y in (result if isinstance(result, list) else [result])]


@each("backend", BACKENDS)
@each("name", EVERY)
@pytest.mark.usefixtures("both")
def test_inputs_stay_and_results_are_ones_own(backend: str, name: str) -> None:
    def body(rank: int) -> None:
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
        before = x.clone()
        first = plain(EVERY[name](x))
        saved = [y.clone() for y in first]
        assert torch.equal(x, before)
        for y in first:
            y.fill_(-1.0)
        assert torch.equal(x, before)
        again = plain(EVERY[name](x))
        assert all(map(torch.equal, again, saved))

    run_ranks(2, body, backend=backend, timeout=LIMIT)


@each("name", EVERY)
@pytest.mark.usefixtures("both")
def test_results_may_be_written_where_autograd_watches(name: str) -> None:
    def body(rank: int) -> None:
        x = torch.ones(2, 2, requires_grad=True)
        for y in plain(EVERY[name](x)):
            y.mul_(3.0)
            torch.autograd.backward(y.sum())
        assert x.grad is not None
        assert x.grad.shape == x.shape

    run_ranks(2, body, timeout=LIMIT)


@each("name", EVERY)
@pytest.mark.usefixtures("later")
def test_inputs_may_change_once_a_call_has_returned(name: str) -> None:
    """Copied, or read, before: never while others still come."""

    def body(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        x = torch.arange(4.0).view(2, 2) + rank
        expected = plain(EVERY[name](x.clone()))
        result = EVERY[name](x)
        x.fill_(100.0)
        dist.barrier()
        return plain(result), expected

    for got, expected in run_ranks(2, body, backend="shm", timeout=LIMIT):
        assert all(map(torch.equal, got, expected))


def test_integers_have_no_gradient() -> None:
    def body(rank: int) -> None:
        y = functional.all_reduce(torch.tensor([rank, 1]))
        assert y.tolist() == [1, 2]
        assert not y.requires_grad

    run_ranks(2, body)


def test_nothing_is_recorded_without_grad() -> None:
    def body(rank: int) -> None:
        with torch.no_grad():
            assert not functional.all_reduce(torch.ones(1, requires_grad=True)).requires_grad
        with torch.inference_mode():
            assert functional.all_reduce(torch.ones(1)).is_inference()

    run_ranks(2, body)


@each("op", ["bor", "band", "bxor"])
def test_bits(op: str) -> None:
    def body(rank: int) -> int:
        return int(functional.all_reduce(torch.tensor(1 + 2 * rank), op))

    expected = {"bor": 3, "band": 1, "bxor": 2}[op]
    assert run_ranks(2, body) == [expected] * 2


def test_nan_is_an_extremum_and_takes_the_gradient() -> None:
    def body(rank: int) -> list[float]:
        x = torch.tensor([float("nan") if rank else 1.0, 2.0 + rank], requires_grad=True)
        torch.autograd.backward(functional.all_reduce(x, "max").nansum())
        (grad,) = torch.autograd.grad(functional.all_reduce(x, "max"), x, torch.ones(2))
        return grad.tolist()

    assert run_ranks(2, body) == [[0.0, 0.0], [2.0, 2.0]]


# -- results that wait -------------------------------------------------------------------------


def squared(y: Tensor) -> Tensor:
    found: Tensor = Squared.apply(y)  # type: ignore[no-untyped-call]
    return found


def from_memory(y: Tensor) -> Tensor:
    count = y.numel()
    found = (ctypes.c_float * count).from_address(y.data_ptr())
    return torch.tensor(list(found))


def saved_and_loaded(y: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)
    return loaded


def written_into(y: Tensor) -> Tensor:
    torch.add(torch.ones(3), 1, out=y)
    return y - torch.tensor([0.0, -1.0, -2.0]) + 1


def written_at_0(y: Tensor) -> Tensor:
    y[0] = 9.0
    return y


#: Ways to use [3, 4, 5], each giving [3, 4, 5].
USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda y: y + 0,
    "radd": lambda y: 0 + y,
    "add_": lambda y: (y.add_(1), y - 1)[1],
    "iadd": lambda y: y.__iadd__(1) - 1,
    "out": written_into,
    "numpy": lambda y: torch.from_numpy(y.detach().numpy()),
    "asarray": lambda y: torch.from_numpy(np.asarray(y.detach())),
    "tolist": lambda y: torch.tensor(y.tolist()),
    "item": lambda y: torch.tensor([y[0].item(), y[1].item(), y[2].item()]),
    "index": lambda y: torch.stack([y[0], y[1], y[2]]),
    "setitem": lambda y: written_at_0(y) - torch.tensor([6.0, 0.0, 0.0]),
    "iterate": lambda y: torch.stack(list(y)),
    "unpack": lambda y: torch.stack([*y]),
    "cat": lambda y: torch.cat([y, y])[:3],
    "stack": lambda y: torch.stack((y, y))[1],
    "view": lambda y: y.view(3, 1).view(3),
    "linear": lambda y: torch.nn.functional.linear(y, torch.eye(3)),
    "module": lambda y: torch.nn.Identity()(y) * 1,
    "matmul": lambda y: torch.eye(3) @ y,
    "where": lambda y: torch.where(y > 0, y, 9.0),
    "clone": lambda y: y.clone(),
    "detach": lambda y: y.detach(),
    "data": lambda y: y.data,
    "copy_": lambda y: torch.zeros(3).copy_(y.detach()),
    "to": lambda y: y.to(torch.float64).to(torch.float32),
    "memory": from_memory,
    "repr": lambda y: torch.tensor([float(n) for n in repr(y)[8:17].split(", ")]),
    "format": lambda y: torch.tensor([float(f"{y[i]:.1f}") for i in range(3)]),
    "bool": lambda y: y * 1 if bool((y > 0).all()) else None,
    "len": lambda y: y[: len(y)],
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "pickle": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "save": saved_and_loaded,
    "dlpack": lambda y: torch.utils.dlpack.from_dlpack(y.detach()),
    "storage": lambda y: torch.tensor([], dtype=y.dtype).set_(y.detach().untyped_storage()),
    "own function": lambda y: squared(y).sqrt(),
    "dispatcher": lambda y: torch.ops.aten.mul.Tensor(y, 1.0),
    "all_reduce": lambda y: functional.all_reduce(y, "max"),
    "all_gather": lambda y: functional.all_gather_tensor(y)[:3],
    "in-place all_reduce": lambda y: (dist.all_reduce(y, dist.ReduceOp.MAX), y * 1)[1],
    "in-place all_gather": lambda y: gathered_in_place(y),
    "broadcast_object": lambda y: sent_as_object(y),
    "dict": lambda y: torch.func.functional_call(torch.nn.Identity(), {}, (y,)) * 1,
    "checkpoint": lambda y: torch.utils.checkpoint.checkpoint(
        torch.mul, y, 1.0, use_reentrant=False
    ),
    "wait_tensor": wait_tensor,
}


def gathered_in_place(y: Tensor) -> Tensor:
    parts = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(parts, y)
    return parts[1]


def sent_as_object(y: Tensor) -> Any:
    objects = [y.detach()]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


@each("name", USES)
@pytest.mark.usefixtures("later")
def test_every_use_waits(name: str) -> None:
    """Rank 0 uses the result before rank 1 has even come."""
    started = threading.Event()

    def body(rank: int) -> None:
        x = torch.tensor([1.0, 2.0, 3.0]) * (1 + rank)
        if rank == 1:
            assert started.wait(120)
            threading.Event().wait(0.02)
        y = functional.all_reduce(x - rank * torch.tensor([0.0, 2.0, 4.0]))
        assert type(y) is AsyncTensor
        assert y.shape == (3,)
        started.set()
        used = USES[name](y)
        assert type(wait_tensor(used)) is Tensor
        assert used.tolist() == [3.0, 4.0, 5.0]

    run_ranks(2, body, backend="shm", timeout=LIMIT)


#: Uses of the values alone; autograd has no part in them.
CUT = {"detach", "data", "tolist", "item", "memory", "repr", "format", "broadcast_object", "copy_"}
CUT |= {"asarray", "numpy", "deepcopy", "pickle", "save", "dlpack", "storage", "out", "setitem"}
CUT |= {name for name in USES if name.startswith("in-place")}


@each("name", sorted(USES.keys() - CUT))
@pytest.mark.usefixtures("later")
def test_gradients_pass_through_every_use(name: str) -> None:
    def body(rank: int) -> None:
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        y = functional.all_reduce(x, "avg")
        assert y.requires_grad
        torch.autograd.backward(USES[name](y).sum())
        assert x.grad is not None
        assert x.grad.tolist() == [1.0, 1.0, 1.0]

    run_ranks(1, body, timeout=LIMIT)


def test_a_large_result_does_not_hold_up_the_call() -> None:
    """Rank 1 comes only once rank 0's call has returned."""
    returned = threading.Event()

    def body(rank: int) -> None:
        x = torch.ones(100_000)
        if rank == 1:
            assert returned.wait(120)
        y = functional.all_reduce(x)
        returned.set()
        assert isinstance(y, AsyncTensor)
        assert float(y.sum()) == 200_000.0
        assert y.is_completed()

    run_ranks(2, body, backend="shm", timeout=LIMIT)


def test_a_small_result_is_a_plain_tensor() -> None:
    assert run_ranks(2, lambda rank: type(functional.all_reduce(torch.ones(2)))) == [Tensor] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_may_be_dropped(backend: str) -> None:
    """Memory stays until nobody writes to it any more; later operations are right."""

    def body(rank: int) -> None:
        for _ in range(20):
            functional.all_reduce(torch.ones(50_000))
            functional.all_gather_tensor(torch.ones(50_000))
            torch.zeros(50_000)  # would be given the memory, had it been freed
        gc.collect()
        assert functional.all_reduce(torch.tensor(1.0)).item() == 2.0

    run_ranks(2, body, backend=backend, timeout=LIMIT)


@pytest.mark.usefixtures("later")
def test_metadata_does_not_wait() -> None:
    entered = threading.Event()

    def body(rank: int) -> None:
        if rank == 1:
            assert entered.wait(120)
        y = functional.all_reduce(torch.ones(2, 3, requires_grad=True))
        assert (y.shape, y.size(0), y.dim(), y.numel(), len(y)) == ((2, 3), 2, 2, 6, 2)
        assert (y.dtype, y.device.type, y.is_contiguous()) == (torch.float32, "cpu", True)
        assert y.requires_grad
        assert y.grad_fn is not None
        assert isinstance(y, AsyncTensor)
        assert rank == 1 or not y.is_completed()
        entered.set()
        wait_tensor(y)

    run_ranks(2, body, backend="shm", timeout=LIMIT)


@pytest.mark.usefixtures("later")
def test_a_failure_is_raised_by_every_use() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            dist.abort_process_group(reason="no more")
            return
        y = functional.all_reduce(torch.ones(3))
        for _ in range(2):
            with pytest.raises(dist.PeerLostError, match="no more"):
                y.sum()
        with pytest.raises(dist.PeerLostError):
            squared(y)

    run_ranks(2, body, backend="shm", timeout=LIMIT)


@pytest.mark.usefixtures("later")
def test_a_wrapper_in_a_graph_is_not_written_behind_autograds_back() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            torch.ops.aten.mul_.Tensor(x, 2.0)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    def body(rank: int) -> None:
        y = functional.all_reduce(torch.ones(3, requires_grad=True))
        with (
            torch._C.DisableTorchFunctionSubclass(),
            pytest.raises(RuntimeError, match="wait_tens"),
        ):
            Doubled.apply(y)  # type: ignore[no-untyped-call]

    run_ranks(1, body)


@pytest.mark.usefixtures("later")
def test_gradients_that_wait_are_accumulated_plain() -> None:
    def body(rank: int) -> None:
        x = torch.ones(3, requires_grad=True)
        seen: list[float] = []
        x.register_hook(lambda grad: seen.append(float(grad.sum())))  # type: ignore[no-untyped-call]
        for _ in range(2):
            torch.autograd.backward(functional.all_reduce(x).sum())
        assert x.grad is not None
        assert type(x.grad) is Tensor
        assert x.grad.tolist() == [4.0, 4.0, 4.0]
        assert seen == [6.0, 6.0]

    run_ranks(2, body, backend="shm", timeout=LIMIT)


# -- autograd's other ways ---------------------------------------------------------------------


@pytest.mark.usefixtures("both")
def test_backward_twice_with_a_retained_graph() -> None:
    def body(rank: int) -> list[float]:
        x = torch.tensor([1.0 + rank], requires_grad=True)
        loss = (functional.all_reduce(x) ** 2).sum()
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(loss)
        assert x.grad is not None
        return x.grad.tolist()

    assert run_ranks(2, body) == [[24.0]] * 2


@each("reentrant", [False, True])
@pytest.mark.usefixtures("both")
def test_checkpointing_communicates_again(reentrant: bool) -> None:
    def body(rank: int) -> list[float]:
        x = torch.tensor([1.0 + rank], requires_grad=True)

        def layer(x: Tensor) -> Tensor:
            return functional.all_reduce(x * x).sin()

        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        torch.autograd.backward(y.sum())
        assert x.grad is not None
        return x.grad.tolist()

    slope = 2 * torch.cos(torch.tensor(5.0)).item()
    found = run_ranks(2, body)
    assert found == [pytest.approx([2.0 * slope]), pytest.approx([4.0 * slope])]


def test_backward_uses_the_group_of_the_forward_in_any_context() -> None:
    """A gradient may be asked for where no World is, like on another thread."""

    def body(rank: int) -> list[float]:
        pair = dist.new_group([0, 1])
        if rank == 2:
            return []
        x = torch.tensor([1.0], requires_grad=True)
        loss = functional.all_reduce(x, group=pair).sum() * (rank + 1)
        thread = threading.Thread(target=torch.autograd.backward, args=(loss,))
        thread.start()
        thread.join(120)
        assert x.grad is not None
        return x.grad.tolist()

    assert run_ranks(3, body) == [[3.0], [3.0], []]


def test_func_grad() -> None:
    def body(rank: int) -> float:
        loss = lambda x: (functional.all_reduce(x) ** 2).sum()  # noqa: E731
        return float(torch.func.grad(loss)(torch.tensor(1.0 + rank)))

    assert run_ranks(2, body) == [12.0, 12.0]


def test_func_grad_of_grad() -> None:
    def body(rank: int) -> float:
        loss = lambda x: (functional.all_reduce(x) ** 3).sum()  # noqa: E731
        slope = torch.func.grad(loss)
        return float(torch.func.grad(lambda x: slope(x))(torch.tensor(1.0)))

    # s = x0 + x1; the sum of both losses is 2 s^3, its slope on each rank 6 s^2, and the sum of
    # both slopes has the slope 24 s.
    assert run_ranks(2, body) == [48.0, 48.0]


ELEMENTWISE = ("all_reduce", "reduce", "broadcast", "permute_tensor", "reduce_from_group")


@each("name", ELEMENTWISE)
@each("dim", [0, 1])
def test_vmap_of_what_is_elementwise(name: str, dim: int) -> None:
    def body(rank: int) -> None:
        x = torch.arange(6.0).view(3, 2) + rank
        mapped = torch.func.vmap(EVERY[name], in_dims=dim, out_dims=dim)(x)
        assert torch.equal(mapped, EVERY[name](x))

    run_ranks(2, body)


def test_vmap_of_the_others_says_that_it_does_not_work() -> None:
    def body(rank: int) -> None:
        with pytest.raises(NotImplementedError, match="vmap of all_gather_tensor"):
            torch.func.vmap(functional.all_gather_tensor)(torch.ones(2, 2))

    run_ranks(1, body)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_forward_mode_of_what_is_linear() -> None:
    def body(rank: int) -> None:
        x = torch.arange(4.0).view(2, 2) + rank
        tangent = x.square()
        for name in (name for name in EVERY if "coalesced" not in name):
            expected = EVERY[name](tangent)
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, tangent)
                result = forward_ad.unpack_dual(EVERY[name](dual))
                assert torch.equal(result.tangent, expected), name
            found = torch.func.jvp(EVERY[name], (x,), (tangent,))
            assert torch.equal(found[1], expected), name

    # torch counts the levels of forward mode per process, not per thread.
    run_ranks(2, body, kind="processes")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_forward_mode_of_what_is_not_linear_says_so() -> None:
    def body(rank: int) -> None:
        with pytest.raises(NotImplementedError, match="use reverse mode"):
            torch.func.jvp(
                lambda x: functional.all_reduce(x, "max"), (torch.ones(2),), (torch.ones(2),)
            )

    run_ranks(1, body)


# -- one loss that all ranks hold --------------------------------------------------------------


@pytest.mark.usefixtures("both")
def test_a_divided_network_has_the_gradients_of_the_whole() -> None:
    """Two layers, the first divided by columns and the second by rows; every rank has the loss."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
    first, second = torch.randn(6, 4, generator=generator), torch.randn(3, 6, generator=generator)

    def loss_of(y: Tensor) -> Tensor:
        return (y - target).square().mean()

    whole = [t.clone().requires_grad_() for t in (x, first, second)]
    torch.autograd.backward(loss_of((whole[0] @ whole[1].T).tanh() @ whole[2].T))
    expected = [t.grad for t in whole]

    def body(rank: int) -> None:
        a, w1, w2 = (t.clone().requires_grad_() for t in (x, first, second))
        mine = functional.scatter_to_group(w1, 0), functional.scatter_to_group(w2, 1)
        hidden = (functional.copy_to_group(a) @ mine[0].T).tanh()
        torch.autograd.backward(loss_of(functional.reduce_from_group(hidden @ mine[1].T)))
        for found, wanted in zip((a, w1, w2), expected, strict=True):
            assert found.grad is not None
            assert_close(found.grad, wanted)

    run_ranks(3, body)


def test_gathering_what_all_ranks_use_alike() -> None:
    def body(rank: int) -> list[float]:
        part = torch.tensor([1.0 + rank], requires_grad=True)
        whole = functional.gather_from_group(part, sizes=[1, 1])
        torch.autograd.backward((whole**2).sum())
        assert part.grad is not None
        return part.grad.tolist()

    assert run_ranks(2, body) == [[2.0], [4.0]]


# -- groups and misuse -------------------------------------------------------------------------


def test_groups_by_name_and_roots_by_global_rank() -> None:
    def body(rank: int) -> list[float]:
        group = dist.new_group([1, 2])
        if dist.rank_not_in_group(group):
            return []
        assert isinstance(group, dist.ProcessGroup)
        x = torch.tensor([float(rank)])
        by_name = functional.broadcast(x, src=2, group=group.group_name)
        return [by_name.item(), functional.reduce(x, dst=1, group=group).item()]

    assert run_ranks(3, body) == [[], [2.0, 3.0], [2.0, 0.0]]


def test_a_rank_outside_the_group_is_told() -> None:
    def body(rank: int) -> None:
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(ValueError, match=r"not in .*rank_not_in_group"):
                functional.all_reduce(torch.ones(1), group=group)

    run_ranks(2, body)


def test_a_group_that_is_gone() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="no group named 'lost'"):
            functional.all_reduce(torch.ones(1), group="lost")

    run_ranks(1, body)


ONE = torch.ones(1)
MISUSE: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "no tensor": (TypeError, "Tensor", lambda: functional.all_reduce([1.0])),  # type: ignore[arg-type]
    "no reduction": (ValueError, "unknown reduction", lambda: functional.all_reduce(ONE, "plus")),
    "no such op": (TypeError, "reduction", lambda: functional.all_reduce(ONE, 3)),  # type: ignore[arg-type]
    "mean of integers": (
        ValueError,
        "not defined",
        lambda: functional.all_reduce(torch.tensor(1), "avg"),
    ),
    "sparse": (ValueError, "sparse", lambda: functional.all_reduce(ONE.to_sparse())),
    "uneven rows": (
        ValueError,
        "divide equally",
        lambda: functional.reduce_scatter_tensor(torch.ones(3)),
    ),
    "no such dim": (ValueError, "dim 2", lambda: functional.all_gather_tensor(ONE, 2)),
    "too few sizes": (
        ValueError,
        "one number for each",
        lambda: functional.all_gather_tensor(ONE, sizes=[1]),
    ),
    "wrong sizes": (
        ValueError,
        "sum to",
        lambda: functional.reduce_scatter_tensor(torch.ones(4), sizes=[1, 2]),
    ),
    "not its own size": (
        ValueError,
        "has a tensor with 1 rows",
        lambda: functional.all_gather_tensor(ONE, sizes=[2, 2]),
    ),
    "wrong splits": (
        ValueError,
        "sum to",
        lambda: functional.all_to_all_single(torch.ones(4), [2, 2], [1, 2]),
    ),
    "two senders": (
        ValueError,
        "different destination",
        lambda: functional.permute_tensor(ONE, [0, 0]),
    ),
    "nowhere": (
        ValueError,
        "different destination",
        lambda: functional.permute_tensor(ONE, [0, 2]),
    ),
    "no such root": (ValueError, "not part", lambda: functional.broadcast(ONE, 5)),
}


@each("name", MISUSE)
def test_misuse_is_told_and_harms_nothing(name: str) -> None:
    error, words, call = MISUSE[name]

    def body(rank: int) -> float:
        with pytest.raises(error, match=words):
            call()
        return functional.all_reduce(torch.tensor(1.0)).item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_ranks_that_differ_are_told() -> None:
    def body(rank: int) -> None:
        call = functional.all_reduce if rank else lambda x: functional.broadcast(x, 0)
        with pytest.raises(dist.CollectiveMismatchError):
            call(torch.ones(2))

    run_ranks(2, body)


def test_overwriting_a_result_that_backward_needs_is_noticed() -> None:
    def program(rank: int) -> None:
        x = torch.ones(100_000, requires_grad=True)  # long enough to be on its way when returned
        y = functional.all_reduce(x)
        loss = (y * y).sum()
        with torch.no_grad():
            dist.all_reduce(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, program, backend="shm")
