"""Functions of torch, transformers and peft that take a model's state, for models of tilework.

``torch.distributed.checkpoint.state_dict`` gathers and cuts only torch's DTensors. It treats any
other tensor as whole, without asking it: sharded tensors of tilework would silently stay sharded.
All public functions of the module end in one of four functions, which get the model and the
options. These four now look at the model first.

``save_pretrained`` of transformers and of peft takes the memory of each tensor, on the first rank
alone. For a model of tilework the tensors are gathered first, on all ranks.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

import torch.distributed as torch_dist
from torch import nn

from tilework.comm.operations.internal import agree, broadcast_object_list
from tilework.comm.world import get_rank, is_initialized
from tilework.late_names import late_name
from tilework.tiled import TiledTensor


def _is_ours(model: nn.Module) -> bool:
    """True for a model with tensors or modules of tilework."""
    kinds = {kind for each in model.modules() for kind in type(each).__mro__}
    return any(kind.__module__.startswith("tilework.") for kind in kinds) or any(
        isinstance(each, TiledTensor) for each in chain(model.parameters(), model.buffers())
    )


class _Redirected:
    """Replacements of four of torch's functions, for models with tilework's tensors."""

    def __init__(self, torchs: Any) -> None:
        self._torchs, self._own = torchs, late_name("models", "state_dict")

    def _get_model_state_dict(self, model: nn.Module, info: Any) -> Any:
        if not info.handle_model:
            return {}
        modules = self._submodules(model, info)
        options = self._options(model, info)
        return self._own.get_model_state_dict(model, submodules=modules, options=options)

    def _load_model_state_dict(self, model: nn.Module, state: Any, info: Any) -> Any:
        options, handles = self._options(model, info), [info.handle_model]
        if info.broadcast_from_rank0 and is_initialized():  # torch asks for each rank's own state
            broadcast_object_list(handles, 0)
        if not handles[0]:
            return nn.modules.module._IncompatibleKeys([], [])
        return self._own.set_model_state_dict(model, state, options=options)

    def _get_optim_state_dict(self, model: nn.Module, optimizers: Sequence[Any], info: Any) -> Any:
        if not info.handle_optim:
            return {}
        for each in optimizers:
            self._torchs._init_optim_state(each)
        modules = self._submodules(model, info)
        options = self._options(model, info)
        return self._own.get_optimizer_state_dict(
            model, optimizers, submodules=modules, options=options
        )

    def _load_optim_state_dict(
        self, model: nn.Module, optimizers: Iterable[Any], state: Any, info: Any
    ) -> None:
        if info.handle_optim:
            options = self._options(model, info)
            self._own.set_optimizer_state_dict(model, optimizers, state, options=options)

    def _options(self, model: nn.Module, info: Any) -> Any:
        names = self._own.StateDictOptions.__dataclass_fields__
        options = {name: getattr(info, name) for name in names if hasattr(info, name)}
        if info.broadcast_from_rank0 and self._torchs.dist.is_initialized() > is_initialized():
            raise RuntimeError(
                "broadcast_from_rank0=True fills tilework's tensors over tilework's default "
                "group, but only torch.distributed has a default group: give all ranks the state "
                "dict, or call tilework.dtensor.module_to_torch(model) first"
            )
        if any(name in vars(model) for name in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"the object of {type(model).__name__} has its own state_dict or load_state_dict, "
                f"as _patch_model_state_dict sets it, and sharded tensors of tilework need the "
                f"methods of the class: do not patch it, and call get_model_state_dict and "
                f"set_model_state_dict"
            )
        return self._own.StateDictOptions(**options)

    def _submodules(self, model: nn.Module, info: Any) -> set[nn.Module]:
        return {
            each
            for name, each in model.named_modules()
            if info.submodule_prefixes
            and any(
                f"{known}." in info.submodule_prefixes
                for known in self._torchs._get_fqns(model, name)
            )
        }


def _redirect(torchs: ModuleType) -> None:
    for kind in ("model", "optim"):
        for name in (f"_get_{kind}_state_dict", f"_load_{kind}_state_dict"):
            setattr(torchs, name, _choosing(torchs, name))


def _choosing(torchs: ModuleType, name: str) -> Callable[..., Any]:
    original = getattr(torchs, name)

    @functools.wraps(original)
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        chosen = getattr(_Redirected(torchs), name) if _is_ours(model) else original
        return chosen(model, *args, **kwargs)

    return call


def gather_in_saving(name: str, library: Any) -> None:
    """Let ``save_pretrained`` of a class of a library gather the tensors of models of tilework."""
    model = getattr(library, name)
    model.save_pretrained = _gathering(model.save_pretrained)


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    """``save_pretrained`` that gathers on the first rank, which writes. Collective."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        named = given.arguments
        if "state_dict" not in signature.parameters:
            named = named.setdefault("kwargs", {})
        state: dict[str, Any] = named.get("state_dict") or {}
        if not state and _is_ours(self):
            state = self.state_dict(keep_vars=True)  # tied names have the same tensor
        if not any(isinstance(each, TiledTensor) for each in state.values()):
            return original(self, *args, **kwargs)
        group: Any = None if is_initialized() else torch_dist.group.WORLD
        is_first = get_rank(group) == 0
        whole: dict[int, Any] = {}
        for each in state.values():
            if isinstance(each, TiledTensor) and id(each) not in whole:
                full = each.detach().full_tensor()  # type: ignore[attr-defined]
                whole[id(each)] = full.cpu() if is_first else None
        named["state_dict"] = {name: whole.get(id(each), each) for name, each in state.items()}
        agree(lambda: original(*given.args, **given.kwargs) if is_first else None, group)

    return save_pretrained


#: By name, the modules with functions to replace, and what replaces them.
_MODULES: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed.checkpoint.state_dict": _redirect,
    "transformers.modeling_utils": functools.partial(gather_in_saving, "PreTrainedModel"),
    "peft.peft_model": functools.partial(gather_in_saving, "PeftModel"),
}


class _WhenLoaded(importlib.abc.MetaPathFinder):
    """Redirects each module when the user's program loads it; loading it here is slow."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _MODULES[module.__name__](module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


for _name in _MODULES.keys() & sys.modules.keys():
    _MODULES[_name](sys.modules[_name])
sys.meta_path.insert(0, _WhenLoaded())
