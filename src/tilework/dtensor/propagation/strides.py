"""Strides of results: the strides that torch would give for full tensors with the inputs' strides.

Views run on meta tensors, which costs microseconds. The same goes for operators whose results are
not contiguous although the inputs are. This module computes the strides of elementwise operators,
since torch's own code for meta tensors takes a second to import. Other operators give contiguous
tensors, or tensors in the memory format of images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.dtensor_call import tensors_in
from tilework.dtensor.spec import DTensorSpec, Ints, row_major
from tilework.tiled import OpEntry


def result_strides(entry: OpEntry, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The strides of each result (None: contiguous), or torch's RuntimeError. Local."""
    rule: _Rule | None
    rule = _view_strides if entry.is_view else _EVEN_OF_CONTIGUOUS.get(entry.name)
    if rule is not None:
        return rule(entry.name, call, outputs)
    memory_format = call.kwargs.get("memory_format", torch.preserve_format)
    if memory_format is not torch.preserve_format:
        first = call.tensors[0]
        return [like_strides(tuple(first.shape), input_strides([first])[0], memory_format)]
    if _are_contiguous(call.tensors):
        return None
    rule = _OF_OTHERS.get(entry.name, _elementwise if entry.is_elementwise else _as_images)
    return rule(entry.name, call, outputs)


def composed_strides(
    entry: OpEntry, call: Any, results: Sequence[DTensorSpec]
) -> list[Ints] | None:
    """The strides of composed results (None: as they are), or torch's RuntimeError."""
    if entry.may_be_input:
        return None
    asked = entry.is_view or entry.name in _EVEN_OF_CONTIGUOUS
    if not asked and _are_contiguous(call.tensors):
        return None
    try:
        found = result_strides(entry, call, results)
    except RuntimeError:
        if _EVEN_OF_CONTIGUOUS.get(entry.name) is _view_strides:
            raise
        return None
    return found if found is not None or asked else [row_major(spec.shape) for spec in results]


def input_strides(tensors: Sequence[Tensor]) -> list[Ints]:
    """The strides of each full tensor: global strides of a DTensor, or a plain tensor's strides."""
    return [
        spec.strides if isinstance(spec, DTensorSpec) else strides_of(tensor)
        for tensor in tensors
        for spec in [getattr(tensor, "_spec", None)]  # torch's DTensors have another class of spec
    ]


def strides_of(tensor: Tensor) -> Ints:
    """The strides of a plain tensor; contiguous strides for a tensor without strides."""
    if tensor.layout is torch.strided:
        return tuple(tensor.stride())
    return row_major(tuple(tensor.shape))


def without_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Meta tensors of the shapes, strides and dtypes of full tensors."""
    return [
        torch.empty_strided(tensor.shape, its, dtype=tensor.dtype, device="meta")
        for tensor, its in zip(tensors, input_strides(tensors), strict=True)
    ]


def called(call: Any, tensors: Sequence[Tensor], raises: bool = False) -> Any:
    """The call's result for meta tensors; None if it is unknown, or raises (unless ``raises``)."""
    try:
        return call.on_tensors(tensors)
    except NotImplementedError:  # it has to see elements
        return None
    except RuntimeError:
        if raises:
            raise
        return None
    except Exception:  # a wrong call raises when it runs
        return None


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def _are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """True if all full tensors have contiguous (row-major) strides."""
    return all(
        strides == row_major(tuple(tensor.shape))
        for strides, tensor in zip(input_strides(tensors), tensors, strict=True)
    )


def _memory_order(tensor: Tensor) -> list[int]:
    """The dims of a tensor, the innermost in memory first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (strides[dim], -dim))


def meta_strides(result: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The strides of meta results; None if the shapes are not the shapes of ``outputs``."""
    tensors = tensors_in(result)
    if [tuple(tensor.shape) for tensor in tensors] != [spec.shape for spec in outputs]:
        return None
    return [tuple(tensor.stride()) for tensor in tensors]


def elementwise_strides(shape: Ints, operands: Sequence[tuple[Ints, Ints]]) -> Ints:
    """The strides of an elementwise result: dims lie in memory in the order of the inputs."""
    full = [_aligned(shape, *operand) for operand in operands if len(operand[0]) <= len(shape)]
    same = [strides for (its, strides) in operands if its == shape]
    if len(same) == len(operands):
        if all(_is_row_major(shape, strides) for strides in same):
            return row_major(shape)
        if len(shape) == 4 and all(_fills(shape, its, _CHANNELS_LAST) for its in same):
            return _in_order(shape, _CHANNELS_LAST)
        if len(set(same)) == 1 and is_dense(shape, same[0]):
            return same[0]
    order = list(reversed(range(len(shape))))  # from the innermost dim
    for i in range(1, len(order)):
        at = i
        for before in range(i - 1, -1, -1):
            found = _compared(shape, full, order[before], order[at])
            if found > 0:
                order[at], order[before], at = order[before], order[at], before
            elif found < 0:
                break
    return _in_order(shape, order)


#: The dims of images, the innermost first.
_CHANNELS_LAST, _CHANNELS_LAST_3D = (1, 3, 2, 0), (1, 4, 3, 2, 0)


def _in_order(shape: Ints, order: Sequence[int]) -> Ints:
    """The strides of dims that lie in memory in ``order``, the innermost first."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _fills(shape: Ints, strides: Ints, order: Sequence[int]) -> bool:
    """True if dims lie in ``order``, innermost first, without gaps; size 1 has any stride."""
    expected = _in_order(shape, order)
    return all(a == b or n == 1 for a, b, n in zip(strides, expected, shape, strict=True))


def _aligned(shape: Ints, own: Ints, strides: Ints) -> Ints:
    """An input's strides, aligned to the dims of the result: 0 where the input is broadcast."""
    more = len(shape) - len(own)
    return (0,) * more + tuple(
        0 if size == 1 and shape[more + dim] != 1 else stride
        for dim, (size, stride) in enumerate(zip(own, strides, strict=True))
    )


def _compared(shape: Ints, operands: Sequence[Ints], a: int, b: int) -> int:
    """1 if dim ``a`` must lie outside of dim ``b``, -1 if inside, 0 if no input decides."""
    for strides in operands:
        if not strides[a] or not strides[b] or strides[a] == strides[b]:
            if strides[a] and strides[a] == strides[b] and shape[a] > shape[b]:
                return 1
            continue
        return 1 if strides[a] > strides[b] else -1
    return 0


def is_dense(shape: Ints, strides: Ints) -> bool:
    """True if the elements fill the memory without gaps, each at a different place."""
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return 0 not in shape


def is_expanded(shape: Ints, strides: Ints) -> bool:
    """True if elements along a dim share a place in memory."""
    return any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True))


def like_strides(
    shape: Ints, strides: Ints, memory_format: torch.memory_format = torch.preserve_format
) -> Ints:
    """The strides of a new tensor like a tensor of these strides: the same if they are dense."""
    if memory_format is torch.preserve_format and is_dense(shape, strides):
        return strides
    # On meta, empty_like gives dims of one element other strides than on the CPU.
    shown = torch.empty_strided(shape, strides, device="meta")
    return tuple(shown.clone(memory_format=memory_format).stride())


def _is_row_major(shape: Ints, strides: Ints) -> bool:
    return 0 in shape or _fills(shape, strides, range(len(shape))[::-1])


def _image_order(shape: Ints, strides: Ints) -> Ints | None:
    """The order of dims, innermost first, of clear channels-last strides; else None."""
    order = {4: _CHANNELS_LAST, 5: _CHANNELS_LAST_3D}.get(len(shape))
    if order is None or 0 in shape or not strides[1]:
        return None
    least = 0
    for dim in order:
        if strides[dim] < least or (dim == 0 and least == strides[1]):
            return None
        least = strides[dim] * (shape[dim] if shape[dim] > 1 else 1)
    return order


# -- the rules of operators: their name, the call, and the layouts of results ------------------

_Rule = Callable[[str, Any, Sequence[DTensorSpec]], list[Ints] | None]


def _view_strides(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The strides of torch's result for meta tensors; raises if torch has no such view."""
    return meta_strides(called(call, without_memory(call.tensors), raises=True), outputs)


def _asked(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The strides of torch's result for meta tensors."""
    return meta_strides(called(call, without_memory(call.tensors)), outputs)


def _with_columns(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The strides of a decomposition, with matrices in column order (torch's meta: rows)."""
    if not call.kwargs.get("compute_uv", call.args[2:3] != (False,)):
        return _asked(name, call, outputs)
    return [
        _in_order(spec.shape, (spec.ndim - 2, spec.ndim - 1, *reversed(range(spec.ndim - 2))))
        if at in _OF_COLUMNS[name]
        else row_major(spec.shape)
        for at, spec in enumerate(outputs)
    ]


def _grouped_mm(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints]:
    """The strides of a result whose rows begin at multiples of 16 bytes."""
    shape, least = outputs[0].shape, 16 // call.tensors[0].itemsize
    return [row_major((*shape[:-1], -(-shape[-1] // least) * least))]


def _real_fft(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints]:
    """The strides of a real Fourier transform on the CPU: the last transformed dim is innermost."""
    out = outputs[0]
    (input,) = call.tensors
    dims = _transformed_dims(name, call, out.ndim)
    (full,) = without_memory([input])
    if name.startswith("fft_rfft"):
        before = _memory_order(full)
        steps = [
            dims[-1:],
            [d for d in before if d in dims[:-1]],
            [d for d in before if d not in dims],
        ]
        return [_in_order(out.shape, [d for step in steps for d in step])]
    if 0 in full.shape:  # padding may add elements, but torch transforms no empty tensor
        sizes = [max(size, 1) for size in full.shape]
        full = torch.empty_strided(sizes, full.stride(), device="meta")
    full = full.to(torch.complex64) if not full.is_complex() else full
    before = _memory_order(torch.fft.ifftn(full, dim=dims[:-1]) if dims[:-1] else full)
    return [_in_order(out.shape, [dims[-1], *(d for d in before if d != dims[-1])])]


def _transformed_dims(name: str, call: Any, ndim: int) -> list[int]:
    """The dims that a Fourier transform transforms, in order."""
    given = dict(zip(("input", "s", "dim", "norm"), call.args, strict=False)) | call.kwargs
    size, dim = given.get("s", given.get("n")), given.get("dim", (-2, -1) if "2" in name else None)
    if dim is None and name[-1] not in "2n":
        dim = -1
    if dim is None:
        dim = range(-(ndim if size is None else len(size)), 0)
    return [d % ndim for d in ((dim,) if isinstance(dim, int) else dim)]


def _contiguous(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> None:
    """None, for contiguous results, although the operator is elementwise or takes images."""


def _angle(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """None (contiguous) for complex numbers, unlike torch's meta result; else as elementwise."""
    return None if call.tensors[0].is_complex() else _elementwise(name, call, outputs)


def _padded(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The strides of ``pad``: of torch's meta result for a constant, else as for images."""
    given = dict(zip(("input", "pad", "mode"), call.args, strict=False)) | call.kwargs
    is_constant = given.get("mode", "constant") == "constant"
    return (_asked if is_constant else _as_images)(name, call, outputs)


def _of_copied_memory(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints]:
    """The strides of a copy of the first tensor, gaps included; dense if expanded."""
    shape, (strides, *_) = tuple(call.tensors[0].shape), input_strides(call.tensors)
    return [like_strides(shape, strides) if is_expanded(shape, strides) else strides]


def _like_first(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints]:
    """The strides of results whose dims lie in memory in the order of the first tensor's dims."""
    first = call.tensors[0]
    return [_like(first, input_strides([first])[0], out) for out in outputs]


def _like(tensor: Tensor, strides: Ints, out: DTensorSpec) -> Ints:
    if tuple(tensor.shape) != out.shape:
        return elementwise_strides(out.shape, [(tuple(tensor.shape), strides)])
    return like_strides(out.shape, strides)


def _elementwise(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints]:
    """The strides of an elementwise operator's results: dims lie in memory in the inputs' order."""
    operands = [
        (tuple(tensor.shape), strides)
        for tensor, strides in zip(call.tensors, input_strides(call.tensors), strict=True)
    ]
    if name in _WITH_NUMBERS and any(isinstance(x, (int, float)) for x in call.args):
        operands.append(((), ()))
    if name in _REVERSED:
        operands.reverse()
    return [elementwise_strides(out.shape, operands) for out in outputs]


def _attention(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The strides of attention's result: the queries' if torch has a kernel; else None."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    query, key, value = tensors = [given[name] for name in names[:3]]
    mask, strides = given.get("attn_mask"), input_strides(tensors)
    has_kernel = (
        query.device.type == "cpu"
        and not given.get("dropout_p")
        and (mask is None or mask.dim() in (2, 4))
        and all(each.dim() == 4 and each.numel() for each in tensors)
        and len({(each.shape[0], each.shape[3]) for each in tensors}) == 1
        and (given.get("enable_gqa") or query.shape[1] == key.shape[1] == value.shape[1])
        and all(each[3] == 1 for each in strides)
    )
    return [_like(query, strides[0], outputs[0])] if has_kernel else None


def _as_images(name: str, call: Any, outputs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """Channels-last strides if the first input (for joins, every input) has them; else None."""
    shapes, strides = [tuple(tensor.shape) for tensor in call.tensors], input_strides(call.tensors)
    count = len(shapes) if name in _JOINED else 1
    order = _image_order(shapes[0], strides[0])
    if order is None or any(
        _image_order(*each) != order for each in zip(shapes[1:count], strides[1:count], strict=True)
    ):
        return None
    return [
        _in_order(spec.shape, order) if spec.ndim == len(order) else spec.strides
        for spec in outputs
    ]


#: The results that are matrices in column order.
_OF_COLUMNS = {"geqrf": (0,), "linalg_eig": (1,), "linalg_svd": (0, 2), "svd": (0,)}
_JOINED = frozenset({"cat", "concat", "concatenate"})
#: Operators that torch computes with the inputs in reverse order.
_REVERSED = frozenset({"__rmod__", "__rpow__", "__rsub__", "rsub"})
#: Operators that treat a number as a tensor without dims.
_WITH_NUMBERS = frozenset({
    *("add", "bitwise_and", "bitwise_or", "bitwise_xor", "div", "eq", "floor_divide", "fmod"),
    *("ge", "gt", "le", "lt", "mul", "ne", "remainder", "rsub", "sub", "where"),
})  # fmt: skip


def _table(rules: dict[_Rule, str], *modules: str) -> dict[str, _Rule]:
    """Rules by the names of operators, each with a module's prefix."""
    return {
        f"{module}{name}": rule
        for rule, names in rules.items()
        for name in names.split()
        for module in modules
    }


#: The rules of operators whose results may not be contiguous even if the inputs are.
_EVEN_OF_CONTIGUOUS: dict[str, _Rule] = {
    **_table(
        {
            _asked: """
                argwhere broadcast_tensors cholesky cholesky_ex cholesky_inverse cholesky_solve
                clone diagonal_copy diff eig eigh einsum expand fft fft2 fftn gru hfft hfft2
                hfftn householder_product ifft ifft2 ifftn ihfft ihfft2 ihfftn inner inv inv_ex
                inverse ldl_factor ldl_factor_ex ldl_solve lstm lstsq lu lu_factor lu_factor_ex
                lu_solve matrix_power meshgrid nanquantile nonzero ormqr permute_copy qr quantile
                rfft rnn_relu rnn_tanh rot90 solve solve_ex solve_triangular stft sum_to_size svd
                t_copy tensorinv transpose_copy triangular_solve unfold_copy unravel_index
                unsafe_chunk unsafe_split unsafe_split_with_sizes
            """
        },
        *("", "fft_", "linalg_"),
    ),
    **_table(
        {
            _view_strides: "kron",  # a view of what it computes
            _with_columns: "geqrf linalg_eig linalg_svd svd",
            _grouped_mm: "_grouped_mm",
            _real_fft: """
                fft_rfft2 fft_rfftn fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn
            """,
        },
        "",
    ),
}
#: The rules for inputs that are not contiguous. Other operators are elementwise, or take images.
_OF_OTHERS = _table(
    {
        _contiguous: """
            cdist grid_sample grid_sampler_2d grid_sampler_3d instance_norm log_sigmoid masked_fill
            matmul tril triu
        """,
        _angle: "angle",
        _asked: """
            __getitem__ adaptive_avg_pool1d adaptive_avg_pool3d adaptive_max_pool1d
            adaptive_max_pool1d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices
            argmax argmin avg_pool1d avg_pool3d binary_cross_entropy_with_logits conj_physical
            conv3d conv_transpose3d glu hinge_embedding_loss interpolate kl_div
            local_response_norm lu_unpack margin_ranking_loss max max_pool1d
            max_pool1d_with_indices max_pool3d max_pool3d_with_indices median min mvlgamma
            nanmedian stack
        """,
        _padded: "constant_pad_nd pad",
        _attention: "scaled_dot_product_attention",
        _of_copied_memory: "diagonal_scatter select_scatter slice_scatter",
        _like_first: """
            _unsafe_masked_index_put_accumulate addr alpha_dropout argsort binary_cross_entropy
            dropout feature_alpha_dropout feature_dropout flip fliplr flipud huber_loss index_fill
            index_put msort native_dropout_backward normalize poisson_nll_loss
            polygamma prelu put sort threshold to_dense type type_as
        """,
        _elementwise: "l1_loss mse_loss smooth_l1_loss soft_margin_loss",
    },
    "",
)
