"""torch's engines and tensors of devices, with ``meta`` in the place of a GPU."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backends.control_channel import ControlChannel
from tilework.comm.backends.hybrid.host_ranks import Hosts
from tilework.comm.backends.hybrid.meeting_engine import Connections
from tilework.comm.backends.torch import torch_engines
from tilework.comm.backends.torch.compared_engine import ComparedEngine
from tilework.comm.backends.torch.movers import Mover
from tilework.comm.backends.torch.torch_calls import CALLS
from tilework.comm.backends.torch.torch_engines import GlooGroup, NcclGroup
from tilework.comm.elastic.watched_store import while_looking
from tilework.comm.forms import Operation
from tilework.testing import run_ranks


class RecordingMover(Mover):
    """A mover that moves nothing, and whose operations on the CPU last until ``go``."""

    def __init__(self, request: dist.DistributedBackendOptions) -> None:
        super().__init__(None, request, "gloo")
        self.go = threading.Event()
        #: What happened, in order: an event and its thread.
        self.events: list[tuple[str, threading.Thread]] = []

    def note(self, event: str) -> None:
        self.events.append((event, threading.current_thread()))

    def call(self, operation: Operation) -> Any:
        device = str(operation.device)
        if device == "cpu":
            assert self.go.wait(120)
        self.note(device)
        return SimpleNamespace(wait=lambda limit: None)

    def interrupt(self) -> None:
        """Do nothing: there are no connections."""


@pytest.fixture
def request_() -> dist.DistributedBackendOptions:
    limit = timedelta(seconds=120)
    return dist.DistributedBackendOptions(dist.HashStore(), 0, 2, limit, "g", (0, 1))


@pytest.fixture
def mover(request_: dist.DistributedBackendOptions) -> RecordingMover:
    return RecordingMover(request_)


@pytest.fixture
def group(
    request_: dist.DistributedBackendOptions,
    mover: RecordingMover,
    monkeypatch: pytest.MonkeyPatch,
) -> GlooGroup:
    hosts = Hosts(((0,), (1,)), 0)
    connections = Connections(hosts, (0, 1), ControlChannel({}), {}, mover, None)
    group = GlooGroup(ComparedEngine("off", connections), request_)
    group.devices = ("cpu", "meta")
    group.global_ranks = (0, 1)
    stream = SimpleNamespace(synchronize=lambda: mover.note("synchronized"))
    module = SimpleNamespace(current_stream=lambda device: stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return group


@pytest.mark.parametrize("later", [False, True], ids=["blocking", "asynchronous"])
def test_calls_for_a_device_run_on_the_calling_thread(
    later: bool, mover: RecordingMover, group: GlooGroup
) -> None:
    """Streams are current on a thread, so a call waits there for what is queued before it."""
    before = group.allreduce([torch.ones(2)], dist.Options(asyncOp=True))
    threading.Timer(0.1, mover.go.set).start()
    x = torch.ones(2, device="meta")
    work = group.allreduce([x], dist.Options(asyncOp=later))
    assert work.is_completed()
    assert work.result()[0] is x
    assert before.wait()
    me = threading.current_thread()
    assert [event for event, _ in mover.events] == ["cpu", "meta", *["synchronized"] * later]
    assert [thread is me for _, thread in mover.events] == [False, True, *[True] * later]
    group.close()


def test_messages_of_a_device_are_refused_before_anything_is_sent(group: GlooGroup) -> None:
    """Gloo's messages read the host's memory alone, and end the process of the peer."""
    x = torch.ones(2, device="meta")
    for call in (group.send, group.recv):
        with pytest.raises(NotImplementedError, match=r"no (send|recv) of meta .* tensor.cpu\(\)"):
            call([x], 1)
    with pytest.raises(NotImplementedError, match="no recv of meta"):
        group.recv_anysource([x])
    assert group.why_aborted() is None
    group.close()


class OneRank:
    """torch's NCCL object of a single rank, which copies and ignores the reduction's factor."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert options.reduceOp == torch.distributed.ReduceOp.SUM

    reduce = allreduce

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, options: Any
    ) -> None:
        self.allreduce([source], options)
        output.copy_(source)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], options: Any
    ) -> None:
        self._reduce_scatter_base(outputs[0], sources[0][0], options)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "reduce_scatter", "lists"])
def test_a_factor_is_applied_before_the_engines_sum(kind: str) -> None:
    x, out = torch.tensor([2.0, 4.0]), torch.zeros(2)
    operation = Operation("reduce_scatter", x, [out], dist.make_premul_sum(0.5))
    if kind != "reduce_scatter":
        operation.inputs = [x]
    if kind in ("all_reduce", "reduce"):
        operation.kind = kind  # type: ignore[assignment]
    CALLS[operation.kind](OneRank(), operation, 0)
    assert out.tolist() == [1.0, 2.0]
    assert x.tolist() == [2.0, 4.0]


def test_nccl_tells_what_it_does_not_reduce() -> None:
    op = dist.ReduceOp
    lacks = [(op.BAND, torch.int64), (op.BOR, torch.bool), (op.BXOR, torch.uint8)]
    lacks += [(op.PRODUCT, torch.complex64), (op.SUM, torch.int16)]
    has = [(op.MAX, torch.int64), (op.AVG, torch.bfloat16), (op.SUM, torch.complex64)]
    has += [(op.PRODUCT, torch.bool), (op.PREMUL_SUM, torch.float32)]
    assert [NcclGroup.reduces(*case) for case in lacks] == [False] * len(lacks)
    assert [NcclGroup.reduces(*case) for case in has] == [True] * len(has)


def test_a_timeout_in_which_no_rank_is_missing_says_so(group: GlooGroup) -> None:
    """All ranks report that they wait, so nobody is late."""
    error = group.explain(("timeout", (), "gloo: Timed out"), "all_reduce", "here")
    assert isinstance(error, dist.CollectiveTimeoutError)
    assert "No rank is missing: perhaps ranks call different operations" in str(error)
    group.close()


_SHARED = """NCCL error in: /pytorch/torch/csrc/NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"""


def test_a_gpu_of_two_ranks_is_named_with_a_remedy(
    mover: RecordingMover, group: GlooGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(operation: Operation) -> None:
        raise RuntimeError(_SHARED)

    monkeypatch.setattr(mover, "call", fail)
    with pytest.raises(dist.DistBackendError, match="Duplicate GPU detected : rank 0") as caught:
        group.allreduce([torch.ones(2)])
    assert "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))" in str(caught.value)
    assert "NCCL error in" in str(caught.value)


def test_no_rank_leaves_a_gloo_group_before_all_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected = []
    connect = while_looking

    def slowly(*args: Any) -> Any:
        gloo = connect(*args)
        time.sleep(0.5 * gloo.rank())
        connected.append(gloo)
        return gloo

    monkeypatch.setattr(torch_engines, "while_looking", slowly)
    assert run_ranks(2, lambda rank: len(connected), backend="gloo") == [2, 2]


def test_a_process_that_a_rank_of_a_gloo_group_forks_ends() -> None:
    def program(rank: int) -> int | None:
        worker = multiprocessing.get_context("fork").Process(target=int)
        worker.start()
        worker.join(120)
        worker.kill()  # does nothing to a process that has ended
        worker.join()
        return worker.exitcode

    assert run_ranks(1, program, kind="processes", backend="gloo") == [0]


def test_a_transport_that_this_gloo_lacks_is_named() -> None:
    # In a process of its own: torch looks at the variable once.
    code = "from tilework.comm.backends.torch import torch_engines as e; e._check_transport()"
    environment = {**os.environ, "GLOO_DEVICE_TRANSPORT": "PIGEONS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "DistBackendError: GLOO_DEVICE_TRANSPORT is PIGEONS" in done.stderr
