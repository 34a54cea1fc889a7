"""Sums that are rounded between hosts only: close, equal on all ranks, and few bytes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilework.distributed as dist
from tests.hosts import run_on_hosts, two_hosts, why_no_hosts
from tilework.parallel import DistributedDataParallel
from tilework.parallel.comm_hooks import SlowLinks, slow_links_hook
from tilework.testing import run_ranks

HOSTS = [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]], [[0, 2], [1], [3]]]
SENT = {torch.bfloat16: 2**-8, torch.int8: 2**-7}


def values(rank: int, turn: int = 0) -> torch.Tensor:
    return torch.randn(5, 1001, generator=torch.Generator().manual_seed(10 * turn + rank))


@pytest.mark.parametrize("sent", SENT, ids=str)
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_sums_are_close_and_the_same_bits_on_all(hosts: Any, sent: torch.dtype) -> None:
    def program(rank: int) -> torch.Tensor:
        links = SlowLinks(sent=sent, hosts=hosts)
        given = values(rank)
        total = links.sum(given)
        assert torch.equal(given, values(rank))
        return total

    results = run_ranks(4, program)
    expected = torch.stack([values(rank) for rank in range(4)]).sum(0)
    assert all(torch.equal(each, results[0]) for each in results)
    assert not torch.equal(results[0], expected)
    error = (results[0] - expected).abs().max() / expected.abs().max()
    assert error < 2 * SENT[sent]


def test_a_single_host_is_exact() -> None:
    def program(rank: int) -> bool:
        exact = values(rank)
        dist.all_reduce(exact)
        return torch.equal(SlowLinks().sum(values(rank)), exact)

    assert all(run_ranks(3, program))


@pytest.mark.parametrize(("hosts", "ranks"), [([[0], [1]], 2), ([[0], [1], [2]], 3)])
@pytest.mark.parametrize("sent", SENT, ids=str)
def test_what_rounding_loses_is_sent_later(hosts: Any, ranks: int, sent: torch.dtype) -> None:
    def program(rank: int) -> list[float]:
        errors = []
        for feedback in (True, False):
            links = SlowLinks(sent=sent, error_feedback=feedback, hosts=hosts)
            total = torch.stack([links.sum(values(rank), "a") for _ in range(32)]).sum(0)
            exact = 32 * torch.stack([values(each) for each in range(ranks)]).sum(0)
            errors.append((total - exact).abs().max().item())
        return errors

    with_feedback, without = run_ranks(ranks, program)[0]
    assert with_feedback < without / 4


def test_keys_are_apart_and_infinite_values_do_not_stay() -> None:
    def program(rank: int) -> None:
        links = SlowLinks(sent=torch.int8, hosts=[[0], [1]])
        first = links.sum(values(rank), "a")
        assert not links.sum(torch.full((600,), torch.inf), "b").isfinite().any()
        assert torch.equal(links.sum(torch.zeros(600), "b"), torch.zeros(600))
        assert not torch.equal(links.sum(values(rank), "a"), first)

    run_ranks(2, program)


def test_gradients() -> None:
    def program(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(30, 7, dtype=torch.float32))
        rows = values(rank)[:, :30]
        links = SlowLinks(sent=torch.int8, hosts=[[0, 1], [2]])
        grads = []
        for state, hook in ((links, slow_links_hook), (None, None)):
            if hook is None:
                model = DistributedDataParallel(model.module)
            else:
                model.register_comm_hook(state, hook)
            model.zero_grad()
            loss: Any = model(rows).square().sum()
            loss.backward()
            (weight, _) = model.parameters()
            assert weight.grad is not None
            grads.append(weight.grad.clone())
        return grads[0], grads[1]

    for rounded, exact in run_ranks(3, program):
        assert (rounded - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sent": torch.float16}, "bfloat16 or torch.int8, got torch.float16"),
        ({"hosts": [[0], [0, 1]]}, "each of 2 ranks once"),
    ],
)
def test_wrong_use(options: dict[str, Any], message: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            SlowLinks(**options)

    run_ranks(2, program)


def test_ranks_that_differ_are_told() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match=r"sent=torch\.int8 on rank 0"):
            SlowLinks(sent=[torch.int8, torch.bfloat16][rank])

    run_ranks(2, program)


def test_bytes_between_two_hosts() -> None:
    why_not = why_no_hosts()
    if why_not is not None:
        pytest.skip(why_not)

    def program(rank: int) -> list[int]:
        tensor, counter = torch.ones(1 << 20), Path("/proc/thread-self/net/dev")
        sums: list[Any] = [SlowLinks(sent=sent).sum for sent in SENT]
        sent = []
        for act in (dist.all_reduce, *sums):
            act(tensor)
            dist.barrier()
            time.sleep(0.05)
            before = _sent_bytes(counter)
            act(tensor)
            dist.barrier()
            sent.append(_sent_bytes(counter) - before)
        return sent

    with two_hosts(mbit=400) as hosts:
        exact, half, quarter = run_on_hosts(hosts, (0, 0, 1, 1), program)[0]
    assert half < 0.53 * exact
    assert quarter < 0.28 * exact


def _sent_bytes(counter: Path) -> int:
    lines = [line.split() for line in counter.read_text().splitlines()[2:]]
    return sum(int(line[9]) for line in lines if line[0] != "lo:")
