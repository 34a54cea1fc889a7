"""Tensor parallelism: modules whose parameters are DTensors, by a plan.

``plans`` finds the modules that a plan names and distributes parameters. ``styles`` define the
layouts of a module's parameters, inputs and outputs. ``axis`` moves tensors along the plan's mesh
axis.
"""
