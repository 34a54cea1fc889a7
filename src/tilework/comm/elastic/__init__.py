"""Groups that lose ranks and continue: who is left, who comes back, and the new group.

- ``registers``: keys that keep the first value written, which outlives the writer;
- ``consensus``: the protocol by which ranks agree on who is left, in steps, without a real clock,
  registers or group: a model check runs the same code as real ranks;
- ``participant``: a real rank in that protocol, and which ranks of a group have ended or left;
- ``watched_store``: a store whose waits end when a rank is lost;
- ``shrink``, ``grow``: the new group of the ranks that are left, or with ranks that came back.
"""
