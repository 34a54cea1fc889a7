"""Tensor parallelism: modules whose parameters are DTensors, by a plan.

``plans`` finds the modules that a plan names and distributes their parameters, ``styles`` and
``prepare_module`` say how parameters, inputs and outputs of one module are sharded, ``axis`` moves
tensors along the plan's mesh axis, ``loss`` makes operators without a rule raise
instead of gathering.
"""
