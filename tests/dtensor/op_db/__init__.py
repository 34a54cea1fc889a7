"""torch's own database of operators and sample arguments, each called on DTensors.

``python -m tests.dtensor.op_db`` goes through all of it; a part is in the suite.
"""
