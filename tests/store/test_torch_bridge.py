"""torch's own groups over tilework's stores, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d

from tests.store.client_process import process
from tilework.errors import DistNetworkError, DistStoreError
from tilework.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from tilework.store.torch_bridge import TorchStoreAdapter, as_torch_store, connect_to_torch
from tilework.testing.stores import Background

LIMIT = timedelta(seconds=120)


def gloo_sum(rank: int, store: Store) -> list[float]:
    """What a two-rank Gloo group makes of [1] and [2]."""
    theirs = as_torch_store(store)
    group: Any = c10d.ProcessGroupGloo(theirs, rank, 2, LIMIT)
    tensor = torch.full((3,), rank + 1.0)
    group.allreduce([tensor]).wait()
    numbers: list[float] = tensor.tolist()
    return numbers


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_gloo_meets_through_a_tilework_store(kind: str, tmp_path: Path) -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    shared = HashStore()
    store_of: dict[str, Callable[[], Store]] = {
        "hash": lambda: shared,
        "file": lambda: FileStore(tmp_path / "store"),
        "tcp": lambda: TCPStore("127.0.0.1", master.port),
        "prefix": lambda: PrefixStore("group", shared),
    }
    with master:
        calls = [
            Background(lambda rank=rank: gloo_sum(rank, store_of[kind]()))  # type: ignore[misc]
            for rank in range(2)
        ]
        assert [call.result() for call in calls] == [[3.0] * 3] * 2


def test_the_missing_rank_of_gloo_times_out_in_the_store() -> None:
    store = as_torch_store(HashStore(timedelta(seconds=0.2)))
    with pytest.raises(RuntimeError, match="Timeout"):
        c10d.ProcessGroupGloo(store, 0, 2, timedelta(seconds=0.2))


def test_torch_wraps_it_in_its_own_prefix() -> None:
    store = HashStore()
    view: Any = c10d.PrefixStore("p", as_torch_store(store))
    view.set("k", "v")
    assert view.get("k") == b"v"
    assert store.get("p/k") == b"v"
    assert view.add("n", 2) == 2
    assert view.check(["k"])
    assert view.compare_set("k", "v", "w") == b"w"
    assert view.multi_get(["k", "n"]) == [b"w", b"2"]
    assert view.num_keys() == 2
    assert view.delete_key("k")
    view.append("a", "x")
    assert view.clone().get("a") == b"x"
    with pytest.raises(DistStoreError, match=r"^Timeout.*p/absent"):
        view.wait(["absent"], timedelta(seconds=0.05))


def test_a_torch_store_comes_back_as_itself() -> None:
    store = c10d.HashStore()
    assert as_torch_store(TorchStoreAdapter(store)) is store


def test_only_stores_are_bridged() -> None:
    with pytest.raises(TypeError, match="needs a tilework store, got dict"):
        as_torch_store({})  # type: ignore[arg-type]


def test_an_adapter_takes_the_timeout_of_its_store() -> None:
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=7))
    assert TorchStoreAdapter(store).timeout == timedelta(seconds=7)
    assert TorchStoreAdapter(store, timedelta(seconds=3)).timeout == timedelta(seconds=3)


def test_an_adapter_is_authenticated_only_if_told() -> None:
    assert not TorchStoreAdapter(c10d.HashStore()).authenticated
    assert TorchStoreAdapter(c10d.HashStore(), authenticated=True).authenticated


def test_the_death_of_torchs_server_is_a_network_error() -> None:
    program = """
        import torch.distributed as dist
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        print(store.port, flush=True)
        time.sleep(60)
    """
    with process(program) as server:
        store = TorchStoreAdapter(connect_to_torch("127.0.0.1", int(server.line()), LIMIT))
        store.set("k", "v")
        call = Background(lambda: store.get("absent"))
        server.kill()
        with pytest.raises((DistNetworkError, DistStoreError)):
            call.result()
