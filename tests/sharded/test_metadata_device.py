"""Remote devices: what can be written, what it means, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.tables import each
from tilework.sharded import RemoteDevice


@each(
    ("text", "rank", "worker", "device", "shown"),
    [
        ("rank:0/cpu", 0, None, "cpu", "rank:0/cpu"),
        ("rank:12/cuda:3", 12, None, "cuda:3", "rank:12/cuda:3"),
        ("rank:1/cuda", 1, None, "cuda", "rank:1/cuda"),
        ("rank:4", 4, None, "cpu", "rank:4/cpu"),
        ("worker0/cuda:0", None, "worker0", "cuda:0", "worker0/cuda:0"),
        ("trainer", None, "trainer", "cpu", "trainer/cpu"),
        ("cpu", None, None, "cpu", "cpu"),
        ("cuda:1", None, None, "cuda:1", "cuda:1"),
        ("rank:2/meta", 2, None, "meta", "rank:2/meta"),
    ],
)
def test_strings(text: str, rank: int | None, worker: str | None, device: str, shown: str) -> None:
    place = RemoteDevice(text)
    assert (place.rank(), place.worker_name()) == (rank, worker)
    assert place.device() == torch.device(device)
    assert str(place) == shown
    assert RemoteDevice(shown) == place


@each(
    "text",
    [
        "",
        "/cpu",
        "rank:/cpu",
        "rank:x/cpu",
        "rank:-1/cpu",
        "rank:1/",
        "rank:1/nowhere",
        "a:b/cpu",
        "rank:1:2/cpu",
        "rank:1/cpu/0",
        "rank:\u0663/cpu",
        "worker/cuda:x",
    ],
)
def test_other_strings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Could not parse remote_device"):
        RemoteDevice(text)


@each("given", [None, 3, b"cpu"])
def test_other_things_are_refused(given: object) -> None:
    with pytest.raises(TypeError, match="a remote device is a string"):
        RemoteDevice(given)  # type: ignore[arg-type]


def test_a_torch_device_is_this_ranks_own() -> None:
    place = RemoteDevice(torch.device("cuda", 2))
    assert (place.rank(), place.worker_name(), str(place)) == (None, None, "cuda:2")


def test_equality_and_hash() -> None:
    same = {RemoteDevice("rank:1/cpu"), RemoteDevice("rank:1")}
    others = {RemoteDevice(text) for text in ("rank:2/cpu", "cpu", "one/cpu", "rank:1/meta")}
    assert len(same) == 1
    assert len(same | others) == 5


@each("text", ["rank:0/cuda:1", "worker/cpu", "meta"])
def test_copies_and_pickles_are_equal(text: str) -> None:
    place = RemoteDevice(text)
    assert pickle.loads(pickle.dumps(place)) == place
    assert copy.deepcopy(place) == copy.copy(place) == place


def test_another_device_of_the_same_owner() -> None:
    moved = [RemoteDevice(text).with_device("cuda:1") for text in ("rank:3/cpu", "w/cpu", "cpu")]
    assert [str(place) for place in moved] == ["rank:3/cuda:1", "w/cuda:1", "cuda:1"]


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        RemoteDevice("cpu")._rank = 1  # type: ignore[misc]
