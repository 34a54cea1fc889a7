"""Provenance digests: numbers that identify how each DTensor was computed.

A digest is a hash of the operator, the layouts, the numbers among the arguments and the digests of
the operands. It is the same on all ranks that do the same, since it includes nothing that differs
by rank: the contents of plain tensors, which count as replicated, and of replicated local tensors;
the key of random numbers; the number of a collective that made a tensor (``distribute_tensor``).
``hash`` of a tuple of numbers is the same in all processes, and takes tens of nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from struct import pack, unpack
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.provenance_digest import carrying
from tilework.dtensor.base import DTensorBase, grads_of, memory_of
from tilework.dtensor.debug.formatting import layout_text
from tilework.dtensor.provenance import content
from tilework.dtensor.provenance.content import content_digest, mode
from tilework.dtensor.spec import DTensorSpec
from tilework.mesh import DeviceMesh

_MOST = (1 << 61) - 1


class CallCounts:
    """Counts of one rank for one mesh: the same on all ranks while the ranks do the same."""

    __slots__ = ("creations", "inputs", "passes", "passing", "steps")

    def __init__(self) -> None:
        #: Collectives that made tensors of values from one rank.
        self.creations = 0
        #: The digest of all inputs and outputs so far of modules with plain tensors in between.
        self.inputs = 0
        #: The sum of the digests of all backward passes, and of what they communicated.
        self.passes = 0
        #: The digest of the backward pass that runs; 0: none that began at a DTensor.
        self.passing = 0
        #: Optimizer steps.
        self.steps = 0

    def note_gradient(self, digest: int) -> None:
        """Add the digest of a backward pass, or of a tensor that it communicated; in any order."""
        self.passes = (self.passes + digest) & _MOST

    def note_plain_gradient(self, digest: int) -> None:
        """Add a gradient that comes from plain tensors, which are to be the same on all ranks."""
        self.note_gradient(digest)
        self.passing = (self.passing + digest) & _MOST


def call_counts_of(mesh: DeviceMesh) -> CallCounts:
    """This rank's counts for a mesh."""
    counts: CallCounts | None = mesh.call_counts
    if counts is None:
        counts = mesh.call_counts = CallCounts()
    return counts


_NUMBER_CLASSES: tuple[Any, ...] = (int, float, complex)
NUMBERS = frozenset({int, float, bool, complex})
#: Whole numbers of this size and more are hashed by their digits: ``hash`` is modulo 2**61 - 1.
_MOST_HASHED = 1 << 60
#: Stands for -1, whose ``hash`` is that of -2.
_MINUS_ONE = _MOST_HASHED + 3
#: The bits of NaN, however it came about.
_NAN = 0x7FF8 << 48
#: Arguments whose text says what they are, and nothing of this process.
_PLAIN = (str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def stable_digest(*facts: Any) -> int:
    """A hash of the text of plain data, the same in every process."""
    return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little") >> 2


def digest_of(tensor: DTensorBase) -> int:
    """The digest that a tensor was given, else a digest of the elements. Local."""
    digest = tensor._digest
    if digest is not None:
        return digest
    if tensor._made is not None:
        written = memory_of(tensor).digest
        return hash((tensor._made, written)) if written else tensor._made
    known = memory_of(tensor).content  # whoever has the local tensor may write to it
    if known is not None:
        local, version, changes, digest = known
        if (
            local is tensor._local_tensor
            and local._version == version
            and changes == content.changes
        ):
            return digest
    spec = tensor._spec
    if len(spec.mesh.spec.ranks) == 1:
        tensor._digest = 0
        return 0
    if not (spec.is_replicated and spec.takes_part):
        return hash((spec.digest, provenance_digest.digest()))
    return _digest_of_content(tensor)


def _digest_of_content(tensor: DTensorBase) -> int:
    local = tensor._local_tensor
    is_counted = not local.is_inference()  # else torch does not count what is written to it
    changes, version = content.changes, local._version if is_counted else 0
    digest = hash((tensor._spec.digest, content_digest(local)))
    memory_of(tensor).content = (local, version, changes, digest) if is_counted else None
    return digest


def plain_or_digest(tensor: Tensor) -> int:
    """The digest of a DTensor; for a plain tensor, which counts as replicated, of the value."""
    return digest_of(tensor) if isinstance(tensor, DTensorBase) else content_digest(tensor)


def follow(tensor: DTensorBase, base: DTensorBase) -> None:
    """Give ``tensor`` the digest of ``base``, of the same memory, also after later writes."""
    is_content = base._digest is None and base._made is None and base._spec.is_replicated
    # The contents show writes.
    tensor._made, tensor._digest = None if is_content else digest_of(base), None


def follow_memory(tensor: DTensorBase) -> None:
    """Let the digest of a tensor that gets views depend on writes through these. Local."""
    is_content = tensor._digest is None and tensor._spec.is_replicated
    if tensor._made is None and not is_content:  # for content, the elements show writes
        tensor._made, tensor._digest = digest_of(tensor), None


def note_write(tensor: DTensorBase, digest: int) -> None:
    """Give a tensor the digest of a write to it, and mix that into the digests of all views."""
    grads = tensor._grads
    if grads is not None and grads.noted is not None:  # a gradient, which the next pass adds to
        digest = hash((digest, call_counts_of(tensor._spec.mesh).passes))
    memory, made = memory_of(tensor), tensor._made
    is_view = made is not None or tensor._viewed is not None
    if is_view:  # the part of the memory counts, even if the values before do not
        digest = hash((digest_of(tensor) if made is None else made, digest))
    memory.digest = hash((memory.digest, digest))
    if is_view:
        tensor._made, tensor._digest = digest, None
    else:
        tensor._digest = digest


def note_gradient(tensor: DTensorBase, grad: DTensorBase) -> int:
    """Give a tensor's gradient a digest: of the backward passes, and of writes to the gradient.

    The digest is the same whether a rank has asked for the gradient before, or not.

    Returns:
        The digest.
    """
    digest, passes = grad._digest, call_counts_of(tensor._spec.mesh).passes
    record = grads_of(grad)
    noted = record.noted
    # The values that the program has written, or made it of; None: none.
    written = noted[1] if noted is not None and noted[0] == digest else digest
    if written is None:
        digest = hash((digest_of(tensor), passes, grads_of(tensor).cleared))
    else:
        digest = hash((written, passes))
    grad._digest, record.noted = digest, (digest, written)
    return digest


def note_cleared(tensor: DTensorBase) -> None:
    """Note that a tensor's gradient is about to be cleared: later gradients are new."""
    if tensor._local_tensor.grad is not None:
        grads_of(tensor).cleared = call_counts_of(tensor._spec.mesh).passes
    if tensor._grads is not None:
        tensor._grads.shown = tensor._grads.deferred = None


def call_digest(name: str, names: Sequence[str], args: Any, kwargs: Any, values: bool) -> int:
    """The digest of a call, without the digests of the tensors."""
    named = dict(zip([*names, *range(len(names), len(args))], args, strict=False))
    facts = {str(key): _facts(value, values) for key, value in (named | kwargs).items()}
    return stable_digest(name, sorted(facts.items()))


def _facts(value: Any, values: bool) -> Any:
    if isinstance(value, DTensorBase):
        return "DTensor", value._spec.digest, str(value.dtype)
    if isinstance(value, Tensor):
        return "plain", tuple(value.shape), str(value.dtype)
    kind = value.__class__
    if kind in NUMBERS:
        return repr(value) if values else kind.__name__
    if (number := plain_number(value)) is not None:  # such as numpy's: the key has the value
        return kind.__name__, repr(number)
    if kind is slice:
        value = [value.start, value.stop, value.step]
    if isinstance(value, (list, tuple, range)):
        return [_facts(item, values) for item in value]
    if kind is dict:
        return [(str(key), _facts(item, values)) for key, item in value.items()]
    if kind is FunctionType:  # of apply_(), for one
        code = value.__code__
        return value.__qualname__, code.co_code, _facts(code.co_consts, values=True)
    return repr(value) if isinstance(value, _PLAIN) else kind.__qualname__


def number_seed(number: Any) -> int:
    """The form of a number in digests: the bits, or the number itself if ``hash`` distinguishes it.

    Example:
        >>> hash(0.5) == hash(2.0**60), number_seed(0.5) == number_seed(2.0**60)
        (True, False)
    """
    if isinstance(number, complex):
        return hash((number_seed(number.real), number_seed(number.imag)))
    if isinstance(number, float):
        return _NAN if number != number else int(unpack("<Q", pack("<d", number))[0])
    if number == -1:
        return _MINUS_ONE
    return int(number) if abs(number) < _MOST_HASHED else stable_digest(int(number))


def plain_number(value: Any) -> complex | None:
    """The number that a value of another class (numpy's, or the program's) stands for, or None.

    Example:
        >>> import numpy
        >>> plain_number(numpy.float32(0.5)), plain_number(True), plain_number("1")
        (0.5, True, None)
    """
    if value.__class__ in NUMBERS:
        return cast(complex, value)
    for kind in _NUMBER_CLASSES:
        if isinstance(value, kind):
            return cast(complex, kind(value))
    if value.__class__.__module__ == "numpy" and not getattr(value, "ndim", 1):
        number: Any = value.item()
        return cast(complex, number) if number.__class__ in NUMBERS else None
    return None


def seeds_in(value: Any, seeds: list[Any]) -> list[Any]:
    """Append the digests of tensors, and numbers, in arguments to ``seeds``; return ``seeds``."""
    if isinstance(value, Tensor):
        seeds.append(plain_or_digest(value))
    elif value.__class__ in NUMBERS:
        seeds.append(number_seed(value))
    elif isinstance(value, (list, tuple)):
        for item in value:
            seeds_in(item, seeds)
    elif isinstance(value, dict):
        for item in value.values():
            seeds_in(item, seeds)
    elif (number := plain_number(value)) is not None:
        seeds.append(number_seed(number))
    return seeds


class TensorText:
    """The text of a tensor that moves, made only when an error needs it."""

    __slots__ = ("dtype", "spec", "target")

    def __init__(
        self, spec: DTensorSpec, dtype: torch.dtype, target: DTensorSpec | None = None
    ) -> None:
        self.spec, self.dtype, self.target = spec, dtype, target

    def __str__(self) -> str:
        text = layout_text(self.spec, self.dtype)
        return text if self.target is None else f"{text} to {layout_text(self.target, self.dtype)}"


def carried(digest: int) -> int:
    """The digest for collectives: of a tensor, mixed with the surrounding operator's; 0 if off."""
    return 0 if mode() == "off" else hash((digest, provenance_digest.digest()))


def moving(digest: int, operator: str, tensor: TensorText | None = None) -> carrying:
    """A context in which collectives carry a digest, mixed with that of an operator around it."""
    return carrying(carried(digest), operator, tensor)


def agreeing(method: str) -> carrying:
    """A context in which ranks agree on the arguments of a method: headers and errors name it."""
    return moving(_digest_of_name(method), method)


_digest_of_name = cache(stable_digest)


def named_for(method: str) -> carrying:
    """A context in which errors of collectives name a method that the program has called."""
    return carrying(provenance_digest.digest(), method)


class Moved:
    """Facts about a tensor that is about to move between ranks: where it comes from, and why.

    Args:
        digest: The provenance digest.
        operator: The operator or method that it moves for.
        handed_out: True if the program gets the result, maybe as a plain tensor. Then the gradient
            may come from any code, and no operator has made it partial.
    """

    __slots__ = ("digest", "handed_out", "operator")

    def __init__(self, digest: int = 0, operator: str = "", handed_out: bool = False) -> None:
        self.digest, self.operator, self.handed_out = digest, operator, handed_out

    def as_gradient(self, passing: int) -> Moved:
        """The facts about the tensor's gradient, in a backward pass with the digest ``passing``."""
        operator = f"the gradient of {self.operator}" if self.operator else "a gradient"
        return Moved(hash((self.digest, passing)), operator)


#: A tensor of which nothing is known but the operator around.
UNKNOWN = Moved()
