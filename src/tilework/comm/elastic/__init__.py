"""Groups that lose ranks and go on: who is left, who comes back, and the group of those.

- ``ledger``: keys to the first values that were written to them, which outlive the writers;
- ``consensus``: the protocol by which ranks agree on who is left, in steps, without any clock,
  ledger or group of its own: a model check runs the same code as real ranks;
- ``liveness``: which ranks' processes, or threads, have ended;
- ``watched_store``: a store whose waits end when a rank is lost;
- ``shrink``, ``grow``: the new group of those that are left, or with those that came back.
"""
