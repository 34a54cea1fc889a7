"""The places where a step finds tensors and numbers: its variables, and what those refer to.

A place is an object and the way to one of its parts: an item, an attribute, or the contents of a
cell. The search begins at the step's function: its closure, the globals that its code names, its
defaults, and its ``self``. It goes through modules, optimizers, schedulers, containers and other
objects of Python, but for groups, meshes and the libraries' own globals.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.comm.callsite import in_library
from tilework.comm.contract import ProcessGroup
from tilework.comm.world import World
from tilework.dtensor.tensor import DTensor
from tilework.mesh import DeviceMesh
from tilework.store.contract import Store

#: Objects that hold no state of a step, or no state that a program reads.
_LEAVES = (
    *(ProcessGroup, DeviceMesh, World, Store, types.ModuleType, type, types.BuiltinFunctionType),
    *(str, bytes, int, float, complex, types.CodeType, types.FrameType, types.GeneratorType),
)
#: A step that refers to more objects than so many has everything in view; the rest is not searched.
_MOST = 200_000


class Place(NamedTuple):
    """A part of an object.

    Attributes:
        owner: The object.
        how: "item", "attribute", "cell", "grad" for the local gradient of a tensor, or "bytes" for
            the checksum of a numpy array.
        key: The key of the item, or the name of the attribute.
        text: The place in words, as a program would write it.
    """

    owner: Any
    how: str
    key: Any
    text: str

    def get(self) -> Any:
        """The thing that is there now.

        Raises:
            LookupError: Nothing is there any more.
        """
        try:
            if self.how == "item":
                return self.owner[self.key]
            if self.how == "cell":
                return self.owner.cell_contents
            if self.how == "grad":
                return _local(self.owner).grad
            if self.how == "bytes":
                return zlib.crc32(self.owner.tobytes())
            return getattr(self.owner, self.key)
        except (AttributeError, ValueError, TypeError) as error:
            raise LookupError(str(error)) from None

    def set(self, value: Any) -> None:
        """Put a value there."""
        if self.how == "item":
            self.owner[self.key] = value
        elif self.how == "cell":
            self.owner.cell_contents = value
        elif self.how == "grad":
            _local(self.owner).grad = value
            if self.owner.__class__ is DTensor:
                self.owner._grad = None
        else:
            setattr(self.owner, self.key, value)


class Argument:
    """The place of an input that is an argument: a leaf, or the local tensor of a leaf.

    Args:
        number: The number of the leaf.
        is_dtensor: True if the leaf is a DTensor.
    """

    __slots__ = ("is_dtensor", "number")

    def __init__(self, number: int, is_dtensor: bool) -> None:
        self.number, self.is_dtensor = number, is_dtensor

    def of(self, leaves: Sequence[Any]) -> Tensor:
        """The tensor of a call, of the leaves of its arguments."""
        leaf: Any = leaves[self.number]
        return leaf._local_tensor if self.is_dtensor else leaf  # type: ignore[no-any-return]


def is_dtensor(thing: Any) -> bool:
    """True for a DTensor."""
    return thing.__class__ is DTensor


def layout_of(tensor: Any) -> tuple[Any, ...]:
    """Everything of a tensor but its elements."""
    shape = tuple(tensor.shape)
    return shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if tensor.__class__ is DTensor else tensor


class Places:
    """The tensors that a step can reach, and the place of each.

    Args:
        step: The step.
        arguments: Arguments of the call that are neither tensors nor containers of them.
    """

    def __init__(self, step: Callable[..., Any], arguments: Sequence[Any] = ()) -> None:
        self.step, self.arguments = step, arguments
        #: By id of a tensor, the place, and those of the objects on the way to it.
        self.tensors: dict[int, Place] = {}
        #: By id of an object, the place that it was found at, and the object whose place that is.
        self.parents: dict[int, tuple[Place, Any]] = {}
        #: All places of tensors, with the tensor that was there (None: a gradient's absence).
        self.slots: list[tuple[Place, Tensor | None]] = []
        #: By owner of a place, True if it is the program's: no object of a library's own.
        self._is_users: dict[int, bool] = {}
        #: Numbers, texts and flags of the user's objects and of modules, with the value.
        self.constants: list[tuple[Place, Any]] = []
        #: Lists that hold tensors or numbers, with their lengths.
        self.lists: list[tuple[list[Any], int, str]] = []
        self.optimizers: list[Optimizer] = []
        self._kept: list[Any] = []
        self._graded: set[int] = set()
        self._walk()

    def find(self, tensor: Tensor) -> Place | None:
        """The place of a tensor; None: the step can't be seen to hold it."""
        return self.tensors.get(id(tensor))

    def way_to(self, place: Place) -> list[tuple[Place, Any]]:
        """The places on the way to one, from the step on, and what was found at each."""
        way: list[tuple[Place, Any]] = []
        found = self._found_at.get(id(place.owner), place.owner)
        while (step := self.parents.get(id(found))) is not None:
            way.append((step[0], found))
            found = step[1]
        return way[::-1]

    def holds(self, thing: Any) -> bool:
        """True if the step refers to an object."""
        return id(thing) in self.parents or any(thing is each for each in self.arguments)

    def showing(self, tensor: Tensor) -> Tensor | None:
        """A tensor at some place that shows the same storage; None: there is none."""
        storage = tensor.untyped_storage()._cdata
        for known in self._kept:
            if isinstance(known, Tensor) and known.layout is torch.strided:
                plain = _local(known)
                if plain.untyped_storage()._cdata == storage and self.find(plain) is not None:
                    return plain  # type: ignore[no-any-return]
        return None

    def is_users(self, place: Place) -> bool:
        """True unless a place belongs to an object that a library keeps for itself."""
        return place.how == "grad" or self._is_users.get(id(place.owner), True)

    def kind_of(self, place: Place) -> type:
        """The class of the object that a place belongs to: a module, for an item of its dict."""
        return type(self._found_at.get(id(place.owner), place.owner))

    # -- the search --------------------------------------------------------------------------

    def _walk(self) -> None:
        seen: set[int] = set()
        self._queued = queued = {id(self.step), *map(id, self.arguments)}
        #: By id of a part such as a module's dict of parameters, the object that it belongs to.
        self._found_at: dict[int, Any] = {}
        todo: list[tuple[Any, str, bool]] = [(self.step, "", True)]
        todo += [(leaf, f"args[{i}]", True) for i, leaf in enumerate(self.arguments)]
        while todo and len(seen) < _MOST:
            found, text, is_users = todo.pop()
            if id(found) in seen or isinstance(found, _LEAVES):
                continue
            seen.add(id(found))
            self._kept.append(found)
            if isinstance(found, Optimizer):
                self.optimizers.append(found)
            is_users = is_users and _is_users(found)
            children = list(_parts_of(found, text))
            if isinstance(found, list) and is_users:
                self.lists.append((found, len(found), text))
            for place, value in reversed(children):
                self._found_at[id(place.owner)] = found
                self._is_users[id(place.owner)] = is_users
                if isinstance(value, Tensor):
                    self._add(place, value, found, todo)
                elif value is None or isinstance(value, bool | int | float | str):
                    if is_users and place.how != "grad":
                        self.constants.append((place, value))
                elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
                    array = Place(value, "bytes", None, place.text)
                    self.constants.append((array, array.get()))
                    self._kept.append(value)
                elif not isinstance(value, _LEAVES) and id(value) not in queued:
                    queued.add(id(value))
                    self.parents[id(value)] = place, found
                    todo.append((value, place.text, is_users))

    def _add(self, place: Place, tensor: Tensor, found: Any, todo: list[Any]) -> None:
        self._kept.append(tensor)
        self.slots.append((place, tensor))
        self.parents.setdefault(id(tensor), (place, found))
        local = tensor
        if tensor.__class__ is DTensor:
            local = tensor._local_tensor
            if id(local) not in self.tensors:
                self.tensors[id(local)] = Place(tensor, "attribute", "_local_tensor", place.text)
        elif id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = place
            for part, value in _parts_of(vars(tensor), place.text):
                if isinstance(value, Tensor) and id(value) not in self.tensors:
                    self._kept.append(value)
                    self.tensors[id(value)] = part
        if local.is_leaf and local.requires_grad and id(tensor) not in self._graded:
            self._graded.add(id(tensor))
            grad_place = Place(tensor, "grad", None, f"{place.text}.grad")
            grad = local.grad
            self.slots.append((grad_place, grad))
            if grad is not None:
                self._kept.append(grad)
                self.tensors.setdefault(id(grad), grad_place)
        for hooks in (
            getattr(local, "_backward_hooks", None),
            getattr(local, "_post_accumulate_grad_hooks", None),
        ):
            if hooks and id(hooks) not in self._queued:
                self._queued.add(id(hooks))
                todo.append((hooks, place.text, False))


def _is_users(found: Any) -> bool:
    """True if numbers in an object are the program's business: not those that libraries keep."""
    if isinstance(found, nn.Module | dict | list | tuple | types.CellType):
        return True
    if isinstance(found, types.FunctionType):
        return not in_library[found.__code__.co_filename]
    return not type(found).__module__.startswith(("torch.", "tilework.", "collections"))


def _parts_of(found: Any, text: str) -> Iterator[tuple[Place, Any]]:
    """The parts of an object, each with its place."""
    for kinds, parts in _KINDS:
        if isinstance(found, kinds):
            return parts(found, text)
    return _parts_of_object(found, text)


def _parts_of_method(method: types.MethodType, text: str) -> Iterator[tuple[Place, Any]]:
    yield Place(method, "attribute", "__self__", "self"), method.__self__
    yield Place(method, "attribute", "__func__", method.__func__.__name__), method.__func__


def _parts_of_partial(found: partial[Any], text: str) -> Iterator[tuple[Place, Any]]:
    for name in ("func", "args", "keywords"):
        yield Place(found, "attribute", name, name), getattr(found, name)


def _parts_of_mapping(found: Mapping[Any, Any], text: str) -> Iterator[tuple[Place, Any]]:
    for key, value in list(found.items()):
        label = f"[{key!r}]" if isinstance(key, str | int) else f"[{type(key).__name__}]"
        yield Place(found, "item", key, f"{text}{label}"), value


def _parts_of_sequence(found: Sequence[Any], text: str) -> Iterator[tuple[Place, Any]]:
    for number, value in enumerate(found):
        yield Place(found, "item", number, f"{text}[{number}]"), value


def _parts_of_cell(cell: types.CellType, text: str) -> Iterator[tuple[Place, Any]]:
    with suppress(ValueError):  # it may not be set yet
        yield Place(cell, "cell", None, text), cell.cell_contents


def _parts_of_object(found: Any, text: str) -> Iterator[tuple[Place, Any]]:
    dot = f"{text}." if text else ""
    for name, value in list(getattr(found, "__dict__", {}).items()):
        yield Place(found, "attribute", name, f"{dot}{name}"), value
    for name in _slots_of(type(found)):
        if hasattr(found, name):
            yield Place(found, "attribute", name, f"{dot}{name}"), getattr(found, name)


def _slots_of(kind: type) -> list[str]:
    slots: list[Any] = []
    for each in kind.__mro__:
        own = vars(each).get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    return [name for name in slots if isinstance(name, str) and not name.startswith("__")]


def _parts_of_function(function: types.FunctionType, text: str) -> Iterator[tuple[Place, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            yield Place(cell, "cell", None, name), cell.cell_contents
        except ValueError:  # not set yet
            continue
    if in_library[function.__code__.co_filename]:
        return
    for name in _named_globals(function.__code__):
        if name in function.__globals__:
            yield Place(function.__globals__, "item", name, name), function.__globals__[name]
    for number, value in enumerate(function.__defaults__ or ()):
        yield Place(function.__defaults__, "item", number, function.__name__), value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Place(function.__kwdefaults__, "item", name, name), value


def _named_globals(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named_globals(constant)


def _parts_of_module(module: nn.Module, text: str) -> Iterator[tuple[Place, Any]]:
    dot = f"{text}." if text else ""
    for kind in ("_parameters", "_buffers", "_modules"):
        part: dict[str, Any] = module.__dict__.get(kind, {})
        for name, value in part.items():
            if value is not None:
                yield Place(part, "item", name, f"{dot}{name}"), value
    for name, value in list(module.__dict__.items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            yield Place(module.__dict__, "item", name, f"{dot}{name}"), value
    if type(module).__module__.startswith(("torch.", "tilework.")):
        return
    yield Place(type(module), "attribute", "forward", f"{dot}forward"), type(module).forward


_KINDS: tuple[tuple[Any, Callable[[Any, str], Iterator[tuple[Place, Any]]]], ...] = (
    (types.FunctionType, _parts_of_function),
    (types.MethodType, _parts_of_method),
    (partial, _parts_of_partial),
    (nn.Module, _parts_of_module),
    (Mapping, _parts_of_mapping),
    (list | tuple, _parts_of_sequence),
    (types.CellType, _parts_of_cell),
)
