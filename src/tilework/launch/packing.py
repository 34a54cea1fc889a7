"""Functions and values that go to another interpreter, what was typed into this one included."""

from __future__ import annotations

import io
import linecache
import marshal
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Packed:
    """A value that is loaded only when it is wanted, so that failing to load it is reported."""

    data: bytes
    main: dict[str, Any]
    """The way a fresh process gets the ``__main__`` that functions may have been defined in."""
    sources: dict[str, Any]
    """The lines of what was typed in, for tracebacks: as ``linecache`` keeps them."""

    def load(self) -> Any:
        """The value. Raises whatever loading it raises."""
        linecache.cache.update(self.sources)
        if self.main:
            _recreate_main(self.main)
        return _Unpickler(io.BytesIO(self.data)).load()

    def load_result(self, rank: int) -> Any:
        """The value, which a rank returned.

        Raises:
            TypeError: It cannot be made in this process.
        """
        try:
            return self.load()
        except Exception as error:
            raise TypeError(
                f"the result of rank {rank} cannot be made in this process, which is no rank: "
                f"{error} Return numbers, text and plain tensors; of a DTensor or ShardedTensor "
                f"the full_tensor(), the to_local() or the text"
            ) from error


def pack(value: object) -> Packed:
    """The value, with what another interpreter needs to load it.

    Raises:
        TypeError: It cannot be pickled.

    Example:
        >>> pack([1, 2]).load()
        [1, 2]
    """
    typed = main_is_typed()
    try:
        data = _typed_dumps(value) if typed else pickle.dumps(value)
        # What is defined in this program's main module is pickled by that name.
        main = _how_to_recreate_main() if b"__main__" in data and not typed else {}
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"what goes to or comes from another interpreter must be picklable: {error}"
        ) from error
    return Packed(data, main, _typed_sources() if typed else {})


def main_is_typed() -> bool:
    """True if this process's main module was typed in: no other process can import it."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # "<stdin>" where that was a pipe
    known = file is not None and os.path.exists(file)
    return not known and getattr(main, "__spec__", None) is None


def is_recreating_main() -> bool:
    """True if this process is a rank that is just loading the main module of its program."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


class _Unpickler(pickle.Unpickler):
    """Lets functions that were typed in find and leave their globals in this ``__main__``."""

    def find_class(self, module: str, name: str) -> Any:
        """As pickle does, but for cloudpickle's maker of functions."""
        found = super().find_class(module, name)
        return _in_main(found) if name == "_make_function" else found


def _in_main(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(code: CodeType, names: dict[str, Any], *rest: Any) -> Any:
        own = names.get("__name__") == "__main__"
        return make(code, sys.modules["__main__"].__dict__ if own else names, *rest)

    return made


def _typed_dumps(value: object) -> bytes:
    """The value, with the code of what was typed in, which has no module to import."""
    import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """cloudpickle forgets the file of code, by which tracebacks find the lines."""

        dispatch_table = {**cloudpickle.Pickler.dispatch_table, CodeType: _code}  # noqa: RUF012

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _code(code: CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return marshal.loads, (marshal.dumps(code),)


def _typed_sources() -> dict[str, Any]:
    """The entries of linecache that belong to no file."""
    entries = linecache.cache.items()
    return {name: entry for name, entry in entries if len(entry) == 4 and entry[1] is None}


def _how_to_recreate_main() -> dict[str, Any]:
    """Multiprocessing's data for a fresh process to get this one's ``__main__``."""
    known = multiprocessing.spawn.get_preparation_data("rank")
    wanted = ("sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")
    return {name: value for name, value in known.items() if name in wanted}


def _recreate_main(how: dict[str, Any]) -> None:
    """Load the main module, marked as multiprocessing does it, so that neither starts ranks."""
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]
    try:
        multiprocessing.spawn.prepare(how)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
