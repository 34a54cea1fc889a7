"""Memory that parameters had before fully_shard took them over, held by aliases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tilework.dtensor.internal import hash_of, mode, unseen

_storages: Any = torch.UntypedStorage
_weak_reference: Any = reductions.StorageWeakRef


@dataclass(frozen=True)
class _Former:
    """The former memory of a parameter. It is freed as usual: only a weak reference is kept."""

    name: str
    storage: Any
    #: The offset, the sizes and the strides.
    where: tuple[Any, ...]
    dtype: torch.dtype
    content: int

    def tensor(self) -> Tensor | None:
        """The former tensor; None if nobody holds the memory."""
        storage = _storages._new_with_weak_ptr(self.storage.cdata)
        if storage is None or not storage.nbytes():
            return None
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.where)


class FormerMemory:
    """The former memory of a unit's parameters, as long as aliases hold it.

    Writes to it are noticed by comparing content, since torch does not count writes to ``.data``:
    all elements of small tensors, a sample of large ones.
    """

    def __init__(self) -> None:
        self._formers: list[_Former] = []

    def watch(self, name: str, tensor: Tensor, now: Tensor) -> None:
        """Watch the memory of a parameter that ``tensor`` showed and ``now`` shows. Local.

        Nothing is watched if it is the same, or if ``tensor`` has none.
        """
        storage = tensor.untyped_storage()
        content = 0 if mode() == "off" else hash_of(tensor.detach(), False)
        if content and storage.data_ptr() != now.untyped_storage().data_ptr():
            where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            former = _Former(name, _weak_reference(storage), where, tensor.dtype, content)
            self._formers.append(former)

    def check(self, owner: str) -> None:
        """Raise if the program has written to such memory. Local.

        Raises:
            RuntimeError: It has; the error names the parameter, and says what to do.
        """
        if not self._formers:
            return
        held = []
        with unseen(), torch.no_grad():
            for former in self._formers:
                tensor = former.tensor()
                if tensor is None:
                    continue
                held.append(former)
                if hash_of(tensor, False) != former.content:
                    raise RuntimeError(
                        f"a write to former memory of parameter {former.name} of {owner} is lost\n"
                        f"An alias (p.data, p.detach(), a slice of a flat tensor) was taken before "
                        f"fully_shard took the parameter over, and was written to after. Take "
                        f"aliases after the next forward pass or unshard(), and make optimizers "
                        f"that keep them then; clone what is to be other memory"
                    )
        self._formers = held
