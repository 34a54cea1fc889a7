"""Training that outlives ranks: the state is copied to memory of other ranks in each step.

- ``tracked``: the tensors and other values of a training state, by name, and the ranks that hold
  them;
- ``catalog``: the boxes of a snapshot that each rank keeps, and their places; pure;
- ``slots``: the memory of snapshots, which outlives the rank that wrote it;
- ``restore``: restoring a snapshot into the state of other ranks;
- ``training_loop``: the loop that continues when ranks are lost, until the end or a stop.
"""
