"""DCP's metadata, a pickle, read as inert records: no class of a program is made, called or
changed.

Unpickling does harm even if it only allows known classes: an instruction sets attributes of any
loaded object, also of a class, for the rest of the process. Therefore each class that the metadata
names is replaced by a class made for this reading, whose instances note their attributes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilework.checkpoint.no_collections import no_collections
from tilework.errors import CheckpointError
from tilework.layout import Box

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint"
#: The classes and functions in DCP's own metadata.
_NAMES = {
    f"{_MODULE}.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_MODULE}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
}
#: Builtin classes that replace others, as nobody can change them.
_BUILTIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


@dataclass(frozen=True)
class DcpPlace:
    """The bytes of one part of a tensor, or of a pickled object, in a file of the folder.

    Attributes:
        file: The name of the file, without a folder.
        offset: The position of the first byte in the file.
        nbytes: The number of bytes.
        is_transformed: True if DCP compressed or otherwise transformed the bytes.
    """

    file: str
    offset: int
    nbytes: int
    is_transformed: bool


@dataclass(frozen=True)
class DcpTensor:
    """A tensor that the metadata describe.

    Attributes:
        shape: The global shape.
        dtype: The dtype.
        boxes: The parts of the tensor that are stored, in the global tensor's coordinates.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """The contents of a folder's ``.metadata`` file.

    A key is the flat name of an entry of the saved state, such as ``"model.weight"``. An entry is a
    tensor or another object, which DCP pickles.

    Attributes:
        items: By key: the shape, dtype and parts of a tensor; None for another object.
        paths: By key: the dict keys and list positions that lead to the entry in the nested state.
            Keys that the planner of DCP did not record are missing.
        places: By key and offsets of a part: the file and the bytes of that part. The offsets of
            an object that is no tensor are ``()``.
        first_places: By key: the first place listed for the key. The pickle of an object that is
            no tensor is found here, whatever offsets DCP gave to it.
    """

    items: Mapping[str, DcpTensor | None]
    paths: Mapping[str, tuple[Any, ...]]
    places: Mapping[tuple[str, tuple[int, ...]], DcpPlace]
    first_places: Mapping[str, DcpPlace]


@no_collections()
def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Read the ``.metadata`` file of a DCP folder.

    Raises:
        CheckpointError: The metadata are damaged, or have objects that DCP does not write.
    """
    where = folder / METADATA
    text = where.read_bytes()
    try:
        return _metadata_of(_Unpickler(io.BytesIO(text)).load())
    except Exception as error:  # of any class: pickle takes any bytes for instructions
        problem = str(error) or type(error).__name__
        raise CheckpointError(f"{where} cannot be read: {problem}", file=str(where)) from None


class _Record:
    """Stands for one object of the metadata, and holds the attributes.

    Each reading makes a subclass for each class that the metadata names.
    """

    __slots__ = ("state",)
    state: Any

    def __new__(cls, *arguments: Any) -> _Record:
        record = object.__new__(cls)
        record.state = None
        return record

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> Mapping[str, Any]:
        """The attributes by name."""
        if not isinstance(self.state, dict):
            raise ValueError(f"a {type(self).__name__} has no attributes")
        return self.state


def _member_of(kind: Any, name: str) -> _Record:
    """The record of an enum's member, which Python 3.11.0 to 3.11.3 pickle as a getattr."""
    if not (isinstance(kind, type) and issubclass(kind, _Record)):
        raise pickle.UnpicklingError(f"it reads {name!r} of an object that is no DCP enum")
    return kind(name)


class _Unpickler(pickle.Unpickler):
    """Loads the metadata: each object becomes a record, of a class made for this reading."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (builtin := _BUILTIN.get((module, name))) is not None:
            return builtin
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)  # nobody can change it, either
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it has {module}.{name}, which DCP does not put there")
        known = self._classes.get((module, name))
        if known is None:
            known = self._classes[module, name] = type(name, (_Record,), {"__slots__": ()})
        return known


def _metadata_of(loaded: Any) -> DcpMetadata:
    fields = _fields(loaded, "Metadata")
    items = {_text(key): _item_of(key, item) for key, item in fields["state_dict_metadata"].items()}
    paths = {_text(key): _path(path) for key, path in (fields.get("planner_data") or {}).items()}
    places: dict[tuple[str, tuple[int, ...]], DcpPlace] = {}
    first: dict[str, DcpPlace] = {}
    for index, info in (fields["storage_data"] or {}).items():
        named = _fields(index, "MetadataIndex")
        key, place = _text(named["fqn"]), _place_of(_fields(info, "_StorageInfo"))
        places.setdefault((key, _numbers(named.get("offset") or ())), place)
        first.setdefault(key, place)
    return DcpMetadata(items, paths, places, first)


def _item_of(key: str, item: Any) -> DcpTensor | None:
    if type(item).__name__ == "BytesStorageMetadata":
        return None
    fields = _fields(item, "TensorStorageMetadata")
    properties: Any = fields["properties"].state
    # A tuple, since torch pickles that class in its own way.
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of {key!r} is {dtype!r}")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    boxes = tuple([Box(_numbers(c["offsets"]), _numbers(c["sizes"])) for c in chunks])
    return DcpTensor(_numbers(fields["size"]), dtype, boxes)


def _place_of(fields: Mapping[str, Any]) -> DcpPlace:
    offset, nbytes = _numbers((fields["offset"], fields["length"]))
    file = _text(fields["relative_path"])
    if file in ("", ".", "..") or not set("/\\\0").isdisjoint(file):
        raise ValueError(f"it names the file {file!r}: only files in its own folder are read")
    return DcpPlace(file, offset, nbytes, bool(fields.get("transform_descriptors")))


def _fields(record: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"it has a {type(record).__name__} in the place of a {name}")
    return record.fields


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.60} is not a name")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{value!r:.60} is not an integer from 0 on")
    return tuple(values)


def _path(keys: Any) -> tuple[Any, ...]:
    if not isinstance(keys, tuple | list) or not all(type(key) in (str, int) for key in keys):
        raise ValueError(f"{keys!r:.60} are not keys of a state")
    return tuple(keys)
