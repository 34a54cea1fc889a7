"""The metadata of a sharded tensor, the same on every rank: shards, devices, properties. Values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from tilework.layout import Box, Tiling
from tilework.layout.internal import trusted_box, trusted_tile, trusted_tiling

_FORMATS = "'rank:<rank>/<device>', '<worker name>/<device>' or '<device>'"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RemoteDevice:
    """The placement of a shard: a device, and the rank or the RPC worker that owns it.

    Args:
        remote_device: ``"rank:<rank>/<device>"`` (a global rank) or ``"<worker name>/<device>"``
                (a name given to :func:`tilework.rpc.init_rpc`); without ``/<device>`` the device is
                the owner's CPU. A device alone, as a string or a torch.device, is a device of this
                rank. A device without an index is the owner's current device.

    Raises:
        ValueError: The string is none of these.
        TypeError: It is neither a string nor a device.
    """

    _rank: int | None
    _worker: str | None
    _device: torch.device

    def __init__(self, remote_device: str | torch.device) -> None:
        if isinstance(remote_device, torch.device):
            self._set(None, None, remote_device)
        elif isinstance(remote_device, str):
            self._set(*_parse(remote_device))
        else:
            raise TypeError(
                f"a remote device is a string ({_FORMATS}) or a torch.device, "
                f"not {type(remote_device).__name__}"
            )

    def _set(self, rank: int | None, worker: str | None, device: torch.device) -> None:
        object.__setattr__(self, "_rank", rank)
        object.__setattr__(self, "_worker", worker)
        object.__setattr__(self, "_device", device)

    def rank(self) -> int | None:
        """The owner's global rank; None if the owner is given by a worker's name, or not at all."""
        return self._rank

    def worker_name(self) -> str | None:
        """The owner's name as an RPC worker; None if the owner is given by rank, or not at all."""
        return self._worker

    def device(self) -> torch.device:
        """The device, as the owner sees it."""
        return self._device

    def with_device(self, device: torch.device | str) -> RemoteDevice:
        """Another device of the same owner."""
        other = object.__new__(RemoteDevice)
        other._set(self._rank, self._worker, torch.device(device))
        return other

    def __str__(self) -> str:
        if self._rank is not None:
            return f"rank:{self._rank}/{self._device}"
        return str(self._device) if self._worker is None else f"{self._worker}/{self._device}"

    def __repr__(self) -> str:
        return f"RemoteDevice({str(self)!r})"

    def __reduce__(self) -> tuple[type[RemoteDevice], tuple[str]]:
        return RemoteDevice, (str(self),)


def covers(wanted: torch.device, device: torch.device) -> bool:
    """True if ``device`` is ``wanted``, or if ``wanted`` has no index and their types are equal."""
    return wanted.type == device.type and wanted.index in (None, device.index)


def _parse(text: str) -> tuple[int | None, str | None, torch.device]:
    owner, slash, device = text.partition("/")
    if not slash and (own := _device(owner)) is not None:
        return None, None, own
    remote = _device(device) if slash else torch.device("cpu")
    kind, colon, number = owner.partition(":")
    if remote is None or not owner:
        raise ValueError(f"Could not parse remote_device {text!r}: it must be {_FORMATS}")
    if not colon:
        return None, owner, remote
    if kind != "rank" or not (number.isascii() and number.isdigit()):
        raise ValueError(f"Could not parse remote_device {text!r}: it must be {_FORMATS}")
    return int(number), None, remote


def _device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None


# -- shards ------------------------------------------------------------------------------------


ItemT = TypeVar("ItemT", covariant=True)
ClassT = TypeVar("ClassT")


class Items(tuple[ItemT, ...]):
    """A tuple that also equals a list of the same items."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, tuple(other) if isinstance(other, list) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(self),)


def _explained(cls: type[ClassT]) -> type[ClassT]:
    """Decorate a frozen dataclass: the error of a change says how to make a changed copy."""

    def refuse(self: object, name: str, *value: object) -> NoReturn:
        raise FrozenInstanceError(
            f"cannot change {name} of {cls.__name__}, which is a value that others may share: make "
            f"another with dataclasses.replace(metadata, {name}=…)"
        )

    cls.__setattr__ = cls.__delattr__ = refuse  # type: ignore[method-assign]
    return cls


@_explained
@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """The offsets, sizes and placement of a shard.

    Args:
        placement: The shard's device, also as a string; None if it is not known.

    Raises:
        ValueError: Offsets and sizes differ in number, or a number is negative.
        TypeError: A number is not an integer.
    """

    shard_offsets: Items[int]
    shard_sizes: Items[int]
    placement: RemoteDevice | None = None

    def __init__(
        self,
        shard_offsets: Iterable[int],
        shard_sizes: Iterable[int],
        placement: RemoteDevice | str | torch.device | None = None,
    ) -> None:
        offsets, sizes = Items(map(index, shard_offsets)), Items(map(index, shard_sizes))
        if len(offsets) != len(sizes):
            raise ValueError(
                f"shard_offsets and shard_sizes must have as many entries as the tensor has "
                f"dims, got {list(offsets)} and {list(sizes)}"
            )
        for name, numbers in (("shard_offsets", offsets), ("shard_sizes", sizes)):
            if min(numbers, default=0) < 0:
                raise ValueError(f"{name} should be >= 0, got {list(numbers)}")
        if placement is not None and not isinstance(placement, RemoteDevice):
            placement = RemoteDevice(placement)
        object.__setattr__(self, "shard_offsets", offsets)
        object.__setattr__(self, "shard_sizes", sizes)
        object.__setattr__(self, "placement", placement)

    @property
    def box(self) -> Box:
        """The shard's offsets and sizes as a box."""
        return trusted_box(tuple(self.shard_offsets), tuple(self.shard_sizes))

    def moved(self, device: torch.device) -> ShardMetadata:
        """This metadata with ``device`` of the same owner as placement; itself if already there."""
        if self.placement is None or covers(device, self.placement.device()):
            return self
        return replace(self, placement=self.placement.with_device(device))

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardMetadata, (tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement)


_new = object.__new__
# The descriptor of a slot can write where a frozen dataclass refuses.
_set_offsets = ShardMetadata.__dict__["shard_offsets"].__set__
_set_sizes = ShardMetadata.__dict__["shard_sizes"].__set__
_set_placement = ShardMetadata.__dict__["placement"].__set__


def trusted_shard(
    offsets: Items[int], sizes: Items[int], placement: RemoteDevice | None
) -> ShardMetadata:
    """A ShardMetadata made without the checks of the constructor, which take time."""
    shard = _new(ShardMetadata)
    _set_offsets(shard, offsets)
    _set_sizes(shard, sizes)
    _set_placement(shard, placement)
    return shard


@_explained
@dataclass(frozen=True, slots=True)
class TensorProperties:
    """The common properties of all shards of a tensor."""

    #: By default torch's default dtype at the time when the properties are made.
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    #: Sharded tensors have only ``torch.strided``.
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    #: Sharded tensors have only ``torch.contiguous_format``.
    memory_format: torch.memory_format = torch.contiguous_format
    #: True if shards on the CPU should be in pinned memory. Without an accelerator they are not.
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: Tensor) -> TensorProperties:
        """The properties of a plain tensor."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.is_pinned(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Not all of torch's objects of these kinds pickle, but their names do.
        names = [str(kind).removeprefix("torch.") for kind in (self.dtype, self.layout)]
        names.append(str(self.memory_format).removeprefix("torch."))
        return _named_properties, (*names, self.requires_grad, self.pin_memory)


def _named_properties(
    dtype: str, layout: str, memory_format: str, requires_grad: bool, pin_memory: bool
) -> TensorProperties:
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    values: list[Any] = [getattr(torch, name, None) for name in (dtype, layout, memory_format)]
    for kind, name, value in zip(kinds, (dtype, layout, memory_format), values, strict=True):
        if not isinstance(value, kind):
            raise ValueError(f"torch has no {kind.__name__} {name!r}")
    return TensorProperties(values[0], values[1], requires_grad, values[2], pin_memory)


@_explained
@dataclass(frozen=True, slots=True)
class ShardedTensorMetadata:
    """Everything about a sharded tensor except the values; the same on every rank."""

    shards_metadata: Items[ShardMetadata] = field(default_factory=Items)
    size: torch.Size = field(default_factory=torch.Size)
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    def __post_init__(self) -> None:
        if type(self.shards_metadata) is not Items:  # there may be thousands
            object.__setattr__(self, "shards_metadata", Items(self.shards_metadata))
        object.__setattr__(self, "size", torch.Size(self.size))

    def moved(self, device: torch.device) -> ShardedTensorMetadata:
        """This metadata with every shard placed on ``device`` of the shard's owner."""
        moved = Items([shard.moved(device) for shard in self.shards_metadata])
        return replace(self, shards_metadata=moved)

    def __reduce__(self) -> tuple[Any, ...]:
        shards = tuple(self.shards_metadata)
        return ShardedTensorMetadata, (shards, tuple(self.size), self.tensor_properties)


class ShardMap:
    """The owner of each shard of checked metadata, and cached layouts of operators' results."""

    def __init__(
        self,
        metadata: ShardedTensorMetadata,
        owners: Sequence[int],
        results: dict[Any, Any] | None = None,
    ) -> None:
        self.metadata = metadata
        self.owners = tuple(owners)
        self.results: dict[Any, Any] = {} if results is None else results

    @cached_property
    def tiling(self) -> Tiling:
        """The shards as tiles with owners; computed at the first call."""
        shards = zip(self.metadata.shards_metadata, self.owners, strict=True)
        tiles = [trusted_tile(shard.box, (owner,)) for shard, owner in shards]
        return trusted_tiling(tuple(self.metadata.size), (tuple(tiles),))


@_explained
@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A local tensor of a sharded tensor, with metadata.

    Attributes:
        metadata: The offsets and sizes in the full tensor, and the rank and device.

    Raises:
        ValueError: The tensor's size or device contradicts the metadata.
    """

    tensor: Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        size, sizes = tuple(self.tensor.size()), tuple(self.metadata.shard_sizes)
        if size != sizes:
            raise ValueError(
                f"Shard tensor size does not match with its metadata: the tensor has {size}, "
                f"metadata.shard_sizes is {sizes}"
            )
        place = self.metadata.placement
        if place is not None and not covers(place.device(), self.tensor.device):
            raise ValueError(
                f"Local shard tensor device does not match with its placement: the tensor is on "
                f"{self.tensor.device}, metadata.placement is {place}"
            )

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """``tensor`` as the shard at ``shard_offsets``, owned by the global rank ``rank``."""
        place = RemoteDevice(f"rank:{rank}/{tensor.device}")
        return cls(tensor, ShardMetadata(shard_offsets, tensor.size(), place))

    def with_tensor(self, tensor: Tensor) -> Shard:
        """A shard with this box and owner, the values ``tensor``, and the device of ``tensor``."""
        place = self.metadata.placement
        fits = place is None or covers(place.device(), tensor.device)
        return Shard(tensor, self.metadata if fits else self.metadata.moved(tensor.device))
