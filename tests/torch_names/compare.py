"""What the installed torch has and tilework has not."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from tilework.comm.per_call.torch_names import ATTRIBUTE
from tilework.from_torch import DIFFERENCES, LEFT_OUT, MODULES, TorchDifferences

#: Single names of modules that are not of torch.distributed, and the packages here that have them.
_SINGLE = (
    ("torch.nn", "SyncBatchNorm", "tilework.parallel"),
    ("torch.utils.data", "DataLoader", "tilework.data"),
)
#: Members that every class of these has are torch's own.
_BASES = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, Exception, object)


def differences() -> Iterator[tuple[str, str]]:
    """Each (package here, ``name``, ``Class.member`` or ``function(keyword)``) that is missing.

    What this torch lacks is not compared. Names that are left out on purpose do not count.
    """
    seen: set[tuple[str, str]] = set()
    for theirs, ours in MODULES.items():
        module = _module(theirs)
        if module is None:
            continue
        here = importlib.import_module(ours)
        for name in _public(module):
            if (ours, name) in seen or name in left_out(ours):
                continue
            seen.add((ours, name))
            if hasattr(here, name):
                for missing in _compared(name, getattr(module, name), getattr(here, name)):
                    yield ours, missing
            else:
                yield ours, name
    for theirs, name, ours in _SINGLE:
        there, here = (importlib.import_module(module) for module in (theirs, ours))
        for missing in _compared(name, getattr(there, name), getattr(here, name)):
            yield ours, missing


def row_of(package: str, missing: str) -> TorchDifferences | None:
    """The row of the table that has a difference; None if none has."""
    for row in DIFFERENCES:
        # What a package has from another one is explained there.
        there = package.startswith(row.package) or row.package == "tilework.distributed"
        if there and any(fnmatch.fnmatchcase(missing, pattern) for pattern in row.names):
            return row
    return None


def left_out(package: str) -> set[str]:
    """The names that are left out of a package, and of those below it."""
    rows = (row for row in LEFT_OUT if package.startswith(row.package))
    return {name for row in rows for name in row.names}


def _module(name: str) -> ModuleType | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch itself is about to drop
            return importlib.import_module(name)
    except ImportError:
        return None


def _public(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None) or [n for n in dir(module) if n[0] != "_"]
    found = {name: getattr(module, name, None) for name in listed}
    return sorted(
        name
        for name, thing in found.items()
        if callable(thing) and str(getattr(thing, "__module__", "")).startswith("torch")
    )


def _compared(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    if not inspect.isclass(theirs):
        yield from _keywords(name, theirs, ours)
        return
    if "__init__" in vars(theirs):
        yield from _keywords(name, theirs, ours)
    for member in dir(theirs):
        if member.startswith("_") or any(hasattr(base, member) for base in _BASES):
            continue
        if member in getattr(theirs, "_plugins", ()):  # a backend that somebody registered
            continue
        if not _has(ours, member):
            yield f"{name}.{member}"
        elif inspect.isfunction(getattr(theirs, member)):
            mine = getattr(ours, member, None)
            if callable(mine):
                yield from _keywords(f"{name}.{member}", getattr(theirs, member), mine)


def _has(ours: Any, member: str) -> bool:
    if hasattr(ours, member):
        return True
    classes = ours.__mro__ if inspect.isclass(ours) else ()
    of_package = [each for each in classes if each.__module__.startswith("tilework")]
    return any(
        member in vars(each).get("__annotations__", {})
        or f"self.{member} = " in (source := inspect.getsource(each))
        or f"self.{member}: " in source
        or f"self.{member}, " in source
        or f", self.{member} = " in source
        for each in of_package
    )


def _keywords(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    asked, taken = _parameters(theirs), _parameters(ours)
    if asked is None or taken is None or _is_any(taken):
        return
    known = {*taken, *getattr(ours, ATTRIBUTE, {})}
    for keyword, parameter in asked.items():
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variable and keyword not in known and keyword != "self":
            yield f"{name}({keyword})"


def _parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C++
        return None


def _is_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())
