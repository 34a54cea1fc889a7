"""Products of matrices, and what is made of them."""

from __future__ import annotations

from tilework.dtensor.registry import line

line(
    "linear(input, weight, bias=None)",
    "b* i, o i, o? -> b* o",
    linear="input bias, weight bias",
)
line("mm(input, mat2)", "i k, k j -> i j", linear="input, mat2")
