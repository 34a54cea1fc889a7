"""The places where a step finds tensors and numbers: variables, and the objects that they refer to.

A place is an object and the way to a part of it: an item, an attribute, or the contents of a cell.
The search begins at the step's function: the closure, the globals that the code names, the defaults
and ``self``. It goes through modules, optimizers, schedulers, containers and other objects of
Python, except for groups, meshes and the libraries' own globals.

If all classes of an object belong to the program, only the attributes that the code names count: a
count of epochs in a trainer may change, as long as the step does not read it. The same holds for
objects of torch, such as schedulers, and for tensors.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tilework.capture.program.place import StatePlace, plain
from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call.callsite import in_library
from tilework.comm.world import World
from tilework.dtensor.tensor import DTensor
from tilework.errors import CaptureError
from tilework.mesh import DeviceMesh
from tilework.store.contract import Store

T = TypeVar("T")
#: Classes of objects without state of a step, or without state that a program reads.
_LEAVES = (
    *(ProcessGroup, DeviceMesh, World, Store, types.ModuleType, type, types.BuiltinFunctionType),
    *(str, bytes, int, float, complex, types.CodeType, types.FrameType),
    *(logging.Logger, logging.Handler, io.IOBase),
)
#: Functions with which code may read any attribute.
_ANY_NAME = frozenset(("getattr", "vars", "__dict__", "asdict", "attrgetter", "__getattribute__"))
#: The dicts of a module's parts.
_TABLES = ("_parameters", "_buffers", "_modules")
#: Hooks that run in calls of a module, and the other parts that every module has.
_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
_HOOKS_OF_ALL = [
    *[getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS],
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
]
#: Classes of torch whose methods read their numbers in a step, and change none.
_WITH_OPTIONS = (Optimizer, torch.amp.GradScaler)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training", *_HOOKS}
#: The maximum of objects to search, for steps that refer to nearly everything.
_MOST = 200_000


def _address_of(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


class StatePlaces:
    """The tensors that a step can reach, and the place of each.

    Args:
        step: The step.
        arguments: Leaves of the call's arguments, such as modules, that are searched, too.
    """

    def __init__(self, step: Callable[..., Any], arguments: Sequence[Any] = ()) -> None:
        self.step, self.arguments = step, arguments
        #: By id of a tensor, the place, and the places of the objects on the way to it.
        self.tensors: dict[int, StatePlace] = {}
        #: By id of an object, the place where it was found, and the owner of the place.
        self.parents: dict[int, tuple[StatePlace, Any]] = {}
        #: All places of tensors, with the tensor there (None: no gradient).
        self.slots: list[tuple[StatePlace, Tensor | None]] = []
        #: By owner of a place, True if it belongs to the program, False if to a library.
        self._is_users: dict[int, bool] = {}
        #: Numbers, texts and flags of the user's objects and of modules, with the value.
        self.constants: list[tuple[StatePlace, Any]] = []
        #: By id, the number of items of a dict.
        self.lengths: dict[int, int] = {}
        #: Containers of the user's program, with copies.
        self.containers: list[tuple[Any, Any]] = []
        #: Other things that the step may use: functions, modules, containers, dtypes.
        self.things: list[tuple[StatePlace, Any]] = []
        self._kept: list[Any] = []
        self._graded: set[int] = set()
        #: The names in the step's code; and, by name, attributes that the code may not read.
        self._names: set[str] = set()
        self._unnamed: dict[str, list[tuple[StatePlace, Any, Any]]] = {}
        self._walk()

    def find(self, tensor: Tensor) -> StatePlace | None:
        """The place where the search found a tensor; None if the step cannot reach the tensor."""
        return self.tensors.get(id(tensor))

    def others_of(self, tensor: Tensor, path: StatePlace) -> list[StatePlace]:
        """Other places of the program with this tensor, as of tied weights.

        Without containers of parameters, as clipping has: the place in the module counts.
        """
        is_parameter = tensor.is_leaf and tensor.requires_grad
        return [
            place
            for place, other in self.slots
            if other is tensor
            and place.how != "grad"
            and self.is_users(place)
            and (place.owner is not path.owner or place.key != path.key)
            and not isinstance(place.owner, tuple)
            and not (is_parameter and issubclass(self.kind_of(place), list | dict))
        ]

    def holds(self, thing: object) -> bool:
        """True if the search has found an object, or does not search objects of this class."""
        return isinstance(thing, _LEAVES) or any(each is thing for each in self._kept)

    def knows(self, thing: object) -> bool:
        """True if the search has met an object at some place, whether it searched it or not."""
        return id(thing) in self._queued or isinstance(thing, _LEAVES)

    def plain_tensors(self) -> list[Tensor]:
        """The strided tensors at the places, without DTensors (but not without local tensors)."""
        known = {id(tensor): tensor for tensor in self._kept if isinstance(tensor, Tensor)}
        return [
            tensor
            for tensor in known.values()
            if id(tensor) in self.tensors and tensor.layout is torch.strided
        ]

    def way_to(self, place: StatePlace) -> list[tuple[StatePlace, Any]]:
        """The places that lead from the step to a place, in order, and the object at each."""
        way: list[tuple[StatePlace, Any]] = []
        found = self._found_at.get(id(place.owner), place.owner)
        while (step := self.parents.get(id(found))) is not None:
            way.append((step[0], found))
            found = step[1]
        return way[::-1]

    def generators(self) -> list[torch.Generator]:
        """The generators of random numbers that the step refers to."""
        return self.instances(torch.Generator)

    def instances(self, *kinds: type[T]) -> list[T]:
        """The objects of some classes that the step refers to."""
        return [each for each in self._kept if isinstance(each, kinds)]

    def generator(self, given: torch.Generator) -> torch.Generator | None:
        """The step's generator that ``given``, an operator's object for a generator, stands for.

        None if there is none: the step has made the generator itself.
        """
        same = (each for each in self.generators() if _address_of(each) == _address_of(given))
        return next(same, None)

    def showing(self, tensor: Tensor) -> Tensor | None:
        """A tensor at some place that shares storage with ``tensor``; None if there is none."""
        storage = tensor.untyped_storage()._cdata
        for known in self._kept:
            if isinstance(known, Tensor) and known.layout is torch.strided:
                local: Tensor = plain(known)
                if local.untyped_storage()._cdata == storage and self.find(local) is not None:
                    return local
        return None

    def is_users(self, place: StatePlace) -> bool:
        """True if a place belongs to the user's program; False if a library keeps it for itself."""
        return place.how == "grad" or self._is_users.get(id(place.owner), True)

    def kind_of(self, place: StatePlace) -> type:
        """The class of a place's owner; for an item of a module's dict, the class of the module."""
        return type(self._found_at.get(id(place.owner), place.owner))

    # -- the search --------------------------------------------------------------------------

    def _walk(self) -> None:
        seen: set[int] = set()
        self._queued = queued = {id(self.step), *map(id, self.arguments)}
        #: By id of a part such as a module's dict of parameters, the object that the part belongs
        #: to.
        self._found_at: dict[int, Any] = {}
        self._todo: list[tuple[Any, str, bool]] = [(self.step, "", True)]
        self._todo += [(hooks, "hooks of all modules", True) for hooks in _HOOKS_OF_ALL]
        self._todo += [(leaf, f"args[{i}]", True) for i, leaf in enumerate(self.arguments)]
        self._later: list[tuple[Any, str, bool]] = []
        while len(seen) < _MOST:
            if not self._todo:
                self._name_none()
                self._todo, self._later = self._later, []
                if not self._todo:
                    break
            found, text, is_users = self._todo.pop()
            if id(found) in seen or (isinstance(found, _LEAVES) and not _is_searched(found)):
                continue
            if type(found).__module__.startswith("tilework.capture."):  # another program
                self._take_step(found, text, is_users)
                continue
            seen.add(id(found))
            self._kept.append(found)
            if isinstance(found, Optimizer):
                queued.update(map(id, found.param_groups))
                self._later += [(each, text, False) for each in found.param_groups]
                for each in (found._optimizer_step_pre_hooks, found._optimizer_step_post_hooks):
                    self._todo.append((each, f"hooks of {text}", True))
            if is_users:
                self._refuse_iterator(found, text)
            is_reached, is_users = is_users, is_users and _is_users(found)
            self._note_container(found, text, is_users)
            self._take_parts(found, list(_parts_of(found, text)), is_users, is_reached)
            if is_users and _has_users_names(found):
                self._name(found.__code__)

    def _take_parts(
        self, found: Any, parts: Sequence[tuple[StatePlace, Any]], is_users: bool, is_reached: bool
    ) -> None:
        """Note the values at places of ``found``, now or when code of the step names them."""
        waits = (is_reached and _is_named_only(found)) or (is_users and _has_users_code(found))
        for place, value in reversed(parts):
            self._found_at[id(place.owner)] = found
            self._is_users[id(place.owner)] = is_users
            name = _name_of(place, found) if waits else None
            if name is None or isinstance(value, Tensor):
                self._take(place, value, found, is_users)
            elif name in self._names or (self._names & _ANY_NAME and is_users):
                self._take(place, value, found, True)
            else:
                self._unnamed.setdefault(name, []).append((place, value, found))

    def _take_step(self, program: Any, text: str, is_users: bool) -> None:
        """Queue the step of another program, which the step may call."""
        step = getattr(program, "__wrapped__", None)
        if step is not None:
            self._take(
                StatePlace(program, "attribute", "__wrapped__", text), step, program, is_users
            )

    def _refuse_iterator(self, found: Any, text: str) -> None:
        """Refuse an iterator of a library to which the user's code refers: no code sees the state.

        Raises:
            CaptureError: ``found`` is an iterator.
        """
        if not isinstance(found, Iterator) or is_users_class(type(found)):
            return
        _, owner = self.parents.get(id(found), (None, None))
        kind = type(owner)
        is_users = is_users_class(kind) or kind.__module__ in ("builtins", "collections")
        if is_users and not _is_of_package(owner):
            raise CaptureError(
                f"the step refers to {text or 'an iterator'}, a {type(found).__name__}: a program "
                f"would use the item of this call again and again. Call next() before the step, "
                f"and pass the item as an argument"
            )

    def _note_container(self, found: Any, text: str, is_users: bool) -> None:
        """Note the length of a container, which decides on loops; of a set or array, all."""
        if isinstance(found, dict):
            self.lengths[id(found)] = len(found)
        if is_users and type(found) in (list, deque, dict, set):
            self.containers.append((found, copy.copy(found)))
        if is_users and isinstance(found, list | deque | dict):
            length = StatePlace(found, "length", None, f"the length of {text or 'a container'}")
            self.constants.append((length, len(found)))
            if isinstance(found, dict) and found and all(isinstance(x, str) for x in found):
                keys = StatePlace(found, "keys", None, f"the keys of {text or 'a dict'}")
                self.constants.append((keys, tuple(found)))
        elif is_users and (isinstance(found, set) or _is_array(found)):
            content = StatePlace(found, "content", None, text or f"a {type(found).__name__}")
            self.constants.append((content, content.get()))

    def _take(self, place: StatePlace, value: Any, found: Any, is_users: bool) -> None:
        """Note the value at a place of ``found``, and queue it for the search."""
        if isinstance(value, Tensor):
            self._add(place, value, found)
        elif place.key in _TABLES and isinstance(found, nn.Module):
            self.things.append((place, value))  # the module has the parts
        elif value is None or isinstance(value, bool | int | float | str) or _is_numpys(value):
            if is_of_library(found):
                return
            if (is_users or isinstance(found, _WITH_OPTIONS)) and place.how != "grad":
                self.constants.append((place, value))
        else:
            is_users = is_users and not (is_of_library(found) and not _is_callable(value))
            if is_users and place.key not in _HOOKS and not _is_of_package(found):
                self.things.append((place, value))
            if isinstance(value, _LEAVES) and not _is_searched(value):
                return
            if id(value) not in self._queued:
                self._queued.add(id(value))
                self.parents[id(value)] = place, found
                (self._todo if is_users else self._later).append((value, place.text, is_users))

    def _name(self, code: types.CodeType) -> None:
        """Note the names in code of the step, and search attributes with such names."""
        names = set(_names_in(code)) - self._names
        self._names |= names
        for name in list(self._unnamed) if names & _ANY_NAME else names:
            for each in self._unnamed.pop(name, ()):
                if name in self._names or not _is_named_only(each[2]):
                    self._take(*each, True)
                else:
                    self._unnamed.setdefault(name, []).append(each)

    def _name_none(self) -> None:
        """Search attributes that the code does not name for tensors: libraries may read them."""
        unnamed, self._unnamed = self._unnamed, {}
        for waiting in unnamed.values():
            for place, value, found in waiting:
                self._take(place, value, found, False)

    def _add(self, place: StatePlace, tensor: Tensor, found: Any) -> None:
        self._kept.append(tensor)
        self.slots.append((place, tensor))
        self.parents.setdefault(id(tensor), (place, found))
        local = tensor
        if tensor.__class__ is DTensor:
            local = tensor._local_tensor
        is_new = id(local) not in self.tensors
        if is_new and tensor is not local:
            self.tensors[id(local)] = StatePlace(tensor, "attribute", "_local_tensor", place.text)
        elif is_new:
            self.tensors[id(tensor)] = place
            for part, value in _parts_of(vars(tensor), place.text):
                if isinstance(value, Tensor) and id(value) not in self.tensors:
                    self._kept.append(value)
                    self.tensors[id(value)] = part
        if is_new:
            self._take_parts(tensor, list(_parts_of_tensor(tensor, place.text)), True, True)
        may_have_grad = local.requires_grad or isinstance(tensor, nn.Parameter)
        if local.is_leaf and may_have_grad and id(tensor) not in self._graded:
            self._graded.add(id(tensor))
            grad_place = StatePlace(tensor, "grad", None, f"{place.text}.grad")
            grad = local.grad
            self.slots.append((grad_place, grad))
            if grad is not None:
                self._kept.append(grad)
                self.tensors.setdefault(id(grad), grad_place)
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(local, name)
                place = StatePlace(local, "attribute", name, f"hooks of {place.text}")
                self._take(place, hooks, tensor, True)


def _is_numpys(value: Any) -> bool:
    """True for a number of numpy, which does not change, unlike an array."""
    is_of_numpy = type(value).__module__ == "numpy" and hasattr(value, "dtype")
    return is_of_numpy and not _is_array(value)


def _is_array(value: Any) -> bool:
    """True for an array of numpy, or of Python's module array."""
    return type(value).__module__ in ("numpy", "array") and hasattr(value, "__setitem__")


def _is_users(found: Any) -> bool:
    """True if numbers in an object belong to the user's program, not to a library."""
    if isinstance(found, nn.Module | dict | list | deque | tuple | set | types.CellType | type):
        return True
    if isinstance(found, types.FunctionType):  # wrappers of libraries hold functions of the user
        return True
    if isinstance(found, Optimizer):  # floats of optimizers are inputs; see ``options``
        return False
    return not type(found).__module__.startswith(("torch.", "tilework."))


def _is_named_only(found: Any) -> bool:
    """True for an object of torch, such as a scheduler, which changes attributes for itself.

    Only those that the step's code names are the step's, too.
    """
    is_torchs = type(found).__module__.startswith("torch.")
    return is_torchs and not isinstance(found, Optimizer) and not _is_users(found)


def _has_users_names(found: Any) -> bool:
    """True for a function of the user's program: names in the code are names of attributes."""
    is_function = isinstance(found, types.FunctionType)
    return is_function and not in_library[found.__code__.co_filename]


def _has_users_code(found: Any) -> bool:
    """True for an object whose attributes no library reads: they count if the code names them."""
    if isinstance(found, types.ModuleType | Tensor):
        return True
    kind = found if isinstance(found, type) else type(found)
    return is_users_class(kind) and all(
        is_users_class(each) or each.__module__ in ("builtins", "abc", "typing")
        for each in kind.__mro__
        if each is not nn.Module
    )


def _name_of(place: StatePlace, found: Any) -> str | None:
    """The name that code must contain to reach a place of ``found``; None if it needs no name."""
    key = place.key
    if place.how == "length":
        return key  # type: ignore[no-any-return]
    if isinstance(found, type) and key in ("__init__", "__new__", "__post_init__"):
        return found.__name__
    is_attribute = place.how == "attribute" or place.owner is getattr(found, "__dict__", None)
    if not is_attribute or key in ("forward", "training", *_HOOKS) or key.startswith("__"):
        return None
    return str(key)


def is_users_class(kind: type | types.ModuleType) -> bool:
    """True for a class or Python module of the user's program, not of an installed package."""
    is_class = isinstance(kind, type)
    name = kind.__module__ if is_class else kind.__name__
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not (in_library[file] or "site-packages" in file)


def _is_of_package(found: Any) -> bool:
    """True for a function of an installed package, whose globals do not change."""
    return isinstance(found, types.FunctionType) and "site-packages" in found.__code__.co_filename


def is_of_library(found: Any) -> bool:
    """True for a function of torch or tilework: what is in its closure is no state of the step."""
    return isinstance(found, types.FunctionType) and in_library[found.__code__.co_filename]


def _is_callable(value: Any) -> bool:
    """True for what a wrapper of a library may hold of the user: functions, modules, optimizers."""
    return callable(value) or isinstance(value, Optimizer)


def _is_searched(found: Any) -> bool:
    """True for a class or Python module of the user, whose attributes are searched."""
    return isinstance(found, type | types.ModuleType) and is_users_class(found)


def _parts_of(found: Any, text: str) -> Iterator[tuple[StatePlace, Any]]:
    """The parts of an object: the place of each, with the object there."""
    for kinds, parts in _KINDS:
        if isinstance(found, kinds):
            return parts(found, text)
    return _parts_of_object(found, text)


def _parts_of_method(method: types.MethodType, text: str) -> Iterator[tuple[StatePlace, Any]]:
    yield StatePlace(method, "attribute", "__self__", "self"), method.__self__
    yield StatePlace(method, "attribute", "__func__", method.__func__.__name__), method.__func__


def _parts_of_partial(found: partial[Any], text: str) -> Iterator[tuple[StatePlace, Any]]:
    for name in ("func", "args", "keywords"):
        yield StatePlace(found, "attribute", name, name), getattr(found, name)


def _parts_of_mapping(found: Mapping[Any, Any], text: str) -> Iterator[tuple[StatePlace, Any]]:
    for key, value in list(found.items()):
        label = f"[{key!r}]" if isinstance(key, str | int) else f"[{type(key).__name__}]"
        yield StatePlace(found, "item", key, f"{text}{label}"), value
    if is_users_class(type(found)):
        yield from _parts_of_object(found, text)


def _parts_of_sequence(found: Sequence[Any], text: str) -> Iterator[tuple[StatePlace, Any]]:
    for number, value in enumerate(found):
        yield StatePlace(found, "item", number, f"{text}[{number}]"), value
    if is_users_class(type(found)):
        yield from _parts_of_object(found, text)


def _parts_of_cell(cell: types.CellType, text: str) -> Iterator[tuple[StatePlace, Any]]:
    with suppress(ValueError):  # the cell may be empty
        yield StatePlace(cell, "cell", None, text), cell.cell_contents


def _parts_of_namespace(found: Any, text: str) -> Iterator[tuple[StatePlace, Any]]:
    """The places and values of the attributes of a Python module or class, and of its bases."""
    if not _is_searched(found):
        return
    spaces = found.__mro__ if isinstance(found, type) else (found,)
    for name in {name: None for each in spaces if _is_searched(each) for name in vars(each)}:
        if name == "__annotations__":
            continue
        value = getattr(found, name, None)
        kept = inspect.getattr_static(found, name, None)
        if isinstance(kept, classmethod):
            yield StatePlace(kept, "attribute", "__func__", name), kept.__func__
        elif not name.startswith("__") or isinstance(value, types.FunctionType):
            yield StatePlace(found, "attribute", name, f"{found.__name__}.{name}"), value


def _parts_of_property(found: property, text: str) -> Iterator[tuple[StatePlace, Any]]:
    yield StatePlace(found, "attribute", "fget", text), found.fget


def _parts_of_tensor(tensor: Tensor, text: str) -> Iterator[tuple[StatePlace, Any]]:
    """The attributes of a tensor that a program has set, without those of libraries."""
    own = vars(tensor)
    for name, value in list(own.items()):
        if not name.startswith("_"):
            yield StatePlace(own, "item", name, f"{text}.{name}"), value


def _parts_of_object(found: Any, text: str) -> Iterator[tuple[StatePlace, Any]]:
    dot = f"{text}." if text else ""
    if is_users_class(type(found)):
        yield StatePlace(found, "attribute", "__class__", f"{dot}__class__"), type(found)
    for name, value in list(getattr(found, "__dict__", {}).items()):
        if name == "__annotations__" or name.startswith("_tilework_"):  # counts of ``verify``
            continue
        yield StatePlace(found, "attribute", name, f"{dot}{name}"), value
    for name in _slots_of(type(found)):
        if hasattr(found, name):
            yield StatePlace(found, "attribute", name, f"{dot}{name}"), getattr(found, name)
    yield from _parts_of_class(found, text)


def _parts_of_class(found: Any, text: str) -> Iterator[tuple[StatePlace, Any]]:
    """Places that may get values later: for defaults and methods of a user's class, and new names.

    Code that asks for new names has ``hasattr``, or one of ``_ANY_NAME``.
    """
    own = getattr(found, "__dict__", None)
    if own is None or not is_users_class(type(found)):
        return
    yield StatePlace(own, "length", "hasattr", f"the number of attributes of {text}"), len(own)
    for name in {
        x: None for kind in type(found).__mro__ if is_users_class(kind) for x in vars(kind)
    }:
        kept = inspect.getattr_static(found, name, None)
        if name.startswith("__") or name in own:
            continue
        if isinstance(kept, types.FunctionType | staticmethod | classmethod):
            yield StatePlace(own, "presence", name, f"{text}.{name} set on it"), False
        elif not hasattr(type(kept), "__get__"):
            yield StatePlace(found, "attribute", name, f"{text}.{name}"), kept


def _slots_of(kind: type) -> list[str]:
    slots: list[Any] = []
    for each in kind.__mro__:
        own = vars(each).get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    return [name for name in slots if isinstance(name, str) and not name.startswith("__")]


def _parts_of_function(function: types.FunctionType, text: str) -> Iterator[tuple[StatePlace, Any]]:
    for name, value in vars(function).items():
        yield StatePlace(function, "attribute", name, f"{function.__name__}.{name}"), value
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            yield StatePlace(cell, "cell", None, name), cell.cell_contents
        except ValueError:  # not set yet
            continue
    if in_library[function.__code__.co_filename]:
        return
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in function.__globals__:
            yield StatePlace(function.__globals__, "item", name, name), function.__globals__[name]
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        text = f"{function.__name__}.{name}"
        yield StatePlace(function, "attribute", name, text), getattr(function, name)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, and strings that may be names."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _parts_of_module(module: nn.Module, text: str) -> Iterator[tuple[StatePlace, Any]]:
    dot = f"{text}." if text else ""
    for kind in _TABLES:
        part: dict[str, Any] = module.__dict__.get(kind, {})
        if part:
            yield StatePlace(module.__dict__, "item", kind, f"{dot}{kind}"), part
        for name, value in part.items():
            yield StatePlace(part, "item", name, f"{dot}{name}"), value
    modules = module._modules
    yield StatePlace(modules, "length", None, f"the number of modules in {text}"), len(modules)
    for name, value in list(module.__dict__.items()):
        if name not in _OF_EVERY_MODULE:
            yield StatePlace(module.__dict__, "item", name, f"{dot}{name}"), value
    if (unit := module.__dict__.get("_fsdp_state")) is not None:  # set by fully_shard
        for name in ("divide_factor", "sums", "hook"):
            value = getattr(unit.reduction, name)
            yield (
                StatePlace(unit.reduction, "attribute", name, f"{dot}{name} of fully_shard"),
                value,
            )
    own: Any = type(module)
    if is_users_class(own):
        yield StatePlace(module, "attribute", "__class__", f"{dot}__class__"), own
        yield from _parts_of_class(module, text)
        return
    hidden = "forward" in module.__dict__
    yield StatePlace(module.__dict__, "presence", "forward", f"{dot}forward set on it"), hidden
    if not own.__module__.startswith(("torch.", "tilework.")):
        yield StatePlace(own, "attribute", "forward", f"{dot}forward"), own.forward


_KINDS: tuple[tuple[Any, Callable[[Any, str], Iterator[tuple[StatePlace, Any]]]], ...] = (
    (types.FunctionType, _parts_of_function),
    (types.MethodType, _parts_of_method),
    (partial, _parts_of_partial),
    (nn.Module, _parts_of_module),
    (Mapping, _parts_of_mapping),
    (list | deque | tuple, _parts_of_sequence),
    (types.CellType, _parts_of_cell),
    (property, _parts_of_property),
    (type | types.ModuleType, _parts_of_namespace),
)
