"""Programs of ranks: a script, a module or a function. All are values that can be pickled.

A script or module becomes the process's ``__main__`` exactly as with ``python SCRIPT`` or
``python -m MODULE``, and stays ``__main__`` until the process ends. Threads and exit handlers that
outlive the last line (for example, an asynchronous checkpoint) therefore still find its classes
there, unlike after ``runpy.run_path``.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any
from zipimport import ZipImportError, zipimporter

from tilework.launch.packing import pack


@dataclass(frozen=True)
class Script:
    """A Python file, or a folder or zip archive that has a ``__main__.py``.

    Attributes:
        path: The path, as given.
        arguments: The arguments after the path, for ``sys.argv``.
    """

    path: str
    arguments: tuple[str, ...] = ()

    def run(self, rank: int) -> None:
        """Run the script as ``__main__``. Raises whatever the script raises."""
        sys.argv = [self.path, *self.arguments]
        if not os.path.isfile(self.path) or _is_archive(self.path):
            _set_first_path(None)  # run_path adds the folder or archive itself
            runpy.run_path(self.path, run_name="__main__")
            return
        # As in Python: the folder of the file itself, not of a symbolic link to it.
        _set_first_path(os.path.dirname(os.path.realpath(self.path)))
        path = os.path.abspath(self.path)
        main = _new_main(path, SourceFileLoader("__main__", path), None)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


@dataclass(frozen=True)
class Module:
    """An importable module, or a package with a ``__main__`` module.

    Attributes:
        name: The dotted name.
        arguments: The arguments after the name, for ``sys.argv``.
    """

    name: str
    arguments: tuple[str, ...] = ()

    def run(self, rank: int) -> None:
        """Run the module as ``__main__``. Raises ImportError if there is none, or its errors."""
        sys.argv = ["-m", *self.arguments]
        _set_first_path(os.getcwd())
        spec, code = _find_module(self.name)
        sys.argv[0] = spec.origin or self.name
        main = _new_main(spec.origin, spec.loader, spec)
        main.__package__ = spec.parent
        exec(code, main.__dict__)


@dataclass(frozen=True)
class Function:
    """A function, called with the rank and then ``arguments``."""

    function: Callable[..., object]
    """The function."""
    arguments: tuple[Any, ...]
    """The arguments after the rank."""
    folder: str
    """The place of results, a file for each rank; no file for a rank that returns None."""

    def run(self, rank: int) -> None:
        """Call the function. Raises its errors, or TypeError if the result cannot be pickled."""
        result = self.function(rank, *self.arguments)
        if result is not None:
            data = pickle.dumps(pack(result))
            with open(os.path.join(self.folder, str(rank)), "wb") as file:
                file.write(data)


Program = Script | Module | Function


def _new_main(path: str | None, loader: object, spec: ModuleSpec | None) -> ModuleType:
    """A fresh ``__main__`` in ``sys.modules``, with the attributes that Python sets."""
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __spec__=spec)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    return main


def _set_first_path(folder: str | None) -> None:
    """Replace the launcher's own first entry of ``sys.path`` by ``folder``; None: remove it."""
    if getattr(sys.flags, "safe_path", False):  # python -P: nothing was put there
        return
    sys.path[:1] = [] if folder is None else [folder]


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The spec and the code of a module; for a package, of the module ``name.__main__``."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise ImportError(
                    f"{name!r} is a package without a __main__ module: name a module in it",
                    name=name,
                )
    except ModuleNotFoundError as error:
        # a or a.b of a.b.c is missing; any other name comes from an import in the program.
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    if spec is None:
        raise ImportError(f"no module named {name!r}", name=name)
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None:
        raise ImportError(
            f"module {name!r} has no Python code to run: name a module with Python source",
            name=name,
        )
    return spec, code


def _is_archive(path: str) -> bool:
    try:
        zipimporter(path)  # as Python does: an archive may begin with a line such as #!/bin/python3
    except ZipImportError:
        return False
    return True
