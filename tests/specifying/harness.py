"""What the documents' suites take from torch's test utilities: ranks are threads here."""

from __future__ import annotations

import copy
import inspect
import os
import random
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_utils import TestCase as _TestCase

import tilework.distributed as dist
from tilework import rpc, sharded
from tilework.comm.world import current_world
from tilework.testing import run_ranks

TEST_CUDA = TEST_WITH_DEV_DBG_ASAN = False
GPUS = 4


class TestCase(_TestCase):
    """torch's, on one rank."""

    #: The number of ranks that run a test.
    ranks = 1
    rank = 0
    file_name = ""

    @classmethod
    def run_test(cls, method: str) -> None:
        """Run one test on all its ranks, from setUp to tearDown."""
        with tempfile.NamedTemporaryFile() as file:
            name = file.name

            def program(rank: int) -> None:
                current_world().local_rank = None  # the environment's is meant
                test: Any = cls(method)
                test.rank, test.file_name = rank, f"{name}-store"
                test.setUp()
                try:
                    test.with_lost_comms(getattr(test, method))
                finally:
                    test.tearDown()
                    if dist.is_initialized():
                        dist.destroy_process_group()

            with _as_in_a_process_of_its_own():
                run_ranks(cls(method).world_size, program, init=False)

    def with_lost_comms(self, test: Callable[[], None]) -> None:
        """Run a test; here without ranks."""
        test()

    @property
    def world_size(self) -> int:
        return self.ranks

    def _spawn_processes(self) -> None:
        """Nothing: they run."""

    _spawn_threads = _spawn_processes

    def init_comms(self, init_rpc: bool = True, backend: Any = None) -> None:
        dist.init_process_group(
            backend or "threads",
            store=dist.FileStore(self.file_name, self.world_size),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=60),
        )
        if init_rpc:
            rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=self.world_size)

    def init_pg(self, backend: Any = None) -> None:
        self.init_comms(init_rpc=False)

    def init_rpc(self) -> None:
        rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=self.world_size)

    def destroy_comms(self, destroy_rpc: bool = True) -> None:
        dist.barrier()
        if destroy_rpc:
            rpc.shutdown()
        dist.destroy_process_group()

    def assert_sharded_tensor_equal(self, first: Any, second: Any) -> None:
        assert len(first.local_shards()) == len(second.local_shards())
        for one, other in zip(first.local_shards(), second.local_shards(), strict=True):
            assert torch.equal(one.tensor, other.tensor)
            assert one.metadata == other.metadata
        assert first.metadata() == second.metadata()
        assert first.sharding_spec() == second.sharding_spec()
        assert len(first.remote_shards()) == len(second.remote_shards())


@contextmanager
def _as_in_a_process_of_its_own() -> Iterator[None]:
    """Backends and variables that a test sets are its own. Its job has a secret, for RPC."""
    environment = dict(os.environ)
    os.environ["TILEWORK_SECRET"] = secrets.token_hex()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(find_free_port())
    backend = dist.Backend
    plugins, known, capability = (
        dict(backend.plugins),
        list(backend.backend_list),
        dict(backend.backend_capability),
    )
    try:
        yield
    finally:
        for name in set(backend.plugins) - set(plugins):
            delattr(backend, name)
        backend.plugins.clear()
        backend.plugins.update(plugins)
        backend.backend_list[:] = known
        backend.backend_capability.clear()
        backend.backend_capability.update(capability)
        os.environ.clear()
        os.environ.update(environment)


class MultiProcessTestCase(TestCase):
    ranks = 2


#: A test that makes its groups itself.
_MAKES_GROUPS = {"init_comms", "init_pg", "init_rpc", "init_process_group", "spawn_threads"}


class _WithComms(MultiProcessTestCase):
    """Where the document has lost the decorator that makes groups, they are made all the same."""

    def with_lost_comms(self, test: Callable[[], None]) -> None:
        function = inspect.unwrap(test.__func__)  # type: ignore[attr-defined]
        made = hasattr(test, "__wrapped__") or _MAKES_GROUPS.intersection(
            function.__code__.co_names
        )
        if made:
            test()
        else:
            with_comms(lambda self: test())(self)


class ShardedTensorTestBase(_WithComms):
    ranks = GPUS


class DTensorTestBase(_WithComms):
    ranks = GPUS
    device_type = "cpu"


def with_comms(
    func: Callable[..., Any] | None = None, init_rpc: bool = True, backend: Any = None
) -> Any:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def test(self: TestCase, *args: Any, **kwargs: Any) -> None:
            if dist.is_initialized():  # by another decorator, which the document has twice
                function(self, *args, **kwargs)
                return
            with_rpc = init_rpc and not isinstance(self, DTensorTestBase)
            self.init_comms(with_rpc)
            function(self, *args, **kwargs)
            self.destroy_comms(with_rpc)

        return test

    return decorate if func is None else decorate(func)


def _as_it_is(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function


skip_if_lt_x_gpu = requires_nccl = requires_gloo = skip_but_pass_in_sandcastle_if = _as_it_is
requires_accelerator_dist_backend = _as_it_is


def retry_on_connect_failures(function: Any = None, **settings: Any) -> Any:
    return function if function is not None else lambda each: each


def spawn_threads_and_init_comms(
    func: Any = None, timeout: float = 60, world_size: int = GPUS
) -> Any:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def test(self: TestCase, *args: Any, **kwargs: Any) -> None:
            run_ranks(world_size, lambda rank: function(self, *args, **kwargs))

        return test

    return decorate if func is None else decorate(func)


def tp_transports() -> list[str]:
    return []


def run_tests() -> None:
    """Nothing: pytest runs them."""


def load_tests(*args: Any) -> None:
    """Nothing."""


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


PLACEMENTS = [f"rank:{rank}/cpu" for rank in range(GPUS)]


def _chunk_sharding_specs_list_for_test(sharding_dims: list[int], seed: int = 0) -> list[Any]:
    specs = []
    for number, dim in enumerate(sharding_dims):
        placements = copy.copy(PLACEMENTS)
        random.Random(seed + number).shuffle(placements)
        specs.append(sharded.ChunkShardingSpec(dim, placements))
    return specs


class MyShardedModel2(nn.Module):
    def __init__(self, spec: Any = None, group: Any = None, init_rrefs: bool = True) -> None:
        super().__init__()
        self.sharded_tensor2 = spec and sharded.rand(
            spec, 10, 20, process_group=group, init_rrefs=init_rrefs
        )
        self.random_tensor2 = nn.Parameter(torch.rand(2, 2))


class MyShardedModel1(nn.Module):
    def __init__(self, spec: Any = None, group: Any = None, init_rrefs: bool = True) -> None:
        super().__init__()
        self.sharded_tensor1 = spec and sharded.rand(
            spec, 10, 20, process_group=group, init_rrefs=init_rrefs
        )
        self.random_tensor1 = nn.Parameter(torch.rand(2, 2))
        self.submodule = MyShardedModel2(spec, group, init_rrefs)


class MyModel(nn.Module):
    def __init__(self, n_features: int, n_layers: int, device: Any) -> None:
        super().__init__()
        self.seq = nn.Sequential(
            *[nn.Linear(n_features, n_features, device=device) for _ in range(n_layers)]
        )

    def forward(self, x: Any) -> Any:
        return self.seq(x)

    def reset_parameters(self) -> None:
        for layer in self.seq:
            layer.reset_parameters()  # type: ignore[operator]
