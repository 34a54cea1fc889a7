"""Saving a model as published weights: the folder that transformers' ``save_pretrained`` writes.

All ranks write to the same files, each the bytes that it holds, at their final places. Nothing is
gathered anywhere, and the files are the same as from a single process.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilework.checkpoint import storage as files
from tilework.checkpoint.asynchronous import raise_pending
from tilework.checkpoint.composing import MapNames, PieceOf, joined, mapped_name, piece, runs
from tilework.checkpoint.describing import local_view
from tilework.checkpoint.flat_state import PerRank, dotted
from tilework.checkpoint.format import Part, SavedTensor
from tilework.checkpoint.index_text import is_checkpoint
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.published import (
    conversion_mapping,
    converted,
    with_first_match,
    with_renamings,
)
from tilework.checkpoint.ranks import Ranks
from tilework.checkpoint.safetensors_index import (
    HF_FILE,
    HF_INDEX,
    PlannedFile,
    index_json,
    is_shard,
    plan_published,
)
from tilework.checkpoint.save_planning import (
    FILE_BYTES,
    PlacedBox,
    TensorToSave,
    check_file_bytes,
    cut_box,
)
from tilework.checkpoint.saving import Save, SaveOptions, prepare_save
from tilework.checkpoint.stateful_objects import unwrapped
from tilework.checkpoint.storage import UNFINISHED, LocalStorage
from tilework.checkpoint.tensor_bytes import DTYPES, byte_view, dtype_name
from tilework.checkpoint.url_storage import AnyPath, storage_at
from tilework.comm.world import AnyGroup
from tilework.errors import CheckpointError
from tilework.layout import Box
from tilework.layout.internal import whole_box

#: The size in bytes of pieces of elements that are converted and written.
_PIECE_BYTES = 1 << 20
_CONFIG, _GENERATION = "config.json", "generation_config.json"


def save_pretrained(
    model: nn.Module,
    path: AnyPath,
    *,
    dtype: torch.dtype | None = None,
    map_names: MapNames = None,
    file_bytes: int = FILE_BYTES,
    group: AnyGroup = None,
) -> None:
    """Write a model's weights as Hugging Face publishes them, sharded or not. Collective; blocks.

    The folder is the same as from transformers' ``model.save_pretrained`` of the whole model:
    safetensors files, an index if there are several, and the configuration if the model has one.
    Each rank writes the elements that it holds, in pieces: at most a few MiB are added to the
    memory. ``load`` reads the folder, and so does ``from_pretrained``. To continue training use
    :func:`save`, with checksums, optimizers and everything else.

    Args:
        model: A module, in any layout: of DTensors, by fully_shard, by DDP, or plain.
        path: A folder that all ranks see. Existing weights are replaced when the new files are
            complete, after ``config.json``. Other files stay.
        dtype: The dtype of floating-point tensors in the files; None: each tensor's own.
        map_names: As for :func:`load`: from a name of the model to the published name. If it gives
            a list of names, the tensor is cut into equal pieces along dim 0, one for each name.
        file_bytes: The maximum of bytes of a file; a larger tensor has a file alone.
        group: The ranks that save; None: all, or this process if there is no group.

    Raises:
        CheckpointError: On all ranks: a file could not be written, a checkpoint of :func:`save` is
            there, ranks hold different values of a tensor that is not sharded, or the model's form
            cannot be converted back. Existing files do not change.
        TypeError: ``model`` is not a module; or files cannot hold a tensor of this form.
        ValueError: The path is a URL.

    Example: see docs/how-to/hugging-face.md.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_pretrained takes a module, got {type(model).__name__}")
    check_file_bytes(file_bytes)
    storage = storage_at(path)
    if not isinstance(storage, LocalStorage):
        raise ValueError(f"save_pretrained writes to a folder, not to {path}: copy it there after")
    ranks, module = Ranks(group), unwrapped(model)
    # By names only, so that parts belong to whole tensors, one for each box.
    options = SaveOptions(file_bytes=1 << 62)
    save = prepare_save(storage, _named(module), ranks, options, lambda: _check_free(storage))
    try:
        published = _published(module, save, dtype, map_names)
        _write_all(_Folder(storage, published, file_bytes), save, published, _texts(module, dtype))
    finally:
        save.release()


def _check_free(storage: LocalStorage) -> None:
    raise_pending()
    if is_checkpoint(storage.names(), storage):
        raise CheckpointError(
            f"{storage.location} is a checkpoint of tilework: give another path",
            file=storage.location,
        )


# -- names and forms -------------------------------------------------------------------------


def _named(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module to save, by name; tied tensors under a single name."""
    state = {name: each for name, each in module.state_dict().items() if isinstance(each, Tensor)}
    for name in getattr(module, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    derived = getattr(module, "all_tied_weights_keys", None) or ()  # of transformers
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state:
            names[id(parameter)].append(name)
    for tied in names.values():
        kept = next((name for name in tied if name not in derived), tied[0])
        for name in tied:
            if name != kept:
                del state[name]
    return state


def _published(
    module: nn.Module, save: Save, dtype: torch.dtype | None, map_names: MapNames
) -> Mapping[str, SavedTensor]:
    """The tensors to write, by published name; their parts are of the module's tensors. Pure."""
    for path, leaf in save.merged.flat.leaves.items():
        if isinstance(leaf, PerRank):
            raise CheckpointError(
                f"{dotted(path)!r} differs between ranks, and published files hold one value for "
                f"all ranks: broadcast the value, or save every rank's with checkpoint.save",
                tensor=dotted(path),
            )
    own = {each.name: _whole(each) for each in save.merged.tensors}
    own |= {name: own[first] for name, first in save.merged.aliases.items()}
    forms = _converted_back(module, own if map_names is None else _mapped_back(own, map_names))
    if dtype is None:
        return forms
    kind = dtype_name(dtype)
    return {
        name: replace(each, dtype=kind) if DTYPES[each.dtype].is_floating_point else each
        for name, each in forms.items()
    }


def _whole(tensor: TensorToSave) -> SavedTensor:
    """A tensor of the module, described as if a file of the tensor's name had the elements."""
    box = whole_box(tensor.shape)
    part = Part(box, tensor.name, 0, box.volume * tensor.itemsize)
    return SavedTensor(tensor.name, tensor.dtype, tensor.shape, (part,))


class _Forms(dict[str, SavedTensor]):
    """Tensors by name; each name may be set only once."""

    def __setitem__(self, name: str, tensor: SavedTensor) -> None:
        if name in self:
            raise CheckpointError(
                f"two tensors of the model would be published as {name!r}", tensor=name
            )
        super().__setitem__(name, tensor)


def _mapped_back(own: Mapping[str, SavedTensor], map_names: MapNames) -> dict[str, SavedTensor]:
    forms = _Forms()
    pieces: dict[str, dict[int, tuple[PieceOf, SavedTensor]]] = defaultdict(dict)
    for name, tensor in own.items():
        mapped = mapped_name(name, map_names)
        if isinstance(mapped, PieceOf):
            pieces[mapped.name][mapped.number] = mapped, tensor
        elif isinstance(mapped, str):
            forms[mapped] = tensor
        else:
            for number, each in enumerate(mapped):
                forms[each] = piece(tensor, PieceOf(name, number, len(mapped)))
    for name, found in pieces.items():
        count, dim = next((of.count, of.dim) for of, _ in found.values())
        if found.keys() != set(range(count)):
            raise CheckpointError(
                f"the model lacks some of the {count} pieces of {name!r}", tensor=name
            )
        forms[name] = joined([found[number][1] for number in range(count)], dim)
    return forms


def _converted_back(module: nn.Module, own: Mapping[str, SavedTensor]) -> Mapping[str, SavedTensor]:
    """The model's tensors in published form: renamed, split and joined as transformers does."""
    mapping = conversion_mapping(module)
    if mapping is None:
        return own
    steps = getattr(module, "_weight_conversions", None)
    if steps is None:
        steps = mapping.get_model_conversion_mapping(module, add_legacy=False)
        steps = [each for each in steps if type(each).__name__ != "PrefixChange"]
    back = [each.reverse_transform() for each in reversed(steps)]
    renamings = [each for each in back if not hasattr(each, "operations")]
    converters = [each for each in back if hasattr(each, "operations")]
    forms = _Forms()
    apply = partial(with_first_match, converters=converters)
    for name, tensor in converted(own, converters, apply):
        forms[with_renamings(name, renamings)] = tensor
    return forms


def _texts(module: nn.Module, dtype: torch.dtype | None) -> dict[str, str]:
    config: Any = copy.deepcopy(getattr(module, "config", None))
    if not hasattr(config, "to_json_string"):
        return {}
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    kind = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    setattr(config, kind, str(dtype or next(floats, torch.float32)).removeprefix("torch."))
    texts = {_CONFIG: config.to_json_string()}
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        texts[_GENERATION] = generation.to_json_string()
    return texts


# -- writing ---------------------------------------------------------------------------------


class _Folder:
    def __init__(
        self, storage: LocalStorage, published: Mapping[str, SavedTensor], file_bytes: int
    ) -> None:
        self.storage = storage
        self._tensors = [replace(each, name=name) for name, each in published.items()]
        self._file_bytes = file_bytes
        self.plans: list[PlannedFile] = []

    def plan(self, mark: str) -> None:
        """Plan the files. If there are several, ``mark`` is in their names, unless it is empty."""
        self.plans = plan_published(self._tensors, self._file_bytes, mark)

    def path_of(self, name: str) -> str:
        """The temporary path of a file, until all files are complete."""
        return str(self.storage.folder / f"{name}{UNFINISHED}")

    def begin(self, mark: str) -> str:
        """On the first rank: make full files with headers; the mark in their names, if needed."""
        self.plan("")
        if len(self.plans) > 1 and {plan.name for plan in self.plans} & set(self.storage.names()):
            self.plan(mark)
        else:
            mark = ""
        self.remove_unfinished()
        for plan in self.plans:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = files.calls.open(self.path_of(plan.name), flags, 0o666)
            try:
                os.ftruncate(fd, plan.nbytes)
                _write_at(fd, memoryview(plan.header), 0)
            finally:
                files.calls.close(fd)
        return mark

    def commit(self, texts: Mapping[str, str]) -> None:
        """Give files their final names, write ``texts``, and remove the files that are replaced."""
        storage = self.storage
        several = len(self.plans) > 1
        if several:  # no index names them yet
            self._give_names()
        for name, text in texts.items():
            _write_text(storage, name, text)
        if several:
            _write_text(storage, HF_INDEX, index_json(self.plans))
        else:
            self._give_names()
        storage.sync()
        # A single file has precedence over an index, in transformers, too.
        storage.remove(HF_FILE if several else HF_INDEX)
        kept = {plan.name for plan in self.plans}
        for name in storage.names():
            if is_shard(name) and name not in kept:
                storage.remove(name)
        storage.sync()

    def _give_names(self) -> None:
        for plan in self.plans:
            files.calls.rename(self.path_of(plan.name), self.storage.folder / plan.name)

    def remove_unfinished(self) -> None:
        ours = (HF_FILE, HF_INDEX, _CONFIG, _GENERATION)
        for name in self.storage.names():
            finished = name.removesuffix(UNFINISHED)
            if finished != name and (is_shard(name) or finished in ours):
                self.storage.remove(name)


def _write_text(storage: LocalStorage, name: str, text: str) -> None:
    with storage.create(name) as file:
        file.write(text.encode())
        file.finish()


def _write_all(
    folder: _Folder, save: Save, published: Mapping[str, SavedTensor], texts: Mapping[str, str]
) -> None:
    """Write this rank's part; after all ranks, the first rank gives the files their names."""
    ranks = save.ranks
    mark = os.urandom(4).hex()
    try:
        begun = ranks.gather(lambda: folder.begin(mark) if ranks.is_first else "")
        folder.plan(begun[0])
        with ranks.progress(f"saving {folder.storage.location}", save.nbytes) as told:
            ranks.gather(lambda: _write(folder, save, published, told))
        ranks.gather(lambda: folder.commit(texts) if ranks.is_first else None)
    except CheckpointError:
        if ranks.is_first:
            folder.remove_unfinished()
        raise


@dataclass(frozen=True)
class _Use:
    """A region of a model's tensor, and the place in a published tensor where it goes."""

    region: Box
    box: Box
    target: str


def _write(
    folder: _Folder, save: Save, published: Mapping[str, SavedTensor], progress: Progress
) -> None:
    """Write this rank's share of the elements into the files. Local."""
    tensors = {each.name: each for each in save.merged.tensors}
    uses: dict[str, list[_Use]] = defaultdict(list)
    for name, each in published.items():
        for part in each.parts:
            uses[part.file].append(_Use(_region(part, tensors[part.file]), part.box, name))
    places = {name: (plan.name, at) for plan in folder.plans for name, at in plan.offsets.items()}
    opened: dict[str, int] = {}
    try:
        for placed in (box for plan in save.files for box in plan.boxes):
            elements = partial(_elements, save, placed)
            for use in uses[save.merged.tensors[placed.tensor].name]:
                name, offset = places[use.target]
                if name not in opened:
                    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                    opened[name] = files.calls.open(folder.path_of(name), flags)
                target = published[use.target]
                whole = Part(whole_box(target.shape), name, offset, target.nbytes)
                shared = placed.box.intersection(use.region)
                if shared is not None:
                    _write_region(opened[name], whole, use, shared, elements, DTYPES[target.dtype])
            progress(placed.nbytes)
        for fd in opened.values():
            files.calls.fsync(fd)
    finally:
        for fd in opened.values():
            files.calls.close(fd)


def _elements(save: Save, placed: PlacedBox, box: Box) -> Tensor:
    leaf = save.leaves[save.merged.sources[placed.tensor][0]]
    return local_view(leaf, box, save.ranks.here)


def _write_region(
    fd: int,
    whole: Part,
    use: _Use,
    region: Box,
    elements: Callable[[Box], Tensor],
    dtype: torch.dtype,
) -> None:
    dims = len(whole.box.sizes)
    for block in cut_box(region, dtype.itemsize, _PIECE_BYTES):
        tensor = elements(block).to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
        memory = byte_view(tensor)
        inner = block.relative_to(use.region)
        start = zip(_last(inner.offsets, dims, 0), use.box.offsets, strict=True)
        target = Box(tuple(a + b for a, b in start), _last(block.sizes, dims, 1))
        for run in runs(whole, target, target, dtype.itemsize):
            _write_at(fd, memory[: run.nbytes], run.offset)
            memory = memory[run.nbytes :]


def _write_at(fd: int, memory: memoryview, offset: int) -> None:
    while memory.nbytes:
        done = files.calls.pwrite(fd, memory, offset)
        memory, offset = memory[done:], offset + done


def _region(part: Part, tensor: TensorToSave) -> Box:
    """The box of a model's tensor that a part from :func:`_whole` stands for."""
    at, offsets = part.offset // tensor.itemsize, list[int]()
    for size in reversed(tensor.shape):
        offsets.insert(0, at % size if size else 0)
        at //= size or 1
    return Box(tuple(offsets), _last(part.box.sizes, len(tensor.shape), 1))


def _last(values: Sequence[int], count: int, fill: int) -> tuple[int, ...]:
    """The last ``count`` values; if there are fewer, with ``fill`` before them."""
    return ((fill,) * count + tuple(values))[len(values) :]
