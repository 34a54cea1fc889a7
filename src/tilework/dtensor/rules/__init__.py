"""Rules of operators for DTensors, by family. The import registers these and the general rules."""

from tilework.dtensor.rules import (  # noqa: F401
    attention_ways,
    batch_norm,
    concatenation,
    cross_entropy,
    extrema,
    flex_attention,
    index_read,
    index_write,
    indexing,
    memory_views,
    multihead,
    new_like,
    norms,
    packed_attention,
    python_values,
    random_ops,
    recurrent,
    reductions,
    scatter,
    slicing,
    statistics,
    windows,
)
from tilework.tiled import rules as general_rules  # noqa: F401
