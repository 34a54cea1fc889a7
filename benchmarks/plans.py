"""Plans that ``suggest`` finds for published models, beside configurations that others published.

Nothing is downloaded, and nothing runs on a cluster: models are configurations of transformers, and
devices are described below. All times are estimates.

    python benchmarks/plans.py --models gpt2 llama-8b --ranks 8 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilework.plan import Cluster, Suggestions, suggest
from tilework.show import bytes_text

#: An accelerator with 80 GB, eight on a host, as data sheets describe it; the error is unknown.
DEVICE = Cluster(
    memory=80_000_000_000,
    flops=4e14,
    bandwidth=3.3e12,
    call_seconds=5e-6,
    latency=1e-5,
    seconds_per_byte=1 / 4.5e11,
    network_latency=2e-5,
    network_seconds_per_byte=1 / 5e10,
)
ON_HOST = 8


@dataclass(frozen=True)
class Case:
    """A model, the length of sequences, and what others published for numbers of ranks."""

    build: Callable[[], nn.Module]
    sequence: int
    published: dict[int, str]


def _made(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        config = getattr(transformers, f"{name}Config")(use_cache=False, **options)
        kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
        model: nn.Module = getattr(transformers, kind)(config)
        return model.to(torch.bfloat16)

    return build


def _llama(layers: int, width: int, inner: int, heads: int) -> Callable[[], nn.Module]:
    return _made(
        "Llama",
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128_256,
        rope_theta=500_000.0,
        max_position_embeddings=8192,
    )


_TITAN = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
_BRIDGE = (
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary.md (25.11)"
)
_NEMO = "https://github.com/NVIDIA/NeMo/blob/main/nemo/collections/llm/recipes/mixtral_8x7b.py"
CASES = {
    "gpt2": Case(_made("GPT2"), 1024, {}),
    "llama-8b": Case(
        _llama(32, 4096, 14336, 32),
        8192,
        {8: f"fsdp 8, selective recomputing, 2 rows a rank, 82.4 GiB ({_TITAN}); fsdp ({_BRIDGE})"},
    ),
    "llama-70b": Case(
        _llama(80, 8192, 28672, 64), 8192, {64: f"tp 4, pp 8, interleaved by 5 ({_BRIDGE})"}
    ),
    "mixtral-8x7b": Case(
        _made("Mixtral", max_position_embeddings=4096),
        4096,
        {64: f"ep 8, pp 4, interleaved by 8 ({_NEMO})"},
    ),
}


def plans(case: Case, ranks: int) -> Suggestions:
    """The plans for one row of tokens on each rank."""
    tokens = torch.zeros(ranks, case.sequence, dtype=torch.int64)
    hosts = max(1, ranks // ON_HOST)
    return suggest(case.build, {"input_ids": tokens, "labels": tokens}, ranks, hosts, None, DEVICE)


def row(name: str, ranks: int) -> str:
    """A row of the table in docs/how-to/plan-a-job.md."""
    begun, case = time.perf_counter(), CASES[name]
    found = plans(case, ranks)
    seconds = time.perf_counter() - begun
    published = case.published.get(ranks, "")
    if not len(found):
        why = "; ".join(sorted({reason for _, reason in found.left_out})[:2])
        return f"| {name} | {ranks} | none: {why} | | {published} | {seconds:.0f} s |"
    best: Any = found[0]
    peak = bytes_text(best.report.worst.peak.bytes)
    return f"| {name} | {ranks} | {best} | {peak} | {published} | {seconds:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 1024])
    options = parser.parse_args()
    print("| model | ranks | plan | peak of a rank | published | planned in |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        for ranks in options.ranks:
            print(row(name, ranks), flush=True)


if __name__ == "__main__":
    main()
