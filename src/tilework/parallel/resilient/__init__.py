"""Training that outlives ranks: its state in the memory of others, refreshed each step.

- ``tracked``: the tensors and other values of a training state, by name, and who holds which boxes;
- ``catalog``: which rank keeps which boxes of a snapshot, and where; pure;
- ``vault``: the memory that snapshots lie in, which outlives the rank that wrote it;
- ``restore``: from a snapshot into the state of other ranks, by plan;
- ``resilient``: the loop that goes on when ranks are lost; ``stopping``: and that ends when asked.
"""
