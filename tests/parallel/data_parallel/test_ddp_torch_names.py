"""torch's underscored methods and newer keywords of DistributedDataParallel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tilework.parallel import DistributedDataParallel, MixedPrecision
from tilework.testing import run_ranks


class Counted(nn.Module):
    """With a buffer, and a parameter that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.own = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) + self.own
        return result


def test_what_is_to_be_left_alone_is_neither_sent_nor_reduced() -> None:
    def program(rank: int) -> tuple[float, float]:
        module = Counted()
        module.own.data.fill_(rank)
        names = ["own"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        ddp = DistributedDataParallel(module)
        assert ddp.parameters_to_ignore == {"own"}
        (ddp(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        assert module.own.grad is not None
        assert module.linear.weight.grad is not None
        return module.own.grad[0].item(), module.linear.weight.grad[0, 0].item()

    assert run_ranks(2, program) == [(1.0, 1.5), (2.0, 1.5)]


def test_a_name_that_the_module_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ignore has \['owm'\], but"):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(Counted(), ["owm"])


def test_a_static_graph_is_set_afterwards() -> None:
    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        ddp._register_builtin_comm_hook(SimpleNamespace(name="FP16_COMPRESS"))
        ddp._set_static_graph()
        assert ddp._get_ddp_logging_data()["static_graph"] is True
        assert "fp16" in ddp.get_ddp_logging_data()["comm_hook"]
        values = []
        for _ in range(2):
            ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
            (grad,) = (parameter.grad for parameter in ddp.parameters())
            assert grad is not None
            values.append(grad.item())
            ddp.zero_grad()
        return values

    assert run_ranks(2, program)[0] == [1.5, 1.5]


def test_an_unknown_built_in_hook_is_refused() -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(nn.Linear(1, 1))
        with pytest.raises(ValueError, match="ALLREDUCE, FP16_COMPRESS"):
            ddp._register_builtin_comm_hook("NOTHING")

    run_ranks(1, program)


def test_each_bucket_has_a_size_of_its_own() -> None:
    def program(rank: int) -> list[int]:
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        kilobytes = [16, 48]
        sizes = [size / 1024 for size in kilobytes]
        ddp = DistributedDataParallel(layers, bucket_cap_mb_list=sizes)
        ddp(torch.ones(1, 64)).sum().backward()
        return [bucket.memory.nbytes >> 10 for bucket in ddp.reducer.buckets if bucket.memory]

    assert run_ranks(2, program)[0] == [16, 48]


def test_buffers_are_sent_or_not_under_either_name() -> None:
    def program(rank: int) -> None:
        module = Counted()
        ddp = DistributedDataParallel(module, forward_sync_buffers=False)
        assert not ddp.will_sync_module_buffers()
        assert DistributedDataParallel(Counted()).will_sync_module_buffers()
        assert ddp.device == torch.device("cpu")
        with pytest.raises(ValueError, match="are one setting"):
            DistributedDataParallel(Counted(), broadcast_buffers=True, forward_sync_buffers=False)

    run_ranks(1, program)


def test_settings_that_change_nothing_are_taken() -> None:
    def program(rank: int) -> None:
        DistributedDataParallel(
            nn.Linear(1, 1), skip_all_reduce_unused_params=True, batched_grad_copy=True
        )

    run_ranks(1, program)


def test_the_class_of_fsdp1_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"keep_low_precision_grads.*MixedPrecisionPolicy\(param"):
        MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)  # type: ignore[call-arg]

    def program(rank: int) -> None:
        from torch.distributed.fsdp import MixedPrecision as OfTorch

        theirs: object = OfTorch()
        with pytest.raises(TypeError, match=r"got MixedPrecision of torch\.distributed\.fsdp"):
            DistributedDataParallel(nn.Linear(1, 1), mixed_precision=theirs)  # type: ignore[arg-type]

    run_ranks(1, program)
