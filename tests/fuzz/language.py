"""The words of a random program: what each means for plain tensors, and for DTensors."""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.dtensor.op_checks import Layout, distributed
from tests.fuzz import modules
from tilework.dtensor import DTensor
from tilework.dtensor.base import is_moved
from tilework.dtensor.dispatch.results import replicated
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.mesh import DeviceMesh

_HOOK = re.compile(r"\b(v\d+)\.(?:register_hook|retain_grad)\(")
_PLACEMENTS: dict[str, Placement] = {
    "R": Replicate(),
    "P": Partial(),
    "PM": Partial("max"),
    "PA": Partial("avg"),
}


def placements_of(text: str) -> tuple[Placement, ...]:
    """Placements from text: ``"S0 R P"``, or ``"S1(2,3)"`` with sizes.

    Example:
        >>> placements_of("S0 R P")
        (Shard(dim=0), Replicate(), Partial(reduce_op='sum'))
    """
    return tuple(map(_placement, text.split()))


def _placement(word: str) -> Placement:
    if word.startswith("S"):
        dim, _, sizes = word[1:].partition("(")
        split = tuple(map(int, sizes.rstrip(")").split(","))) if sizes else None
        return Shard(int(dim), split)
    return _PLACEMENTS[word]


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random numbers, none of them near a whole or a half."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-4, 5, shape, generator=generator, dtype=torch.float64)
    return whole / 2 + torch.rand(shape, generator=generator, dtype=torch.float64) / 8 + 0.05


@dataclass
class Run:
    """A run of a program: its tensors by name, and what it noted.

    Args:
        mesh: The mesh of DTensors; None: they are plain.
    """

    mesh: DeviceMesh | None = None
    names: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    #: Gradients that hooks have seen, by name and number of the call.
    seen: dict[str, Tensor] = field(default_factory=dict)
    #: Views that had to move elements, whose base was written to since: they may not be used.
    stale: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.names |= {
            "torch": torch,
            "functional": torch.nn.functional,
            "leaf": self.leaf,
            "data": self.data,
            "index": self.index,
            "plain": values,
            "moved": self.moved,
            "write_local": self.write_local,
            "watch": self.watch,
            "keep": self.keep,
            "recomputed": self.recomputed,
            "gradient": self.gradient,
            "descend": self.descend,
            "after": self.after,
            "own": Own.apply,
            "copied": copy.deepcopy,
            "pickled": pickled,
            "module": self.module,
        }

    def execute(self, statement: str) -> None:
        """Run a statement."""
        self._refuse_fatal_hook(statement)
        exec(compile(statement, statement, "exec"), self.names)
        mode, _, text = statement.partition(": ")
        name = text.partition(" = ")[0]
        if mode == "with torch.no_grad()" and name.isidentifier():
            # torch's views say then that they require a gradient, of nobody.
            self.names[name] = self.names[name].detach()

    def _refuse_fatal_hook(self, statement: str) -> None:
        """Raise where torch ends the process: at a hook on a view whose base was written to."""
        hooked = _HOOK.search(statement)
        if self.mesh is not None or hooked is None:
            return
        tensor = self.names.get(hooked[1])
        if isinstance(tensor, Tensor) and tensor._is_view() and tensor._version:
            raise RuntimeError("a hook on a view that has no place in the graph yet")

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the program has made."""
        return {
            name: value
            for name, value in self.names.items()
            if name[0] in "vi" and name[1:].isdigit() and isinstance(value, Tensor)
        }

    # -- the words ---------------------------------------------------------------------------

    def data(self, shape: tuple[int, ...], seed: int, placements: str) -> Tensor:
        """A tensor without a gradient."""
        return self._cut(values(shape, seed), placements, seed)

    def leaf(self, name: str, shape: tuple[int, ...], seed: int, placements: str) -> Tensor:
        """A tensor whose gradient is compared."""
        leaf = self._cut(values(shape, seed), placements, seed).requires_grad_()
        self.leaves[name] = leaf
        return leaf

    def index(self, numbers: list[int], placements: str) -> Tensor:
        """A tensor of indices."""
        return self._cut(torch.tensor(numbers), placements, 0)

    def _cut(self, full: Tensor, placements: str, seed: int) -> Tensor:
        if self.mesh is None:
            return full
        return distributed(full, self.mesh, Layout(placements_of(placements)), seed)

    def moved(self, tensor: Tensor, placements: str) -> Tensor:
        """A copy in another layout."""
        if isinstance(tensor, DTensor):
            tensor = tensor.redistribute(placements=placements_of(placements))
        return tensor.clone(memory_format=torch.contiguous_format)

    def write_local(self, tensor: Tensor, number: float) -> None:
        """Multiply a tensor by a number, by way of its local tensor unless that is a copy."""
        is_linear = isinstance(tensor, DTensor) and tensor._spec.reduce_op in (None, "sum")
        written = tensor
        if isinstance(tensor, DTensor) and is_linear and not is_moved(tensor):
            written = tensor.to_local()
        if number == 0:  # a partial value's zeros, of which some are negative, sum to positive ones
            written.zero_()
        else:
            written.mul_(number)

    def watch(self, tensor: Tensor, name: str) -> None:
        """Note the gradients of a tensor."""
        if self.mesh is None and tensor._is_view() and tensor._version and tensor.retains_grad:
            raise RuntimeError("a hook on a written view that keeps its gradient: torch crashes")

        def note(grad: Tensor) -> None:
            before = sum(known.startswith(f"{name}, ") for known in self.seen)
            self.seen[f"{name}, call {before}"] = grad.detach().clone()

        is_leaf = any(tensor is leaf for leaf in self.leaves.values())
        if tensor.requires_grad and (is_leaf or tensor.grad_fn is not None):
            tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def keep(self, tensor: Tensor, name: str) -> None:
        """Have the gradient of a tensor kept and compared, as that of leaves is."""
        if not tensor.requires_grad:
            return
        if tensor.grad_fn is not None:  # asked for first: torch gives views written to one now
            tensor.retain_grad()
        if tensor.is_leaf or tensor.retains_grad:
            self.leaves[name] = tensor

    def recomputed(self, function: Callable[..., Tensor], *args: Any, reentrant: bool) -> Any:
        """The function's result, which is computed anew in backward."""
        return checkpoint(function, *args, use_reentrant=reentrant)

    def gradient(self, of: Tensor, to: Tensor, create_graph: bool = False) -> Tensor:
        """The gradient of a tensor's sum by another tensor; zeros if there is none."""
        (grad,) = torch.autograd.grad(
            of.sum(), [to], retain_graph=True, allow_unused=True, create_graph=create_graph
        )
        if grad is None:
            grad = torch.zeros_like(to)
        return grad.clone(memory_format=torch.contiguous_format)

    def descend(self, *tensors: Tensor) -> None:
        """A backward pass from the sum of each tensor, whose graph is kept."""
        for tensor in tensors:
            tensor.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]

    def after(self, leaf: Tensor, name: str) -> None:
        """Note the gradient of a leaf whenever it was accumulated into."""

        def note(tensor: Tensor) -> None:
            before = sum(known.startswith(f"{name}, after") for known in self.seen)
            assert tensor.grad is not None
            self.seen[f"{name}, after {before}"] = tensor.grad.detach().clone()

        leaf.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def module(self, name: str, kind: str, x: Tensor, seed: int, placements: str) -> Tensor:
        """What a module of this kind gives of a tensor; its parameters are leaves."""
        module = modules.made(kind, int(x.shape[-1]))
        for number, parameter in enumerate(module.parameters()):
            parameter.data.copy_(values(tuple(parameter.shape), seed + number) / 4)
        if self.mesh is not None:
            modules.distribute(module, self.mesh, placements_of(placements))
        self.leaves |= {f"{name}.{each}": its for each, its in module.named_parameters()}
        result: Tensor = module(x)
        return result

    # -- backward ----------------------------------------------------------------------------

    def backward(self) -> None:
        """The backward pass from all tensors, each with a gradient of its own."""
        roots, grads = [], []
        for name, tensor in sorted(self.tensors().items()):
            if tensor.requires_grad and tensor.is_floating_point() and not tensor.is_inference():
                weight = torch.linspace(0.5, 1.5, math.prod(tensor.shape), dtype=tensor.dtype)
                weight = weight.view(tensor.shape) + (hash_of(name) % 7) / 8
                roots.append(tensor)
                grads.append(
                    weight if self.mesh is None else replicated(weight, self.mesh)  # the same
                )
        if roots:
            torch.autograd.backward(roots, grads)


def pickled(tensor: Tensor) -> Any:
    """A tensor that was saved and loaded in the same world."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    # Saved is what it shows: where a view lies in other memory has no meaning afterwards.
    return torch.load(file).clone(memory_format=torch.contiguous_format)


class Own(torch.autograd.Function):
    """A user's own Function, which saves what it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = grad * x * 3
        return result


def hash_of(name: str) -> int:
    """A number for a name, the same in every process."""
    return sum(ord(letter) * (at + 1) for at, letter in enumerate(name))
