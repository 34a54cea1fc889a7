"""``pipeline``: a model cut into stages, which train and predict as one model does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilework.comm.contract import ReduceOp
from tilework.comm.operations.internal import agree, all_reduce, broadcast
from tilework.comm.per_call.internal import unrecorded
from tilework.comm.world import current_world, get_rank
from tilework.mesh import DeviceMesh
from tilework.models import check_is_module
from tilework.parallel.clip_grad import GroupsOfRanks, PartOfParameters
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.data_parallel.leaves import local_tensors
from tilework.parallel.data_parallel.outputs import leaves_of_graph
from tilework.parallel.data_parallel.replicas import check_replicas
from tilework.parallel.passes import is_due
from tilework.parallel.pipelines.batches import (
    Weight,
    check_results,
    cut_batch,
    rows_of,
    weights_of,
)
from tilework.parallel.pipelines.captured import CapturedStages
from tilework.parallel.pipelines.run import Execution, Loss, Microbatch, RunOptions
from tilework.parallel.pipelines.schedule import Schedule
from tilework.parallel.pipelines.split import (
    HowToSplit,
    Split,
    measured,
    names_of_cuts,
    shallow,
    split_model,
    stage_of,
    tied_names,
)
from tilework.parallel.pipelines.stage import Route, StageModule, Twin, default_generator


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    split: HowToSplit = "even",
    schedule: Schedule,
    example: tuple[Any, ...] | Mapping[str, Any] | None = None,
    capture: Literal["python", "inductor"] | None = None,
) -> Stages:
    """Cut a model into stages, one or several on each rank of a mesh's axis.

    Collective over the mesh; blocks. The model is the same on all ranks, and may be on ``meta``.
    Each rank keeps the parameters of the own stages; drop the model to free the others. A stage
    runs the model's own forward, without the modules of other stages.

    Args:
        model: The model. Wrap the stages in ``fully_shard`` or DDP afterwards, not the model.
        mesh: A mesh of a single axis, such as ``mesh["pp"]``.
        split: The names of the modules before which the model is cut; "even": equally many items of
            the largest ModuleList or Sequential for each stage; "by time": the slowest stage is as
            fast as possible, measured with ``example``; or a plan by module name, as Hugging Face's
            ``model.base_model_pp_plan``.
        schedule: The order of actions; it has as many ranks as the mesh.
        example: The arguments of a forward, in a tuple or a dict, for models that call modules in
            another order than they are listed in, and for "by time", which else takes the model's
            ``dummy_inputs``.
        capture: Run the training of each stage as programs, by this backend of
            :func:`~tilework.capture.capture`. Schedules that cut backward in two need it.

    Raises:
        TypeError: The model is no module; mesh, schedule or split are of another kind.
        ValueError: Mesh, schedule and split do not fit, or the models of ranks differ.
        RuntimeError: Something crosses a cut that cannot; the error names the line.

    Example:
        >>> import torch
        >>> from tilework.mesh import init_device_mesh
        >>> from tilework.parallel import Schedule, pipeline
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        ...     plan = Schedule.gpipe(ranks=2, microbatches=2)
        ...     stages = pipeline(model, init_device_mesh("cpu", (2,)), split=["1"], schedule=plan)
        ...     loss = torch.nn.functional.mse_loss
        ...     stages.step(torch.ones(4, 2), target=torch.ones(4, 1), loss=loss)
        ...     return [name for name, p in stages.named_parameters() if p.grad is not None]
        >>> run_ranks(2, program)
        [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """
    check_is_module(model, "pipeline")
    _check_mesh(mesh, schedule)
    captured = _captured(capture, schedule)
    args, kwargs = _arguments(() if example is None else example)
    group = mesh.get_group()

    def times() -> Mapping[str, float]:
        given = getattr(model, "dummy_inputs", None) if example is None else example
        if given is None:
            raise ValueError('split="by time" measures a forward: pass example=')
        args, kwargs = _arguments(given)
        return agree(lambda: measured(model, args, kwargs), group)[0]  # the first rank's

    cuts = names_of_cuts(model, split, schedule.stages, times)
    dealt = split_model(model, cuts)
    if example is not None:
        units, own = dict.fromkeys(dealt.units, 0), dict.fromkeys(dealt.own, 0)
        together = replace(dealt, stages=1, units=units, own=own)
        twin = Twin(model, together, torch.device(mesh.device_type))
        dealt = split_model(model, cuts, twin.order(args, kwargs))
    tied = {name for names in tied_names(model, dealt) for name in names}
    check_replicas([*model.named_parameters()], group, values=tied, of="pipeline()")
    for theirs in agree(lambda: [str(dealt), str(schedule)], group):
        if theirs != [str(dealt), str(schedule)]:
            raise ValueError("ranks called pipeline() with different splits or schedules")
    stages = Stages(model, mesh, dealt, schedule, None if example is None else (args, kwargs))
    stages.captured = captured
    return stages


def _check_mesh(mesh: DeviceMesh, schedule: Schedule) -> None:
    if not (isinstance(mesh, DeviceMesh) and isinstance(schedule, Schedule)):
        raise TypeError(
            f"pipeline takes a mesh and a schedule, as in pipeline(model, mesh['pp'], schedule="
            f"Schedule.gpipe(ranks=2, microbatches=4)): got {mesh!r} and {schedule!r}"
        )
    if mesh.ndim != 1:
        raise ValueError(f"a pipeline has a single axis, and {mesh} has {mesh.ndim}: mesh['pp']")
    if schedule.ranks != mesh.size():
        raise ValueError(
            f"the schedule is for {schedule.ranks} ranks, and the mesh's axis has {mesh.size()}"
        )


def _captured(capture: str | None, schedule: Schedule) -> CapturedStages | None:
    if capture not in (None, "python", "inductor"):
        raise ValueError(f'capture must be None, "python" or "inductor", got {capture!r}')
    cuts = any(action.kind == "weights" for actions in schedule.actions for action in actions)
    if cuts and capture is None:
        raise ValueError(
            "the schedule cuts backward in two (input_gradient and weights), and autograd computes "
            'both together: only captured stages can be cut. Pass capture="python" or '
            'capture="inductor", or a schedule with whole backwards, such as '
            "Schedule.one_forward_one_backward or Schedule.interleaved"
        )
    return None if capture is None else CapturedStages(capture, cuts)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if not isinstance(example, tuple):
        raise TypeError(
            f"example has the arguments of a forward, in a tuple or by name in a dict: got "
            f"{type(example).__name__}"
        )
    return example, {}


class Stages(nn.Module):
    """The stages of a pipeline on a rank; made by :func:`pipeline`.

    Names of parameters, buffers and state dicts are the whole model's.

    Attributes:
        parts: This rank's modules, for each stage; replace a module by DDP of it, or change it
            in place (``fully_shard``, ``parallelize_module``, ``checkpoint_wrapper``).
        schedule: The schedule.
        split: The modules of each stage.
        mesh: The axis.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, split: Split, schedule: Schedule, example: Any
    ) -> None:
        super().__init__()
        self.split, self.schedule = split, schedule
        self.mesh, self._group = mesh, mesh.get_group()
        self._device = torch.device(mesh.device_type)
        self._rank = self._group.rank()
        self._numbers = [s for s, home in enumerate(schedule.home) if home == self._rank]
        self._twin = Twin(model, split, self._device)
        self.parts: list[nn.Module] = [self._twin.part(model, each) for each in self._numbers]
        tied, listed = tied_names(model, split), dict(model.named_parameters())
        #: By name of a tied parameter, the name that the whole model lists it by.
        self.first_names = {
            name: first for each in tied for name in each for first in each if first in listed
        }
        #: Parameters that other ranks have, too: the name here, and the ranks, the first one first.
        self._ties: list[tuple[str, list[int]]] = []
        for names in tied:
            of_rank: dict[int, str] = {}
            for name in names:
                of_rank.setdefault(schedule.home[stage_of(name, split)], name)
            if self._rank in of_rank and len(of_rank) > 1:
                self._ties.append((of_rank[self._rank], list(of_rank)))
        self._steps = self._evaluations = 0
        #: Runs stages as programs; None: as they are.
        self.captured: CapturedStages | None = None
        self._dtypes: dict[Any, torch.dtype] = {}
        if example is not None:
            self._twin.route(example[0], example[1], self.training)

    def __str__(self) -> str:
        return f"{self.split}\n{self._twin}"

    # -- as a module ---------------------------------------------------------------------

    @property
    def modules_of_stages(self) -> dict[int, StageModule]:
        """By stage, this rank's modules, without wrappers."""
        inner = [p.module if isinstance(p, DistributedDataParallel) else p for p in self.parts]
        wrong = [type(each).__name__ for each in inner if not isinstance(each, StageModule)]
        if wrong or len(inner) != len(self._numbers):
            raise TypeError(
                f"stages.parts has {wrong or len(inner)}: it holds the modules that pipeline() "
                f"made, in order, each as it is or in DistributedDataParallel"
            )
        return dict(zip(self._numbers, cast("list[StageModule]", inner), strict=True))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have the same stages as this rank: the replicas. Local."""
        root, name = self.mesh.root_mesh, (self.mesh.mesh_dim_names or ("",))[0]
        if root.ndim == 1:
            return (get_rank(),)
        axis = (root.mesh_dim_names or ()).index(name)
        own = root.mesh.select(axis, self.mesh.get_local_rank())
        return tuple(sorted(own.flatten().tolist()))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all stages of this rank, with the whole model's names."""
        memo = set() if memo is None else memo
        for each in self.modules_of_stages.values():
            yield from each.named_modules(memo, prefix, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Any:
        """The parameters of this rank's stages, for optimizers and ``clip_grad_norm_``. Local."""
        mine = [parameter for _, parameter in self.named_parameters()]
        others = {id(each) for each, ranks in self._tied() if ranks[0] != self._rank}
        return PartOfParameters(mine, others, self._group)

    def children(self) -> Iterator[nn.Module]:
        """The parts."""
        yield from self.parts

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of this rank's stages, by the whole model's names. Local."""
        state: dict[str, Any] = {}
        for each in self.modules_of_stages.values():
            state |= each.state_dict(*args, **kwargs)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state that has this rank's names; with others it may be the whole model's. Local.

        Raises:
            RuntimeError: With ``strict``: names of this rank's stages are missing.
        """
        missing: list[str] = []
        for each in self.modules_of_stages.values():
            missing += each.load_state_dict(state_dict, strict=False, assign=assign).missing_keys
        if missing and strict:
            raise RuntimeError(f"the state lacks {', '.join(missing)}")
        return torch.nn.modules.module._IncompatibleKeys(missing, [])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result, on every rank: :meth:`evaluate` without a loss."""
        return self.evaluate(*args, **kwargs)

    # -- steps ---------------------------------------------------------------------------

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        loss: Loss | None = None,
        weight: Weight | None = None,
        scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Forward and backward of a batch, in microbatches. Collective over the mesh; blocks.

        Gradients are added to ``grad``, as ``backward()`` does; tied parameters get those of all
        their stages.

        Args:
            inputs: The model's arguments, the same on all ranks. Tensors are cut along dim 0, into
                as many parts as the schedule has microbatches; the last may be shorter.
            target: The target, cut like the inputs; None: ``loss`` gets the result alone.
            loss: From result and target to a scalar. None: the model computes it, as the scalar
                that it returns, or as ``.loss`` of the result.
            weight: How losses of microbatches make the loss of the batch. "rows": each is a mean
                over rows; "sum": they add up; a function: from a microbatch's target to the number
                of elements of which the loss is the mean. None: "rows", which is compared with the
                loss of the whole batch in the first steps and now and then; a model that computes
                the loss itself needs it.
            scaler: A GradScaler, which scales the loss before backward. Ranks then agree on
                gradients that are not finite.
            kwargs: The model's arguments by name, cut like ``inputs``.

        Returns:
            The loss of the batch, without a graph; the same on every rank.

        Raises:
            ValueError: Fewer rows than microbatches; arguments with different numbers of rows; the
                loss is no mean over rows, and ``weight`` is None; or a gradient would be lost.
            RuntimeError: Something crosses a cut that a stage cannot do alone.
        """
        if loss is None and weight is None:
            raise ValueError(
                "the model computes the loss itself, and the weight must be said: weight='rows' if "
                "it is a mean over rows, 'sum' if losses add up, or a function of the target that "
                "counts the elements of the mean"
            )
        _check_gradients((inputs, kwargs))
        checks = weight is None and is_due(self._steps + 1)
        options = RunOptions(loss or _own_loss, True, scaler, self.captured, keeps=checks)
        with self._ties_summed():
            run = self._run((inputs, kwargs), target, weight or "rows", options)
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self._device))  # makes the scale on every rank
            self._agree_on_overflow()
        self._steps += 1
        return self._loss_of(run, target, checks)

    def evaluate(
        self,
        *inputs: Any,
        target: Any = None,
        loss: Loss | None = None,
        weight: Weight | None = None,
        **kwargs: Any,
    ) -> Any:
        """The loss of a batch, or without ``loss`` the model's result, on every rank.

        Without gradients, in microbatches. Collective over the mesh; blocks. Arguments as for
        :meth:`step`; call ``stages.eval()`` before, as for any module.

        A result is a tensor whose dim 0 has the rows of the inputs, or a tuple, list, dict or
        Hugging Face's output of these. Numbers, such as a model's own loss, need ``weight``.

        Raises:
            ValueError: As for :meth:`step`; or the result has something else.
        """
        with torch.no_grad():
            whole = None if loss else self._twin.route(inputs, kwargs, self.training).result
            checks = weight is None and is_due(self._evaluations + 1)
            options = RunOptions(loss, False, keeps=checks or loss is None)
            run = self._run((inputs, kwargs), target, weight or "rows", options)
            if loss is None:
                return self._result_of(run, whole, is_weighted=weight is not None)
            self._evaluations += 1
            return self._loss_of(run, target, checks)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Text by the model's own ``generate`` (Hugging Face), without a cache, on every rank.

        Each token is a forward of the whole text through all stages. Ranks sample alike.
        Collective over the mesh; blocks.

        Raises:
            TypeError: The model has no ``generate``.
        """
        part: Any = next(iter(self.modules_of_stages.values()), None)
        if not callable(getattr(part, "generate", None)):
            raise TypeError(f"{type(part).__name__} has no generate()")

        own: Any = super(StageModule, cast("StageModule", part))

        @wraps(own.forward.__func__)  # generate() reads the signature
        def forward(_: Any, input_ids: Tensor, **given: Any) -> Any:
            rows: dict[str, Any] = {n: x for n, x in given.items() if isinstance(x, Tensor)}
            rows.pop("cache_position", None)  # has no rows
            return self.evaluate(input_ids=input_ids, **rows, use_cache=False, return_dict=True)

        whole = shallow(part)
        whole.__class__ = type(type(part).__name__, (type(part),), {"forward": forward})
        generator = default_generator()
        seed = agree(lambda: int(torch.randint(1 << 62, (), generator=generator)), self._group)[0]
        state = generator.get_state()
        try:
            generator.manual_seed(seed)
            return whole.generate(*args, use_cache=False, **kwargs)
        finally:
            generator.set_state(state)

    def _run(self, given: Any, target: Any, weight: Weight, options: RunOptions) -> Execution:
        rows, count = rows_of((given, target)), self.schedule.microbatches
        count = count if options.trains else min(count, rows)
        cut = cut_batch((given, target), rows, count)
        sizes = [rows // count + (number < rows % count) for number in range(count)]
        weights = weights_of([t for _, t in cut], sizes, weight)
        routes: dict[int, Route] = {}
        batches = []
        for ((args, kwargs), part), size, factor in zip(cut, sizes, weights, strict=True):
            if size not in routes:
                routes[size] = self._twin.route(args, kwargs, self.training)
            batches.append(Microbatch(args, kwargs, part, size, factor, routes[size]))
        parts = dict(zip(self.modules_of_stages, self.parts, strict=True))
        if options.loss is not None:
            self._dtype = self._loss_dtype(batches[0], options.loss)
        run = Execution(self.schedule, self._group, self._device, parts, batches, options)
        run.run()
        return run

    @unrecorded
    def _loss_dtype(self, batch: Microbatch, loss: Loss) -> torch.dtype:
        """The dtype of the loss, which ranks without the loss have to know."""
        key = id(batch.route), getattr(loss, "__code__", loss)
        if key not in self._dtypes:
            target = () if batch.target is None else (batch.target,)
            value = loss(batch.route.result, *target)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ValueError(f"the loss must be a tensor of one element, got {value!r}")
            self._check_reads(value)
            self._dtypes[key] = value.dtype
        return self._dtypes[key]

    def _check_reads(self, loss: Tensor) -> None:
        """Refuse a loss that reads parameters of other ranks than the last stage's. Collective."""
        leaves = leaves_of_graph([loss])
        mine = [name for name, each in self.named_parameters() if id(each) in leaves]
        for rank, names in enumerate(agree(lambda: mine, self._group)):
            if names and rank != self.schedule.home[-1]:
                raise ValueError(
                    f"the loss reads {names[0]} of group rank {rank} besides the model's result, "
                    f"and the rank of the last stage alone computes the loss: the parameter would "
                    f"get no gradient. Leave such terms to the optimizer, as weight_decay, or add "
                    f"their gradients on each rank after step()"
                )

    # -- results -------------------------------------------------------------------------

    def _loss_of(self, run: Execution, target: Any, checks: bool = False) -> Tensor:
        """The loss of the batch, on every rank."""
        values = torch.zeros(2, dtype=self._dtype, device=self._device)
        if run.losses:
            pairs = enumerate(run.microbatches)
            weighted = (run.losses[number].reshape(()) * mine.weight for number, mine in pairs)
            values[0] = sum(weighted, start=torch.zeros(()))
            if checks:
                values[1] = _whole_loss(run, target, values[0])
        broadcast(values, group=self._group, group_src=self.schedule.home[-1])
        if checks and float(values[1]):
            raise ValueError(
                f"the loss of the batch is {float(values[1]):.6g}, and the microbatches' losses, "
                f"weighted by rows, give {float(values[0]):.6g}: the loss is no mean over rows. "
                f"Say weight='sum' if losses add up, or weight=a function of the target that "
                f"counts the elements of the mean, as lambda target: (target != -100).sum()"
            )
        return values[0]

    def _result_of(self, run: Execution, whole: Any, *, is_weighted: bool) -> Any:
        """The model's results of all microbatches together, on every rank."""
        rows = [each.rows for each in run.microbatches]
        routes = [each.route for each in run.microbatches]
        agree(lambda: check_results(run.results, routes, whole, rows, is_weighted), self._group)
        expected, spec = tree_flatten(whole)
        values = tree_flatten(run.together())[0] if run.results else expected
        for at, like in enumerate(expected):
            if isinstance(like, Tensor):
                empty = torch.empty(like.shape, dtype=like.dtype, device=self._device)
                values[at] = values[at].detach().contiguous() if run.results else empty
                broadcast(values[at], group=self._group, group_src=self.schedule.home[-1])
        return tree_unflatten(values, spec)

    # -- gradients -----------------------------------------------------------------------

    def _tied(self) -> list[tuple[nn.Parameter, list[int]]]:
        """The parameters that other ranks have, too, with the ranks."""
        here = dict(self.named_parameters(remove_duplicate=False)) if self._ties else {}
        return [(here[name], ranks) for name, ranks in self._ties]

    @contextmanager
    def _ties_summed(self) -> Iterator[None]:
        """A context that sums gradients of tied parameters over the stages that have them."""
        ties = [(each, each.grad, ranks) for each, ranks in self._tied() if each.requires_grad]
        for parameter, _, _ in ties:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, before, _ in ties:
                parameter.grad = before
            raise
        groups = current_world().state(GroupsOfRanks)
        for parameter, before, ranks in ties:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            group = groups.of(sorted(self._group.global_ranks[each] for each in ranks))
            for local in local_tensors(parameter.grad):
                all_reduce(local, group=group)
            if before is not None:
                parameter.grad.add_(before)

    def _agree_on_overflow(self) -> None:
        """Let gradients that are not finite on one rank stop the optimizers of all ranks."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        locals_ = [local for grad in grads for local in local_tensors(grad)]
        bad = any(not bool(each.isfinite().all()) for each in locals_)
        flag = torch.tensor([float(bad)], device=self._device)
        all_reduce(flag, ReduceOp.MAX, self._group)
        if flag.item() and not bad and locals_:
            locals_[0].view(-1)[0] = float("inf")


def _check_gradients(inputs: Any) -> None:
    """Refuse a step that would give no gradients."""
    if not torch.is_grad_enabled():
        raise RuntimeError("step() makes gradients, and no_grad() is on: leave it, or evaluate()")
    if any(isinstance(each, Tensor) and each.requires_grad for each in tree_flatten(inputs)[0]):
        raise ValueError(
            "inputs require gradients, and step() makes gradients of parameters alone: detach() "
            "the inputs, or let the model have the modules that make them"
        )


def _own_loss(result: Any, *_: Any) -> Tensor:
    """The loss that a model computed."""
    loss = getattr(result, "loss", None) if not isinstance(result, Tensor) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"loss= is needed: the model returns {type(result).__name__} without a scalar loss"
        )
    return loss


def _whole_loss(run: Execution, target: Any, total: Tensor) -> float:
    """The loss of the whole batch, if it is not the microbatches' together; else 0."""
    assert run.options.loss is not None
    with torch.no_grad():
        whole = run.options.loss(run.together(), *(() if target is None else (target,)))
    close = 64 * torch.finfo(whole.dtype).eps
    return 0.0 if torch.allclose(whole, total, rtol=close, atol=close) else float(whole)
