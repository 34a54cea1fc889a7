"""Keep torch.compile from tracing operations that write in place, and waits.

torch.compile ends the graph there, calls the operations, and compiles nothing inside: the writes
happen in the group, where no compiler sees them. Collectives to be traced are in
:mod:`tilework.comm.functional`.
"""

from __future__ import annotations

import inspect
from types import FunctionType, ModuleType
from typing import Any

import torch

from tilework.comm import groups
from tilework.comm.backends.native_work import NativeWork
from tilework.comm.backends.shm.shm_group import PostedWork
from tilework.comm.functional.async_tensor import AsyncTensor
from tilework.comm.operations import collectives, objects, p2p

_REASON = (
    "tilework's operations that write in place are not traced; in a compiled function use those "
    "of tilework.distributed.functional"
)


def _leave(module: ModuleType) -> None:
    for name, function in vars(module).items():
        here = inspect.isfunction(function) and function.__code__.co_filename == module.__file__
        if here and not name.startswith("_"):
            leave_function(function)


def leave_function(function: FunctionType, reason: str = _REASON, with_calls: bool = True) -> None:
    """Have torch.compile end the graph at ``function``, call it, and compile nothing inside
    (``with_calls=False``: but the functions that it calls).

    If the user asks for a whole graph (fullgraph=True), compilation raises with ``reason``.
    """
    # The same as torch.compiler.disable, which takes a second to import and a frame per call.
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.7
        actions = frames._FrameAction
        calls = actions.SKIP if with_calls else actions.DEFAULT
        strategy = frames._FrameExecStrategy(actions.SKIP, calls)
        frames.set_code_exec_strategy(function.__code__, strategy)


for _module in (collectives, groups, objects, p2p):
    _leave(_module)
for _method in (
    *(NativeWork.wait, PostedWork.wait, AsyncTensor.wait, AsyncTensor.is_completed),
    *(AsyncTensor.__torch_function__, AsyncTensor.__torch_dispatch__),
):
    leave_function(inspect.unwrap(getattr(_method, "__func__", _method)))
