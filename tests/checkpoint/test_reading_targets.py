"""Places of what is read in a rank's memory: runs where the core takes them, and views."""

from __future__ import annotations

import torch

from tilework.checkpoint.format import Part, SavedTensor
from tilework.checkpoint.load_planning import Need, Wanted
from tilework.checkpoint.reading import Targets
from tilework.checkpoint.tensor_bytes import runs_of
from tilework.layout import Box

SHAPE = (8, 64)
TILE, PART = Box((0, 16), (8, 48)), Box((2, 0), (4, 64))
NEED = Need(PART.intersection(TILE) or PART, 0, (0,))


def wanted(count: int, dtype: str = "F32") -> list[Wanted]:
    part = Part(PART, "f", 0, 1024)
    saved = [SavedTensor(f"t{n}", dtype, SHAPE, (part,)) for n in range(count)]
    return [Wanted(each, ((TILE, (0,)),)) for each in saved]


def filled(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    view.fill_(1)
    return tensor


def test_alike_tensors_have_runs_in_their_own_memory() -> None:
    tensors = [torch.zeros(TILE.sizes) for _ in range(3)]
    targets = Targets(wanted(3), tensors, 0, by_core=True)
    for number, tensor in enumerate(tensors):
        part = targets._wanted[number].saved.parts[0]
        expected = runs_of(PART, NEED.box, tensor[2:6])
        assert targets.place(number, part, NEED) == expected
        assert filled(tensor, targets.view(number, NEED)).sum() == 4 * 48
        assert tensor[2:6].sum() == 4 * 48


def test_strides_dtypes_and_views_are_no_others() -> None:
    whole = torch.zeros(8, 96)
    tensors = [
        torch.zeros(TILE.sizes),
        whole[:, 48:],
        torch.zeros(48, 8).t(),
        torch.zeros(TILE.sizes, dtype=torch.float64),
        torch.zeros(TILE.sizes, dtype=torch.int32),
    ]
    targets = Targets(wanted(len(tensors)), tensors, 0, by_core=True)
    part = targets._wanted[0].saved.parts[0]
    for number in (0, 1):
        assert targets.place(number, part, NEED) == runs_of(PART, NEED.box, tensors[number][2:6])
    for number in (2, 3, 4):  # short runs, and what becomes another dtype
        place = targets.place(number, part, NEED)
        assert isinstance(place, torch.Tensor)
        assert place.data_ptr() == tensors[number][2:6].data_ptr()
        assert place.shape == NEED.box.sizes


def test_without_the_core_there_are_views() -> None:
    tensor = torch.zeros(TILE.sizes)
    targets = Targets(wanted(1), [tensor], 0, by_core=False)
    place = targets.place(0, targets._wanted[0].saved.parts[0], NEED)
    assert isinstance(place, torch.Tensor)
