"""The operator table: one entry per operator of torch, with all facts about the operator.

All facts go in by :func:`register`, or a decorator that calls it. Users' rules are in it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch

from tilework.tiled.op_rules import RuleFunction

_PLAIN = "add sub mul matmul pow neg abs eq ne lt le gt ge"
#: Python's operator methods, by the operator.
_DUNDERS = {
    **{f"__{name}__": name for name in _PLAIN.split()},
    **{f"__{name}__": f"bitwise_{name}" for name in ("and", "or", "xor")},
    **{f"__r{name}__": f"bitwise_{name}" for name in ("and", "or", "xor")},
    "__radd__": "add",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__div__": "div",
    "__floordiv__": "floor_divide",
    "__mod__": "remainder",
    "__pos__": "positive",
    "__invert__": "bitwise_not",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
}
#: Aliases of operators.
_ALIASES = {
    **{f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")},
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "true_divide": "div",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "row_stack": "vstack",
}
_PREFIXES = ("special_", "_VF_")


def packet_of(func: Any) -> Any:
    """The operator of an overload such as ``torch.ops.aten.add.Tensor``; else the function."""
    return getattr(func, "overloadpacket", func)


def foreign_name(func: Any) -> str | None:
    """The full name of an operator or function from outside torch; None for torch's."""
    packet = packet_of(func)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        name: str = packet._qualified_op_name
        return None if name.startswith(("aten::", "prims::")) else name
    if not isinstance(func, FunctionType) or not func.__module__:
        return None
    is_known = func.__module__.partition(".")[0] in ("torch", "tilework")
    return None if is_known else f"{func.__module__}.{func.__name__}"


def canonical_name(func: Any) -> tuple[str, bool]:
    """The operator's name, and whether this form writes to the first argument."""
    name: str = getattr(packet_of(func), "__name__", None) or type(func).__name__
    if name == "__get__" or name == "__set__":
        return f"{func.__self__.__name__}.{name}", False
    in_place = False
    if name.startswith("__i") and name.endswith("__") and f"__{name[3:]}" in _DUNDERS:
        name, in_place = _DUNDERS[f"__{name[3:]}"], True
    elif name.endswith("_") and not name.endswith("__"):
        name, in_place = name[:-1], True
    name = _DUNDERS.get(name, name)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _ALIASES.get(name, name), in_place


def overloads_of(packet: Any) -> list[Any]:
    """The overloads of torch's operator, given as an object or by name in ``torch.ops.aten``."""
    if isinstance(packet, str):
        packet = getattr(torch.ops.aten, packet, None)
    names = packet.overloads() if hasattr(packet, "overloads") else ()
    return [getattr(packet, name) for name in names]


def schemas_of(packet: Any) -> list[Any]:
    """The schemas of an operator's overloads."""
    return [overload._schema for overload in overloads_of(packet)]


#: Called with the torch function, the arguments, and the keyword arguments.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RuleT = TypeVar("RuleT", bound=RuleFunction)
HandlerT = TypeVar("HandlerT", bound=Handler)
#: The canonical name of an operator (with "_" for the in-place form, if that has a separate entry);
#: or a function, where several operators share a name, and for a user's own operator.
Key = str | Callable[..., Any]


@dataclass(frozen=True)
class OpEntry:
    """All facts about an operator.

    Args:
        name: The canonical name (see :mod:`~tilework.tiled.op_table`).
        rule: How a call runs on shards of any kind; called with the arguments.
        dtensor_rule: Asked first if the call has DTensors: how the call runs on a mesh where
            ``rule`` would gather sharded dims. If the result is None, ``rule`` is asked.
        values_matter: Whether numbers among the arguments may change the results of these two
            rules; else only the numbers' types do, and a cached result serves other numbers.
        dtensor_handler: A function that runs on DTensors instead of any rule.
        is_elementwise: Whether each element of the results depends only on the elements at the
            same place, so that lists of tensors (``torch._foreach_*``) may run as local lists.
        is_view: Whether results share memory with the first argument.
        may_copy: Whether the view is a copy where strides cannot express the dims.
        may_be_input: Whether the result may be the input itself, as where a cast changes nothing.
        is_random: Whether the operator draws random numbers; None: as torch's tags say.
        is_opaque: Whether torch's Python implementation has to run unchanged on full tensors, and
            must not run on sharded tensors: it draws random numbers as plain tensors.
        silent_writes: Arguments that the operator writes to without torch counting a write, such
            as running statistics.
    """

    name: str
    rule: RuleFunction | None = None
    dtensor_rule: RuleFunction | None = None
    values_matter: bool = True
    dtensor_handler: Handler | None = None
    is_elementwise: bool = False
    is_view: bool = False
    may_copy: bool = False
    may_be_input: bool = False
    is_random: bool | None = None
    is_opaque: bool = False
    silent_writes: tuple[str, ...] = ()

    @property
    def has_rule(self) -> bool:
        return self.rule is not None or self.dtensor_rule is not None

    @property
    def draws(self) -> bool:
        return _is_tagged_random(self.name) if self.is_random is None else self.is_random


@cache
def _is_tagged_random(packet: Any) -> bool:
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads_of(packet))


def aten_parameters(name: str) -> list[str]:
    """The names of the arguments of torch's operator of this name, over all overloads."""
    return [argument.name for schema in schemas_of(name) for argument in schema.arguments]


_ENTRIES: dict[Key, OpEntry] = {}
_DEFAULTS = {field.name: field.default for field in fields(OpEntry)}
#: Ways to run a call; alternatives exclude each other.
_EXCLUSIVE = {
    "rule": ("dtensor_handler",),
    "dtensor_rule": ("dtensor_handler",),
    "dtensor_handler": ("rule", "dtensor_rule"),
}


def register(key: Key, **facts: Any) -> None:
    """Add facts, fields of :class:`OpEntry`, to the entry of an operator, each once.

    The entry of a function of torch starts with the facts of the operator of the same name, except
    how that operator runs.
    """
    entry = _ENTRIES.get(key)
    if entry is None:
        entry = _new_entry(key)
    else:
        for fact in facts:
            for other in (fact, *_EXCLUSIVE.get(fact, ())):
                if getattr(entry, other) != _DEFAULTS[other]:
                    raise ValueError(
                        f"{fact} of {key!r} cannot be registered: the {other} is known already"
                    )
    _ENTRIES[key] = replace(entry, **facts)


def _new_entry(key: Key) -> OpEntry:
    if isinstance(key, str):
        return OpEntry(key)
    foreign = _foreign_entry(key)
    if foreign is not None:
        return foreign
    name, _ = canonical_name(key)
    named = _ENTRIES.get(name) or OpEntry(name)
    return replace(named, rule=None, dtensor_rule=None, values_matter=True, dtensor_handler=None)


def _foreign_entry(func: Any) -> OpEntry | None:
    """The entry of a function that is not torch's, by the full name; None for torch's functions."""
    name = foreign_name(func)
    if name is None:
        return None
    in_place = canonical_name(func)[1]
    name = name.removesuffix("_") if in_place else name
    return _ENTRIES.get(name) or OpEntry(name, is_random=_is_tagged_random(packet_of(func)))


def override_rule(key: Key, rule: RuleFunction) -> None:
    """Make a rule the only way to run an operator, and drop the others."""
    _ENTRIES[key] = replace(_new_entry(key), rule=rule)


def forget(key: Key) -> None:
    """Remove the entry of an operator, if there is one."""
    _ENTRIES.pop(key, None)


def entry_of(name: str) -> OpEntry:
    """The entry of the operator with a canonical name."""
    return _ENTRIES.get(name) or OpEntry(name)


def find(func: Any) -> tuple[OpEntry, bool]:
    """The entry of a torch function, and whether this form writes to the first argument."""
    name, in_place = canonical_name(func)
    entry = _ENTRIES.get(func) or _ENTRIES.get(packet_of(func)) or _foreign_entry(func)
    if entry is None and in_place:
        entry = _ENTRIES.get(f"{name}_")
        if entry is None and (entry := _ENTRIES.get(name)) is not None:
            entry = replace(entry, dtensor_handler=None)  # the handler is for the other form
    elif entry is None:
        entry = _ENTRIES.get(name)
    return entry or OpEntry(name), in_place


# -- as decorators ---------------------------------------------------------------------------


def _adding(fact: str, keys: tuple[Key, ...], facts: dict[str, Any]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        for key in keys:
            register(key, **{fact: function}, **facts)
        return function

    return add


def rule(*keys: Key, **facts: Any) -> Callable[[RuleT], RuleT]:
    """Register the decorated function as the rule of operators, with further facts."""
    return _adding("rule", keys, facts)


def dtensor_rule(*keys: Key, **facts: Any) -> Callable[[RuleT], RuleT]:
    """Register the decorated function as a rule for DTensors only; otherwise like :func:`rule`."""
    return _adding("dtensor_rule", keys, facts)


def dtensor_handler(*keys: Key, **facts: Any) -> Callable[[HandlerT], HandlerT]:
    """Register the decorated function to run operators on DTensors, instead of a rule."""
    return _adding("dtensor_handler", keys, facts)
