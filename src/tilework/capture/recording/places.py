"""The state of a step: the places where it finds tensors, numbers and other things.

A place is an object and the way to a part of it: an item, an attribute, or the contents of a cell.
The state is what the following search finds, and nothing else.

- It begins at the step, at objects among the arguments, and at the hooks of all modules.
- Of a function it takes the closure, the globals that the code reads, and the defaults; of a
  function of torch or tilework the closure alone, and there functions, modules and optimizers.
- Of a container it takes the items and the length or the keys; of a set or an array the content.
- Of a module it takes the parts, hooks, the flag ``training``, and attributes.
- Of another object it takes the attributes. If all classes of an object belong to the program, only
  those that code of the step names, also those of the classes: a count of epochs in a trainer may
  change, as long as the step does not read it. The same holds for modules of Python, for objects of
  torch, such as schedulers, and for tensors.

Tensors there are inputs of a program. Numbers, texts and flags must be equal in each call, and
other things the same. Attributes that no code names, and what libraries keep for themselves, are
searched for tensors alone, after the rest. Groups, meshes, files and the globals of libraries are
not searched.
"""

from __future__ import annotations

import copy
import dis
import inspect
import io
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tilework.capture.program.place import Argument, StatePlace, is_dtensor, plain
from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call.internal import in_library
from tilework.comm.world import World
from tilework.errors import CaptureError
from tilework.mesh import DeviceMesh
from tilework.store import Store

T = TypeVar("T")
_Parts = Iterator[tuple[StatePlace, Any]]
#: Classes of objects without state of a step, or without state that a program reads.
_LEAVES = (
    *(ProcessGroup, DeviceMesh, World, Store, types.ModuleType, type, types.BuiltinFunctionType),
    *(str, bytes, int, float, complex, types.CodeType, types.FrameType),
    *(logging.Logger, logging.Handler, io.IOBase),
)
_CONSTANTS = (bool, int, float, str, type(None))
#: What programs define once: such a global counts wherever code has the name.
_DEFINED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
#: Functions with which code may read any attribute.
_ANY_NAME = frozenset(("getattr", "vars", "__dict__", "asdict", "attrgetter", "__getattribute__"))
#: The dicts of a module's parts.
_TABLES = ("_parameters", "_buffers", "_modules")
#: Hooks that run in calls of a module, and the other parts that every module has.
_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS_OF_ALL = [
    *[getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS],
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
]
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training", *_HOOKS}
#: Attributes that libraries read, whether the step's code names them or not.
_ALWAYS_READ = frozenset(("forward", "training", *_HOOKS))
#: Classes of torch whose methods read their numbers in a step, and change none.
_WITH_OPTIONS = (Optimizer, torch.amp.GradScaler)
#: The maximum of objects to search, for steps that refer to nearly everything.
_MOST = 200_000


class StatePlaces:
    """The places of what a step can reach, modules and objects among ``leaves`` included."""

    def __init__(self, step: Callable[..., Any], leaves: Sequence[Any] = ()) -> None:
        #: The leaves that are searched; and by id of a tensor, the argument that it is.
        self.step = step
        self.arguments = [x for x in leaves if not isinstance(x, (*_CONSTANTS, Tensor))]
        self._numbers: dict[int, Argument] = {}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.add_argument(leaf, number)
        #: The names in code of the step.
        self._names: set[str] = set()
        self._search()
        while not self._names.isdisjoint(self._left_out):  # code that was found later has the name
            self._search()

    def _begin(self) -> None:
        #: By id of a tensor, the place.
        self.tensors: dict[int, StatePlace] = {}
        #: By id of an object, the place where it was found, and the object that has the place.
        self._parents: dict[int, tuple[StatePlace, Any]] = {}
        #: The names for which the search has left out attributes.
        self._left_out: set[str] = set()
        #: All places of tensors, with the tensor there (None: no gradient).
        self.slots: list[tuple[StatePlace, Tensor | None]] = []
        #: Numbers, texts and flags of the user's objects and of modules, with the value.
        self.constants: list[tuple[StatePlace, Any]] = []
        #: Containers of the user's program, with copies.
        self.containers: list[tuple[Any, Any]] = []
        #: Other things that the step may use: functions, modules, containers, dtypes.
        self.things: list[tuple[StatePlace, Any]] = []
        #: By id of a place's owner, such as a module's dict of parameters, the object that the
        #: owner is a part of; and True if it belongs to the program, False if to a library.
        self._owners: dict[int, tuple[Any, bool]] = {}
        self._kept: list[Any] = []
        self._graded: set[int] = set()
        #: By id of an object that was queued, True if the user's program refers to it.
        self._queued = {id(each): True for each in (self.step, *self.arguments)}
        self._later: list[tuple[Any, str, bool]] = []
        self._todo: list[tuple[Any, str, bool]] = [(self.step, "", True)]
        self._todo += [(hooks, "hooks of all modules", True) for hooks in _HOOKS_OF_ALL]
        self._todo += [(leaf, f"args[{i}]", True) for i, leaf in enumerate(self.arguments)]

    def add_argument(self, tensor: Any, number: int) -> None:
        """Treat a tensor as the argument with this number."""
        self._numbers[id(plain(tensor))] = Argument(number, is_dtensor(tensor))

    def find(self, tensor: Tensor) -> Any:
        """The place where the search found a tensor, an argument first; None: it is not reached."""
        return self._numbers.get(id(tensor)) or self.tensors.get(id(tensor))

    def others_of(self, tensor: Tensor, path: StatePlace) -> list[StatePlace]:
        """Other places of a tensor in modules (tied weights), not in containers for clipping."""
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
        """The strided tensors at the places: plain tensors, and DTensors' local tensors."""
        known = {id(tensor): tensor for tensor in self._kept if isinstance(tensor, Tensor)}
        return [
            tensor
            for tensor in known.values()
            if id(tensor) in self.tensors and tensor.layout is torch.strided
        ]

    def way_to(self, place: StatePlace) -> list[tuple[StatePlace, Any]]:
        """The places that lead from the step to a place, in order, and the object at each."""
        way: list[tuple[StatePlace, Any]] = []
        found = self._owner_of(place)
        while (step := self._parents.get(id(found))) is not None:
            way.append((step[0], found))
            found = step[1]
        return way[::-1]

    def instances(self, *kinds: type[T]) -> list[T]:
        """The objects of some classes that the step refers to."""
        return [each for each in self._kept if isinstance(each, kinds)]

    def generator(self, given: torch.Generator) -> torch.Generator | None:
        """The step's generator behind that of an operator; None if the step has made it."""
        address = _address_of(given)
        same = (x for x in self.instances(torch.Generator) if _address_of(x) == address)
        return next(same, None)

    def showing(self, tensor: Tensor) -> Tensor | None:
        """A tensor at some place that shares storage with ``tensor``; None if there is none."""
        storage = tensor.untyped_storage()._cdata
        known = [plain(x) for x in self.instances(Tensor) if x.layout is torch.strided]
        shown = (x for x in known if x.untyped_storage()._cdata == storage and self.find(x))
        return next(shown, None)

    def is_users(self, place: StatePlace) -> bool:
        """True if a place belongs to the user's program; False if a library keeps it for itself."""
        return place.how == "grad" or self._owners.get(id(place.owner), (None, True))[1]

    def kind_of(self, place: StatePlace) -> type:
        """The class of a place's owner; for an item of a module's dict, the class of the module."""
        return type(self._owner_of(place))

    def _owner_of(self, place: StatePlace) -> Any:
        return self._owners.get(id(place.owner), (place.owner, True))[0]

    # -- the search --------------------------------------------------------------------------

    def _search(self) -> None:
        self._begin()
        seen: set[int] = set()
        while (self._todo or self._later) and len(seen) < _MOST:
            found, text, is_users = (self._todo or self._later).pop()
            if id(found) in seen or not _is_searched(found):
                continue
            seen.add(id(found))
            self._kept.append(found)
            if isinstance(found, Optimizer):
                self._take_optimizer(found, text)
            counts = is_users and _is_users(found)
            if counts:
                self._note_container(found, text or f"a {type(found).__name__}")
            self._take_parts(found, _parts_of(found, text), is_users, counts)
            if counts and isinstance(found, types.FunctionType) and not is_of_library(found):
                self._names.update(_names_in(found.__code__))

    def _take_optimizer(self, found: Optimizer, text: str) -> None:
        """Queue hooks, which are the user's, and groups, whose floats are inputs."""
        for hooks in (found._optimizer_step_pre_hooks, found._optimizer_step_post_hooks):
            self._todo.append((hooks, f"hooks of {text}", True))
        for group in found.param_groups:
            self._queued[id(group)] = True
            self._later.append((group, text, False))

    def _note_container(self, found: Any, text: str) -> None:
        """Note the length of a container, which decides on loops; of a set or array, all."""
        if type(found) in (list, deque, dict, set):
            self.containers.append((found, copy.copy(found)))
        if isinstance(found, set) or _is_array(found):
            how, text = "content", text
        elif isinstance(found, dict) and found and all(isinstance(key, str) for key in found):
            how, text = "keys", f"the keys of {text}"
        elif isinstance(found, list | deque | dict):
            how, text = "length", f"the length of {text}"
        else:
            return
        place = StatePlace(found, how, None, text)
        self.constants.append((place, place.get()))

    def _take_parts(self, found: Any, parts: _Parts, is_users: bool, counts: bool) -> None:
        """Note the parts of ``found``, to which the user's program may refer."""
        for place, value in reversed(list(parts)):
            self._owners[id(place.owner)] = found, counts
            is_state = self._is_state(place, found, is_users, counts)
            if isinstance(value, Tensor):
                self._take_tensor(place, value, found)
            elif isinstance(found, nn.Module) and place.key in _TABLES:
                self.things.append((place, value))  # the module has the parts
            elif not (isinstance(value, _CONSTANTS) or _is_numpys(value)):
                self._take_thing(place, value, found, is_state)
            elif (is_state or isinstance(found, _WITH_OPTIONS)) and not is_of_library(found):
                self.constants.append((place, value))

    def _is_state(self, place: StatePlace, found: Any, is_users: bool, counts: bool) -> bool:
        """True if what is at a place is state of the step, and no library's alone."""
        name = _name_of(place, found)
        is_torchs = is_users and _is_named_only(found)
        if name is None or not (is_torchs or (counts and _has_users_code(found))):
            return counts
        others = frozenset() if is_torchs else _ANY_NAME
        if name in self._names or self._names & others:
            return True
        self._left_out |= {name, *others}
        return False

    def _take_thing(self, place: StatePlace, value: Any, found: Any, is_state: bool) -> None:
        """Note an object that is no tensor and no constant, and queue it for the search."""
        is_state = is_state and not (is_of_library(found) and not _is_callable(value))
        is_hook = isinstance(place.key, str) and place.key in _HOOKS
        if is_state and not is_hook and not _is_of_package(found):
            self.things.append((place, value))
        known = self._queued.get(id(value))
        if (known is None or (is_state and not known)) and _is_searched(value):
            if is_state:
                _refuse_iterator(value, found, place.text)
            self._parents[id(value)] = place, found
            self._queued[id(value)] = is_state
            (self._todo if is_state else self._later).append((value, place.text, is_state))

    def _take_tensor(self, place: StatePlace, tensor: Tensor, found: Any) -> None:
        self._kept.append(tensor)
        self.slots.append((place, tensor))
        self._parents.setdefault(id(tensor), (place, found))
        local: Tensor = plain(tensor)
        if id(local) not in self.tensors:
            is_local = tensor is not local
            way = StatePlace(tensor, "attribute", "_local_tensor", place.text)
            self.tensors[id(local)] = way if is_local else place
            self._take_parts(tensor, _parts_of_tensor(tensor, place.text), True, True)
            for name, value in vars(local).items() if not is_local else ():
                if isinstance(value, Tensor) and id(value) not in self.tensors:
                    self._kept.append(value)
                    self.tensors[id(value)] = StatePlace(tensor, "attribute", name, place.text)
        may_have_grad = local.requires_grad or isinstance(tensor, nn.Parameter)
        if local.is_leaf and may_have_grad and id(tensor) not in self._graded:
            self._graded.add(id(tensor))
            self._take_grad(tensor, local, place.text)

    def _take_grad(self, tensor: Tensor, local: Tensor, text: str) -> None:
        """Note the gradient of a leaf, and the hooks that a backward pass runs."""
        place = StatePlace(tensor, "grad", None, f"{text}.grad")
        self.slots.append((place, local.grad))
        if local.grad is not None:
            self._kept.append(local.grad)
            self.tensors.setdefault(id(local.grad), place)
        for name in HOOKS_OF_TENSORS:
            place = StatePlace(local, "attribute", name, f"hooks of {text}")
            if place.get() is None:
                self.constants.append((place, None))
            else:
                self._take_thing(place, place.get(), tensor, True)


def _refuse_iterator(value: Any, owner: Any, text: str) -> None:
    """Refuse a library's iterator in the user's code: its state cannot be seen."""
    is_users = type(owner).__module__ in ("builtins", "collections") or is_users_class(type(owner))
    is_librarys = isinstance(value, Iterator) and not is_users_class(type(value))
    if is_librarys and is_users and not _is_of_package(owner):
        raise CaptureError(
            f"the step refers to {text}, a {type(value).__name__}: a program would use the item of "
            f"this call again and again. Call next() before the step, and pass the item as an "
            f"argument"
        )


def _address_of(generator: Any) -> int:
    return generator._cdata  # type: ignore[no-any-return]


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
    if isinstance(found, Optimizer):  # floats of optimizers are inputs; see ``inputs``
        return False
    return not type(found).__module__.startswith(("torch.", "tilework.")) or _is_program(found)


def _is_program(found: Any) -> bool:
    """True for another captured step, of which the function is searched."""
    return type(found).__module__ == "tilework.capture.step" and "__wrapped__" in vars(found)


def _is_named_only(found: Any) -> bool:
    """True for torch's own objects, such as schedulers: only attributes that code names count."""
    is_torchs = type(found).__module__.startswith("torch.")
    return is_torchs and not isinstance(found, Optimizer) and not _is_users(found)


def _has_users_code(found: Any) -> bool:
    """True if only the user's code reads the attributes: those that it names count."""
    if isinstance(found, types.ModuleType | Tensor):
        return True
    kind = found if isinstance(found, type) else type(found)
    return is_users_class(kind) and all(
        is_users_class(each) or each.__module__ in ("builtins", "abc", "typing")
        for each in kind.__mro__
        if each is not nn.Module
    )


def _name_of(place: StatePlace, found: Any) -> str | None:
    """The name by which code reads a place of ``found``; None if it reads it without a name."""
    if isinstance(found, type) and place.key in ("__init__", "__new__", "__post_init__"):
        return found.__name__
    if place.how == "length":  # of an object's attributes
        return place.key  # type: ignore[no-any-return]
    is_attribute = place.how in ("attribute", "presence") or (
        place.owner is getattr(found, "__dict__", None)  # of a module
    )
    if not is_attribute or place.key in _ALWAYS_READ or place.key.startswith("__"):
        return None
    return str(place.key)


def is_users_class(kind: type | types.ModuleType) -> bool:
    """True for a class or Python module of the user's program, not of an installed package."""
    name = kind.__module__ if isinstance(kind, type) else kind.__name__
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
    """True for a function, module or optimizer, which a wrapper may hold for the user."""
    return callable(value) or isinstance(value, Optimizer)


def _is_searched(found: Any) -> bool:
    """True if an object has parts that count; of classes and Python modules, the user's have."""
    if isinstance(found, type | types.ModuleType):
        return is_users_class(found)
    return not isinstance(found, _LEAVES)


# -- the parts of an object --------------------------------------------------------------------


def _parts_of(found: Any, text: str) -> _Parts:
    """The parts of an object: the place of each, with the object there."""
    for kinds, parts in _KINDS:
        if isinstance(found, kinds):
            return parts(found, text)
    return _parts_of_object(found, text)


def _parts_of_method(method: types.MethodType, text: str) -> _Parts:
    yield StatePlace(method, "attribute", "__self__", "self"), method.__self__
    yield StatePlace(method, "attribute", "__func__", method.__func__.__name__), method.__func__


def _parts_of_partial(found: partial[Any], text: str) -> _Parts:
    for name in ("func", "args", "keywords"):
        yield StatePlace(found, "attribute", name, name), getattr(found, name)


def _parts_of_container(found: Any, text: str) -> _Parts:
    items = list(found.items()) if isinstance(found, Mapping) else enumerate(found)
    for key, value in items:
        label = f"[{key!r}]" if isinstance(key, str | int) else f"[{type(key).__name__}]"
        yield StatePlace(found, "item", key, f"{text}{label}"), value
    if is_users_class(type(found)):
        yield from _parts_of_object(found, text)


def _parts_of_cell(cell: types.CellType, text: str) -> _Parts:
    with suppress(ValueError):  # the cell may be empty
        yield StatePlace(cell, "cell", None, text), cell.cell_contents


def _parts_of_namespace(found: Any, text: str) -> _Parts:
    """The attributes of a Python module or class, and of the bases."""
    spaces = found.__mro__ if isinstance(found, type) else (found,)
    for name in {name: None for each in spaces if _is_searched(each) for name in vars(each)}:
        value = getattr(found, name, None)
        kept = inspect.getattr_static(found, name, None)
        if isinstance(kept, classmethod):
            yield StatePlace(kept, "attribute", "__func__", name), kept.__func__
        elif not name.startswith("__") or isinstance(value, types.FunctionType):
            yield StatePlace(found, "attribute", name, f"{found.__name__}.{name}"), value


def _parts_of_property(found: property, text: str) -> _Parts:
    yield StatePlace(found, "attribute", "fget", text), found.fget


def _parts_of_tensor(tensor: Tensor, text: str) -> _Parts:
    """The attributes of a tensor that a program has set, without those of libraries."""
    for name, value in list(vars(tensor).items()):
        if not name.startswith("_"):
            yield StatePlace(tensor, "attribute", name, f"{text}.{name}"), value


def _parts_of_object(found: Any, text: str, without: frozenset[str] = frozenset()) -> _Parts:
    dot = f"{text}." if text else ""
    own: Any = getattr(found, "__dict__", None)
    parts = {"__wrapped__": own["__wrapped__"]} if _is_program(found) else dict(own or {})
    for name, value in parts.items():
        is_read = name not in without and name != "__annotations__"
        if is_read and not name.startswith("_tilework_"):  # counts of ``verify``
            where = (own, "item") if isinstance(found, nn.Module) else (found, "attribute")
            yield StatePlace(*where, name, f"{dot}{name}"), value
    yield from _parts_of_class(found, own, dot)


def _parts_of_class(found: Any, own: Any, dot: str) -> _Parts:
    """The values of slots; of a user's class also attributes, and which methods are hidden."""
    names = [x for x in _names_of_class(type(found)) if not x.startswith("__")]
    for name in {x: None for x in names if x not in (own or ())}:
        kept = inspect.getattr_static(type(found), name, None)
        if isinstance(kept, types.FunctionType | staticmethod | classmethod):
            if own is not None:
                yield StatePlace(own, "presence", name, f"{dot}{name} set on it"), False
        elif isinstance(kept, types.MemberDescriptorType) or not hasattr(type(kept), "__get__"):
            with suppress(AttributeError):  # a slot may be empty
                yield StatePlace(found, "attribute", name, f"{dot}{name}"), getattr(found, name)
    if is_users_class(type(found)):
        yield StatePlace(found, "attribute", "__class__", f"{dot}__class__"), type(found)
        if own is not None:
            text = f"the number of attributes of {dot[:-1]}"
            yield StatePlace(own, "length", "hasattr", text), len(own)


def _names_of_class(kind: type) -> Iterator[str]:
    """The names of a user's class, which an object may hide, and those of slots."""
    for each in kind.__mro__:
        if is_users_class(each):
            yield from vars(each)
        else:
            slots = vars(each).get("__slots__", ())
            yield from [slots] if isinstance(slots, str) else slots


def _parts_of_function(function: types.FunctionType, text: str) -> _Parts:
    for name, value in vars(function).items():
        yield StatePlace(function, "attribute", name, f"{function.__name__}.{name}"), value
    code, known = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        yield from _parts_of_cell(cell, name)
    if is_of_library(function):
        return
    for name in dict.fromkeys(_names_in(code)):
        if name in known and (isinstance(known[name], _DEFINED) or name in _globals_in(code)):
            yield StatePlace(known, "item", name, name), known[name]
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        text = f"{function.__name__}.{name}"
        yield StatePlace(function, "attribute", name, text), getattr(function, name)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and the code of functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, and strings that may be names."""
    for each in _codes_in(code):
        yield from each.co_names
        yield from [x for x in each.co_consts if isinstance(x, str) and x.isidentifier()]


@lru_cache(1024)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals in code; ``step`` in ``optimizer.step()`` is not a global."""
    found = {
        each.argval
        for every in _codes_in(code)
        for each in dis.get_instructions(every)
        if each.opname == "LOAD_NAME" or each.opname.endswith("_GLOBAL")
    }
    return frozenset(_names_in(code) if "globals" in found else found)


def _parts_of_module(module: nn.Module, text: str) -> _Parts:
    dot = f"{text}." if text else ""
    own: dict[str, Any] = module.__dict__
    for kind in _TABLES:
        part: dict[str, Any] = own.get(kind, {})
        if part:
            yield StatePlace(own, "item", kind, f"{dot}{kind}"), part
        for name, value in part.items():
            yield StatePlace(part, "item", name, f"{dot}{name}"), value
    modules = module._modules
    yield StatePlace(modules, "length", None, f"the number of modules in {text}"), len(modules)
    if (unit := own.get("_fsdp_state")) is not None:  # set by fully_shard
        for name in ("divide_factor", "sums", "hook"):
            place = StatePlace(unit.reduction, "attribute", name, f"{dot}{name} of fully_shard")
            yield place, place.get()
    yield from _parts_of_object(module, text, _OF_EVERY_MODULE)
    kind_of_module: Any = type(module)
    if not is_users_class(kind_of_module):
        hidden = "forward" in own
        yield StatePlace(own, "presence", "forward", f"{dot}forward set on it"), hidden
        if not kind_of_module.__module__.startswith(("torch.", "tilework.")):
            forward = StatePlace(kind_of_module, "attribute", "forward", f"{dot}forward")
            yield forward, forward.get()


_KINDS: tuple[tuple[Any, Callable[[Any, str], _Parts]], ...] = (
    (types.FunctionType, _parts_of_function),
    (types.MethodType, _parts_of_method),
    (partial, _parts_of_partial),
    (nn.Module, _parts_of_module),
    (Mapping | list | deque | tuple, _parts_of_container),
    (types.CellType, _parts_of_cell),
    (property, _parts_of_property),
    (type | types.ModuleType, _parts_of_namespace),
)
