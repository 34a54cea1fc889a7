"""Embeddings: tables sharded along features, or along rows with a masked look-up.

Gradients are dense: ``sparse=True`` changes no value, and is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilework.tiled.factors import Factor, factors_of
from tilework.tiled.op_rules import Arg, Decomposition, LocalRanges, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.rules.empty_shards import keep_inputs_in_graph, zero_addend


class LocalIndexRange:
    """The local range of a factor, for look-ups by global index, which are ``checked``."""

    def __init__(self, ranges: LocalRanges, factor: Factor, checked: bool = True) -> None:
        self.checked = checked or not factor.size
        self.start, self.count = ranges.local_range(factor)
        self.total = factor.size
        self.is_full = not ranges.is_sharded(factor)

    def local_index(self, index: int | None) -> int | None:
        here = index is not None and self.start <= index < self.start + self.count
        return index - self.start if here and index is not None else None

    def localize(self, indices: Tensor, ignored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Local indices (0 for those that are not local), and the mask of local indices."""
        outside = (indices < 0) | (indices >= self.total)
        if ignored is not None:
            outside &= ~ignored
        if self.checked and outside.any():
            raise IndexError(
                f"index out of range: {int(indices[outside][0])} is not in [0, {self.total})"
            )
        places = indices - self.start
        here = (places >= 0) & (places < self.count)
        if ignored is not None:
            here &= ~ignored
        return places.where(here, 0), here


@rule(torch.embedding)
def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> RuleResult:
    if weight.ndim != 2:
        return None
    # The frequency of a row counts over all indices.
    rows = Factor(weight.shape[0], "rows", unshardable=scale_grad_by_freq)
    features = Factor(weight.shape[1], "features")
    places = [Factor(size, unshardable=scale_grad_by_freq) for size in indices.shape]

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        local_rows = LocalIndexRange(ranges, rows)
        padding = local_rows.local_index(padding_idx)
        padding = -1 if padding is None else padding

        def look_up(*tensors: Tensor) -> Tensor:
            table, wanted = tensors[weight.number], tensors[indices.number]
            if local_rows.is_full:
                return torch.embedding(table, wanted, padding, scale_grad_by_freq)
            numbers, here = local_rows.localize(wanted)
            if local_rows.count == 0:
                zeros = table.new_full((*wanted.shape, table.shape[1]), zero_addend(table.dtype))
                return keep_inputs_in_graph(zeros, table)
            rows_found = torch.embedding(table, numbers, padding)
            return rows_found.masked_fill(~here.unsqueeze(-1), zero_addend(table.dtype))

        return look_up

    return local_call(
        {weight: [rows, features], indices: places},
        [[*places, features]],
        linear=[[weight]],
        run=run,
    )


@rule("embedding_renorm")
def _embedding_renorm(weight: Any, indices: Any, max_norm: float, norm_type: float) -> RuleResult:
    rows = Factor(weight.shape[0], "rows")
    dims = [rows, Factor(weight.shape[1], unshardable=True)]

    def run(ranges: LocalRanges) -> Callable[..., Tensor]:
        local_rows = LocalIndexRange(ranges, rows)

        def renorm(*tensors: Tensor) -> Tensor:
            table = tensors[weight.number].detach().clone()
            numbers, here = local_rows.localize(tensors[indices.number])
            return torch.embedding_renorm_(table, numbers[here], max_norm, norm_type)

        return renorm

    places = [Factor(size, unshardable=True) for size in indices.shape]
    return local_call({weight: dims, indices: places}, [dims], run=run)


# -- bags ------------------------------------------------------------------------------------


@rule(F.embedding_bag)
def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> RuleResult:
    if max_norm is not None:
        return Decomposition(_renormed_bag)
    known = mode in ("sum", "mean", "max") and (per_sample_weights is None or mode == "sum")
    flat = input.ndim == 1
    if not known or weight.ndim != 2 or input.ndim not in (1, 2) or flat != (offsets is not None):
        return None
    # Maxima of shards could be combined, but a bag may have no row in a shard.
    rows = Factor(weight.shape[0], "rows", unshardable=scale_grad_by_freq or mode == "max")
    features = Factor(weight.shape[1], "features")
    lead = None if flat else Factor(input.shape[0], "bags", unshardable=scale_grad_by_freq)
    places = [lead, Factor(input.shape[-1], unshardable=True)][flat:]
    bags = offsets.shape[0] - include_last_offset if flat else input.shape[0]
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]

    tensors = input, weight, offsets, per_sample_weights
    bag = _Bag(tensors, bags, mode, scale_grad_by_freq, include_last_offset, padding_idx)
    dims: Sequence[Any] = places, [rows, features], [None], places
    return local_call(
        {arg: of_arg for arg, of_arg in zip(tensors, dims, strict=True) if arg is not None},
        [[lead, features]],
        linear=[] if mode == "max" else [[weight]],
        run=lambda ranges: partial(bag.look_up, LocalIndexRange(ranges, rows)),
        shapes=[(bags, weight.shape[1])],
    )


@dataclass(frozen=True, eq=False)
class _Bag:
    tensors: tuple[Arg, Arg, Arg | None, Arg | None]
    bags: int
    mode: str
    scale_grad_by_freq: bool
    include_last_offset: bool
    padding_idx: int | None

    def look_up(self, rows: LocalIndexRange, *local: Tensor) -> Tensor:
        """The bags from the local rows of the table: partial sums if the rows are sharded."""
        indices, table, starts, factors = (
            None if arg is None else local[arg.number] for arg in self.tensors
        )
        assert indices is not None
        assert table is not None
        if table.numel() == 0 or indices.numel() == 0:
            rows.localize(indices)
            bags = self.bags if starts is not None else indices.shape[0]
            empty = table.new_zeros(bags, table.shape[1])
            return keep_inputs_in_graph(empty, table, factors)
        if rows.is_full:
            return F.embedding_bag(
                *(indices, table, starts, None, 2.0, self.scale_grad_by_freq, self.mode, False),
                *(factors, self.include_last_offset, self.padding_idx),
            )
        numbers, here = rows.localize(indices)
        if self.padding_idx is not None:
            here = here & (indices != self.padding_idx)
        # Rows of other ranks count 0, this rank's 1 or the weight of the sample.
        factors = here.to(table.dtype) if factors is None else factors.masked_fill(~here, 0)
        if self.mode == "mean":
            factors = factors / self._sizes(indices, starts)
        return F.embedding_bag(
            *(numbers, table, starts),
            mode="sum",
            per_sample_weights=factors,
            include_last_offset=self.include_last_offset,
        )

    def _sizes(self, indices: Tensor, starts: Tensor | None) -> Tensor:
        padding = self.padding_idx
        return _counts(torch.ones_like(indices) if padding is None else indices != padding, starts)


def _counts(counted: Tensor, starts: Tensor | None) -> Tensor:
    """For each index the number of indices that count in the same bag; at least 1."""
    if starts is None:
        return counted.sum(1, keepdim=True).clamp(min=1)
    places = torch.arange(len(counted), device=counted.device)
    bag = torch.searchsorted(starts, places, right=True) - 1
    sums = torch.zeros(len(starts), dtype=torch.int64, device=counted.device)
    return sums.index_add(0, bag, counted.to(torch.int64)).clamp(min=1)[bag]


def _renormed_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float = math.inf,
    norm_type: float = 2.0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    with torch.no_grad():
        torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
    return F.embedding_bag(input, weight, offsets, None, norm_type, *args, **kwargs)


# -- classes ---------------------------------------------------------------------------------


@rule("one_hot")
def _one_hot(tensor: Any, num_classes: int = -1) -> RuleResult:
    if num_classes < 0:
        return Decomposition(_one_hot_of_all)
    factors = factors_of(tensor.shape)
    shape = (*tensor.shape, num_classes)
    return local_call({tensor: factors}, [[*factors, None]], shapes=[shape])


def _one_hot_of_all(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if tensor.numel() == 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    return F.one_hot(tensor, int(tensor.max().item()) + 1)
