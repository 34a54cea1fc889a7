"""Statements of random programs that are habits of users, as templates.

A template's fields are chosen when a statement is made of it; those that torch refuses are tried
and left out, as all statements are.

====== ====================================================================
field  what stands there
====== ====================================================================
x      a tensor of numbers; y: one of its shape; z: any; part: it or a view
o      a tensor that shares no memory with x;  w: nor with y
t      a class for each row of x;  twice: like c, of which no Function is a part
leaf   a tensor whose gradient is compared
c      a tensor that requires a gradient; r: another;  h: one that shows
       nothing that was written;  fixed: one that does not
d, e   dims of x;  k: 1 to the size of dim d;  at: an index in it
n      -2 to 3;  f: a number;  s: a seed;  new: the name of the result
i      indices along d, in the shape of x;  u: none of them twice
rows   indices of rows of x, maybe twice;  q: some dims' sizes of x
p      placements for x;  ip: for what indices are in
====== ====================================================================
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.fuzz.statements import Chooser

#: Families of statements that make a tensor.
READS: Mapping[str, Sequence[str]] = {
    "index": (
        "{x}.gather({d}, torch.tensor({i}))", "{x}.gather({d}, index({i}, {ip!r}))",
        "torch.take_along_dim({x}, torch.tensor({i}), {d})", "{x}.take(torch.tensor({rows}))",
        "{x}.scatter({d}, torch.tensor({u}), {y})", "{x}.scatter({d}, torch.tensor({u}), {f})",
        "{x}.scatter_add({d}, torch.tensor({i}), {y})",
        "{x}.scatter_add({d}, index({i}, {ip!r}), {y})",
        "{x}.index_add(0, torch.tensor({rows}), {x}[{rows}])",
        "{x}.index_put((torch.tensor({rows}),), {x}[{rows}], accumulate=True)",
        "{x}.index_fill({d}, torch.tensor([{at}]), {f})", "{x}.masked_fill({y} > 0.3, {f})",
        "{x}.index_copy(0, torch.tensor([0]), {x}[:1])", "{x}.masked_select({y} > 0.3)",
        "{x}[{rows}, ..., 0]", "{x}[:, {rows}]", "{x}[torch.tensor({rows}), torch.tensor({rows})]",
        "{x}[({y} > 0.3).nonzero(as_tuple=True)]", "{x}[..., None, {at}]", "{x}[{z} > 0.3]",
        "functional.embedding(torch.tensor({rows}), {x}, padding_idx=0)",
        "functional.embedding(index({rows}, {ip!r}), {x})",
        "functional.one_hot(torch.tensor({rows}).abs(), 9).double() @ {z}",
    ),
    "order": (
        "{x}.sort({d}, stable=True)[0]", "{x}.sort({d}, True)[0]", "{x}.topk({k}, {d})[0]",
        "{x}.sort({d}, stable=True)[1]", "{x}.max({d})[0]", "{x}.min({d})[0]", "{x}.cummax({d})[0]",
        "{x}.kthvalue({k}, {d})[0]", "{x}.msort()", "{x}.flatten().unique()", "{x}.aminmax()[1]",
        "{x}.argsort({d}, stable=True)", "torch.searchsorted({x}.sort()[0], {y})",
    ),
    "scan": (
        "{x}.cumsum({d})", "{x}.cumprod({d})", "{x}.logcumsumexp({d})", "{x}.diff(dim={d})",
        "torch.cumulative_trapezoid({x}, dim={d})", "{x}.flip(0).cumsum(0).flip(0)",
    ),
    "reduce": (
        "{x}.std({d})", "{x}.var()", "{x}.norm()", "{x}.norm(dim={d}, keepdim=True)",
        "{x}.sum({d}, True)",
        "{x}.logsumexp({d})", "{x}.mean(({d}, {e}))", "{x}.amin(({d}, {e}), True)",
        "torch.linalg.vector_norm({x}, 3)",
        "{x}.sum({d}, dtype=torch.float32)", "({x} > 0.3).sum({d})", "({x} > {y}).any({d})",
        "sum({x})",
        "torch.dist({x}, {y})", "{x}.nansum({d})", "{x}.count_nonzero({d})",
        "torch.var_mean({x}, {d})[0]",
        "{x}.all({d})", "{x}.argmax()", "{x}.trace()", "{x}.dot({y})", "{x}.quantile(0.5, {d})",
    ),
    "rearrange": (
        "{x}.flip({d})", "{x}.flip([{d}, {e}])", "{x}.roll({n}, {d})", "{x}.roll({n})",
        "{x}.rot90({n}, ({d}, {e}))",
        "functional.pad({x}, ({k}, 1))",
        "functional.pad({x}, (0, 1, {n}, 1), value={f})",
        "functional.pad({x}[None], (1, 1), mode='replicate')",
        "functional.pad({x}, ({n}, -1))",
        "functional.pad({x}[None], (1, 0), mode='circular')",
        "{x}.repeat(2, *[1] * {x}.dim())", "{x}.repeat_interleave(2, {d})", "{x}.tile(2)",
        "{x}.diag()",
        "{x}.repeat_interleave(torch.tensor({reps}), 0)", "{x}.unfold({d}, 2, 1).sum(-1)",
        "{x}.triu({n})",
        "torch.stack(list({x}))", "torch.cat([*{x}.split(1, {d}), {x}], {d})",
        "torch.hstack([{x}, {y}])",
        "torch.vstack([{x}, {y}])", "torch.cat([{x}.chunk(2, {d})[-1], {x}.chunk(2, {d})[0]], {d})",
        "torch.block_diag({x}, {y})", "torch.broadcast_tensors({x}, {z})[0]", "{x}.expand_as({z})",
        "torch.atleast_3d({x})", "torch.diag_embed({x})", "{x}.hsplit(2)[1]",
        "{x}.unbind({d})[0] * 2",
        "torch.meshgrid({x}.flatten(), {z}.flatten(), indexing='ij')[0]",
        "torch.cat([{x}, {x}.detach()], {d})",
        "{x}.adjoint()", "{x}.swapdims({d}, {e}).reshape(-1)",
        "torch.cat([{x}.new_zeros(0), {x}.flatten()])",
        "{x}.view_as({y})", "torch.moveaxis({x}, {d}, {e})", "{x}.ravel().view(-1, 1)",
        "{x}.narrow_copy({d}, 0, {k})",
    ),
    "product": (
        "torch.einsum('ij,kj->ik', {x}, {z})", "torch.einsum('i...->...', {x})",
        "torch.einsum('ij,ij->i', {x}, {y})",
        "torch.einsum('i,j->ij', {x}, {z})", "torch.einsum('...ij->...ji', {x})",
        "torch.einsum('bij,bkj->bik', {x}, {y})",
        "{x} @ {y}.mT", "torch.outer({x}.flatten(), {z}.flatten())",
        "torch.tensordot({x}, {y}, dims={nd})",
        "functional.linear({x}, {z})", "functional.linear({x}, {x}, {x}[..., 0])",
        "torch.addmm({x}, {x}, {y}.t())", "torch.baddbmm({x}, {x}, {y}.mT @ {x})",
        # Of copies in rows: it counts no writes to what it keeps, and torch's refuses some strides.
        "torch.kron({x}.contiguous().clone(), {y}.contiguous().clone())",
        "functional.scaled_dot_product_attention({x}[None], {y}[None], {x}[None])",
        "functional.scaled_dot_product_attention({x}, {y}, {x}, is_causal=True)",
        "functional.conv1d({x}[None], {x}[:, :, None], padding=1)",
        "torch.cdist({x}, {y})",
    ),
    "network": (
        "functional.softmax({x}, {d})", "functional.log_softmax({x}, {d})",
        "functional.gelu({x})", "functional.silu({x}) * {y}",
        "functional.glu({x}, {d})",
        "functional.dropout({x}, 0.5, training=False)",
        "functional.normalize({x}, dim={d})",
        "functional.cross_entropy({x}, {x}.argmax(1))",
        "functional.cross_entropy({x}, torch.tensor({t}), ignore_index=1)",
        "functional.cross_entropy({x}, torch.tensor({t}), label_smoothing=0.2, reduction='sum')",
        "functional.cross_entropy({x}, {y}.softmax(1), label_smoothing=0.1)",
        "functional.nll_loss({x}, torch.tensor({t}), reduction='none')",
        "functional.mse_loss({x}, {y})",
        "functional.smooth_l1_loss({x}, {y}, reduction='none')",
        "functional.binary_cross_entropy_with_logits({x}, {y}.sigmoid())",
        "functional.kl_div({x}.log_softmax(-1), {y}.softmax(-1), reduction='batchmean')",
        "functional.layer_norm({x}, {q}, {x}[0].expand({q}), {x}[-1].expand({q}))",
        "functional.rms_norm({x}, {q})", "functional.group_norm({x}, 1)",
        "functional.batch_norm({x}, None, None, training=True)",
        "functional.huber_loss({x}, {y})",
        "functional.cosine_similarity({x}, {y}, {d})",
        "functional.avg_pool1d({x}[None], 2)",
        "functional.max_pool1d({x}[None], 2)",
        "functional.interpolate({x}[None], scale_factor=2)",
        "functional.softplus({x})", "functional.leaky_relu({x}, 0.1)",
        "functional.elu({x})",
        "module({new!r}, {kind!r}, {x}, {s}, {mp!r})",
        "module({new!r}, {kind!r}, {x}, {s}, {mp!r})",
    ),
    "elementwise": (
        "torch.lerp({x}, {y}, 0.3)", "torch.addcmul({x}, {y}, {y}, value=0.5)",
        "{x}.clamp({y}, None)", "{x}.pow(2)",
        "{x} ** 2 / 3", "1 / ({x}.abs() + 1)", "2 - {x}", "{x} / ({y}.abs() + 1)", "{x}.atan2({y})",
        "-{x}", "abs({x})",
        "torch.where({x} > {y}, {x}, {y})", "torch.where({x} > 0.3)[0]", "{x}.abs().sqrt()",
        "{x}.exp().log1p()",
        "torch.hypot({x}, {y})", "{x}.fmod(1.5)", "{x}.sign() * {z}", "{x}.nan_to_num()",
        "torch.logaddexp({x}, {y})",
        "{x} * {z}.sum().item()", "{x} + float({z}.mean())", "{x} * len({z})", "{x}.heaviside({y})",
        "{x}.erf()",
        "torch.fft.rfft({x}, dim={d}).abs()", "torch.view_as_real(torch.complex({x}, {y}))",
        "torch.fft.fft({x}).real",
    ),
    "dtype": (
        "{x}.float()", "{x}.to(torch.float32)", "{x}.type_as({z})", "{x}.to({z})",
        "{x} + ({z} > 0.3)", "{x} > {y}",
        "{x}.float() * {z}", "({x} > 0.3).long()", "{x}.bool()", "{x} == {x}",
        "torch.result_type({x}, 1)",
    ),
    "make": (
        "torch.zeros_like({x})", "{x}.new_full((2, 3), {f})", "torch.ones_like({x}) * {y}",
        "{x}.new_tensor([1.5, 2.5])",
        "torch.empty_like({x}).copy_({y})", "torch.full_like({x}, {f}) + {x}",
        "{x}.new_zeros(3, 1) + {z}",
        "torch.zeros_like({x}, requires_grad=True) + {x}", "torch.arange({x}.shape[0]) * {z}",
        "torch.eye(4) @ {x}",
        "torch.as_tensor({x})", "torch.empty_like({x}).fill_({f}).add_({y})",
        "torch.zeros({x}.shape).add({x})",
    ),
    "copy": (
        "copied({leaf})", "pickled({leaf})", "pickled({x}.detach())", "copied({x}.detach())",
        "{x}.clone().requires_grad_()",
        "{x}.detach().requires_grad_()", "{x}.clone().detach()", "pickled({x}.detach()[{at}])",
        "{x}.data.clone()",
        "torch.nn.Parameter({x}.detach())", "torch.clone({x}.t())", "{x}.positive()",
        "{x}.contiguous()",
    ),
    "grad": (
        "gradient({twice}, {r}, create_graph=True)", "gradient({twice}, {r}, create_graph=True)",
        "gradient(gradient({twice}, {r}, create_graph=True) * 2, {r})",
        "gradient({twice} * {twice}, {leaf}, create_graph=True)", "own({x})", "own({x}) * {y}",
        "own({c})",
        "own(own({c}))",
        "recomputed(lambda a, b: (a * b).sin() + a, {c}, {y}, reentrant={flag})",
        "recomputed(lambda a: functional.silu(a @ a.mT), {c}, reentrant={flag})",
        "recomputed(lambda a: a[0] * 2, {c}, reentrant={flag})",
    ),
    # torch says of all results that they require a gradient if one tensor of a list does.
    "list": (
        "torch._foreach_add([{x}, {x}], {f})[0]", "torch._foreach_mul([{x}, {x}], [{y}, {y}])[1]",
        "torch._foreach_norm([{x}, {x}])[0]", "torch._foreach_sqrt([{x}.abs()])[0]",
        "torch._foreach_maximum([{x}], [{y}])[0]",
    ),
}  # fmt: skip

#: Families of statements that write.
WRITES: Mapping[str, Sequence[str]] = {
    "index": (
        "{part}.scatter_({d}, torch.tensor({u}), {f})",
        "{x}.scatter_add_({d}, torch.tensor({i}), {o})",
        "{x}.index_put_((torch.tensor({rows}),), {o}, accumulate=True)",
        "{x}.index_add_(0, torch.tensor({rows}), {o})",
        "{x}.index_fill_({d}, torch.tensor([{at}]), {f})", "{x}.masked_fill_({o} > 0.3, {f})",
        "{x}[{rows}] = {f}",
        "{x}[{rows}] += {f}", "{x}[{o} > 0.3] = {f}", "{x}[{x} > 0.3] *= 2.0", "{x}[..., 0] = {o}",
        "{x}[:, {rows}] = {f}",
        "{x}[{x} < 0] = 0", "{x}.index_copy_(0, torch.tensor([{at}]), {o})",
        "{x}[torch.tensor({rows}), 0] = {f}",
        "{x}.masked_scatter_({x} > 0.3, {o})",
        "{x}.put_(torch.tensor({rows}), {o}, accumulate=True)", "{x}[None, 0] = {o}",
        "{x}.fill_diagonal_({f})", "{x}[0], {x}[-1] = {x}[-1].clone(), {x}[0].clone()",
        "{x}[index({rows}, {ip!r})] = {f}",
    ),
    "pieces": (
        "for each in {x}.detach().chunk(2, {d}): each.mul_({f})",
        "for each in {x}.detach().split(1, {d}): each.add_({f})",
        "for each in {x}.data.unbind({d}): each.add_({f})",
        "with torch.no_grad(): {x}.chunk(2, {d})[-1].copy_({o})",
        "with torch.no_grad(): {x}.split(1, {d})[0].mul_({o})",
        "for each in {x}.detach(): each.sin_()",
        "with torch.no_grad(): {x}.unbind({d})[{at}].zero_()", "{x}.narrow({d}, 0, 1).mul_({f})",
        "{x}.select({d}, {at}).add_({o})",
        "{x}.diagonal().add_({f})", "{x}.t()[0].mul_({f})", "{x}.T.flatten().add_({f})",
        "{x}.view(-1)[0] = {f}",
        "{x}.reshape(-1)[-1:].mul_({f})", "{x}.unsqueeze(0).squeeze(0).add_({f})",
        "{x}.expand_as({x}).mul_({f})",
        "{x}.transpose({d}, {e}).tril_()", "{x}.unfold({d}, 1, 1)[..., 0].mul_({f})",
        "{x}[:].view_as({x}).sub_({o})",
        "torch._foreach_add_(list({x}.detach().unbind({d})), {f})",
        "{x}.movedim({d}, {e})[0].fill_({f})",
    ),
    "in place": (
        "{part}.lerp_({o}, 0.3)", "{part}.div_({o}.abs() + 1)", "{x}.pow_(2)",
        "{x}.clamp_min_(0.1)", "{x}.tanh_()", "{x}.exp_()",
        "{x}.cumsum_({d})", "{x}.addmm_({o}, {o})", "{x}.tril_({n})", "{x}.mul_({o}.float())",
        "{x}.add_({o} > 0.3)", "{x} /= 2",
        "{x}.copy_({o}.float())", "{x}.sub_({o}, alpha=0.5)", "{x}.addcdiv_({o}, {o}.abs() + 1)",
        "{x} **= 2", "{x} @= {o}",
        "{x}.copy_(moved({o}, {op!r}))", "{x}.masked_fill_({x}.isnan(), 0.0)",
        "functional.relu({x}, inplace=True)",
        "functional.dropout({x}, 0.5, training=False, inplace=True)",
        "{x}.renorm_(2, {d}, 1.0)", "{x}.sigmoid_()",
        "torch.nn.init.constant_({x}, {f})", "{x}.copy_({x}.flip(0))",
        "with torch.no_grad(): {fixed}.set_({o})", "{x}.logit_(0.1)", "{x}.xlogy_({o}.abs())",
    ),
    "data": (
        "{x}.data = {y} * 2", "{x}.data = {x}.data * 2", "{x}.data = {y}.data",
        "{leaf}.data = {o}.data", "{x}.data.mul_({f})", "{x}.data[0] = {f}",
        "{leaf}.data = {leaf}.data.t()", "with torch.no_grad(): {x}.copy_({o})",
        "{x}.data.copy_({o})", "{x}.data.view(-1)[0] += 1",
        "{leaf}.data = {leaf}.data.clone()", "{leaf}.data.sub_({leaf}.data, alpha=0.1)",
    ),
    "train": (
        "descend({c})", "descend({c})", "descend({c}, {c})", "{leaf}.grad = None",
        "{leaf}.grad.zero_()",
        "with torch.no_grad(): {leaf}.sub_({leaf}.grad, alpha=0.1)",
        "with torch.no_grad(): {leaf} -= 0.1 * {leaf}.grad",
        "{leaf}.grad.mul_(0.5)", "{leaf}.data.add_({leaf}.grad.data, alpha=-0.1)",
        "torch.optim.SGD([{leaf}], 0.1, momentum=0.9).step()",
        "torch.optim.AdamW([{leaf}], 0.1).step()", "torch.nn.utils.clip_grad_norm_([{leaf}], 0.5)",
        "{leaf}.grad = {leaf}.detach() * 2",
        "torch.nn.utils.clip_grad_value_([{leaf}], 0.5)", "{h}.retain_grad()",
        "{leaf}.requires_grad_(False)",
        "torch._foreach_mul_([{leaf}.grad], 0.5)", "{leaf}.grad.copy_({o})",
    ),
    "hook": (
        "{h}.register_hook(lambda grad: grad * 2)", "after({leaf}, {leaf!r})",
        "after({leaf}, {leaf!r})",
        "{leaf}.register_hook(lambda grad: grad.clamp(-1, 1))",
        "{h}.register_hook(lambda grad: None)",
    ),
    "out": (
        "torch.where({x} > 0.3, {x}, {y}, out={part})", "torch.sum({x}, {d}, out={w})",
        "torch.matmul({x}, {y}, out={w})",
        "torch.clamp({x}, -1, 1, out={part})", "torch.stack([{x}, {y}], out={w})",
        "torch.exp({x}, out={part})",
        "torch.cumsum({x}, {d}, out={w})", "torch.sub({x}, {y}, alpha=0.5, out={part})",
        "torch.index_select({x}, 0, torch.tensor({rows}), out={w})",
    ),
    "list": (
        "torch._foreach_lerp_([{x}], [{o}], 0.3)",
        "torch._foreach_addcmul_([{part}], [{o}], [{o}], value=0.5)",
        "torch._foreach_sub_([{x}], [{o}], alpha=0.5)", "torch._foreach_clamp_max_([{part}], 0.5)",
        "torch._foreach_neg_([{part}])",
        "torch._foreach_div_([{x}], [{o}.abs() + 1])", "torch._foreach_add_([{x}], {o})",
    ),
}  # fmt: skip

#: Kinds of modules; see language.py.
MODULES = ("linear", "norm", "tied", "mlp", "attention", "embedding", "buffers")


def read(c: Chooser) -> str:
    """A statement's right side, which makes a tensor."""
    return _filled(c, READS)


def write(c: Chooser) -> str:
    """A statement that writes."""
    return _filled(c, WRITES)


def _filled(c: Chooser, families: Mapping[str, Sequence[str]]) -> str:
    template = c.of(*families[c.of(*families)])
    return string.Formatter().vformat(template, (), _Fields(c))


class _Fields(dict[str, Any]):
    """Fields of a template, chosen when they are first asked for."""

    def __init__(self, c: Chooser) -> None:
        super().__init__()
        self.c = c

    def __missing__(self, name: str) -> Any:
        self[name] = value = _FIELDS[name](self.c, self)
        return value

    @property
    def shape(self) -> torch.Size:
        """The shape of x, or of what is written to."""
        return self.c.tensors[self["x"]].shape


def _part(c: Chooser, fields: _Fields) -> str:
    x = c.any() if "x" not in fields else fields["x"]
    fields["x"] = x
    form = c.of("", "", "[0]", "[-1:]", ".t()", ".data", ".detach()", "[..., 0]", ".view(-1)")
    return f"{x}{form}"


def _numbers(c: Chooser, fields: _Fields, twice: bool) -> Any:
    """Indices along dim d for each element of x."""
    dim, shape = fields["d"], fields.shape
    size = shape[dim]
    if not size:
        raise LookupError
    generator = torch.Generator().manual_seed(c.rng.randrange(1000))
    if twice:
        return torch.randint(size, shape, generator=generator).tolist()
    return torch.rand(shape, generator=generator).argsort(dim).tolist()


def _rows(c: Chooser, fields: _Fields) -> list[int]:
    size = fields.shape[0] if fields.shape else 0
    if not size:
        raise LookupError
    return [c.rng.randrange(size) for _ in range(c.rng.randint(1, 3))]


def _targets(c: Chooser, fields: _Fields) -> list[int]:
    if len(fields.shape) < 2 or not fields.shape[1]:
        raise LookupError
    return [row % fields.shape[1] for row in range(fields.shape[0])]


def _has_functions(tensor: Tensor) -> bool:
    """True if a user's own Function made it: a partial tensor has no second gradient there."""
    todo, seen = [tensor.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in ("OwnBackward", "CheckpointFunctionBackward"):
            return True
        todo.extend(following for following, _ in node.next_functions)
    return False


def _leaf(c: Chooser, fields: _Fields) -> str:
    return c.any(lambda t: t.is_leaf and t.requires_grad and not t._is_view())


def _apart(c: Chooser, fields: _Fields) -> str:
    read = {c.tensors[name].untyped_storage()._cdata for name in (fields["x"], fields["y"])}
    return c.any(lambda t: t.untyped_storage()._cdata not in read)


def _graded(c: Chooser, fields: _Fields) -> str:
    return c.any(lambda t: t.requires_grad)


_FIELDS: Mapping[str, Callable[[Any, _Fields], Any]] = {
    "x": lambda c, fields: c.any(),
    "y": lambda c, fields: c.like(fields["x"]),
    "z": lambda c, fields: c.any(),
    "o": lambda c, fields: c.other(fields["x"]),
    "part": _part,
    "leaf": _leaf,
    "c": _graded,
    "fixed": lambda c, fields: c.any(lambda t: not t.requires_grad),
    "r": lambda c, fields: c.any(lambda t: t.requires_grad and not (t._is_view() and t._version)),
    "h": lambda c, fields: c.any(lambda t: t.requires_grad and not (t._is_view() and t._version)),
    "w": _apart,
    "t": _targets,
    "twice": lambda c, fields: c.any(lambda t: t.requires_grad and not _has_functions(t)),
    "d": lambda c, fields: c.dim(fields["x"]),
    "e": lambda c, fields: c.dim(fields["x"]),
    "k": lambda c, fields: c.rng.randint(1, max(1, fields.shape[fields["d"]])),
    "at": lambda c, fields: c.at(fields["x"], fields["d"]),
    "n": lambda c, fields: c.rng.randint(-2, 3),
    "nd": lambda c, fields: len(fields.shape),
    "f": lambda c, fields: c.number(),
    "s": lambda c, fields: c.rng.randint(0, 99),
    "i": lambda c, fields: _numbers(c, fields, twice=True),
    "u": lambda c, fields: _numbers(c, fields, twice=False),
    "rows": _rows,
    "reps": lambda c, fields: [c.rng.randint(0, 2) for _ in range(fields.shape[0])],
    "q": lambda c, fields: tuple(fields.shape[-c.rng.randint(1, 2) :]),
    "p": lambda c, fields: c.placements(fields.shape),
    "op": lambda c, fields: c.placements(c.tensors[fields["o"]].shape),
    "ip": lambda c, fields: c.of("R", "S0", "S0") + " R" * (len(c.mesh) - 1),
    "mp": lambda c, fields: c.of("R", "S0", "S1") + c.of(" R", " S0", " S1") * (len(c.mesh) - 1),
    "kind": lambda c, fields: c.of(*MODULES),
    "flag": lambda c, fields: c.of(True, False),
    "new": lambda c, fields: c.new,
}
