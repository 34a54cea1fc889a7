"""Planning: a job of thousands of ranks, in one process, by running the program itself.

Example:
    >>> from tilework.plan import pretend
    >>> with pretend(ranks=4096, hosts=512, memory="80 GB") as job:  # doctest: +SKIP
    ...     report = job.run(train)
    >>> print(report)  # doctest: +SKIP
"""

from tilework.plan.cluster import Cluster, memory_bytes
from tilework.plan.job import PlannedJob, pretend
from tilework.plan.measuring import measured_here
from tilework.plan.mismatches import Mismatch
from tilework.plan.model_plan import ModelPlan
from tilework.plan.report import AxisTraffic, Branch, Change, PlanReport, RankReport, StartCost
from tilework.plan.suggestions import Suggestions, suggest
from tilework.plan.timing import RankTime

__all__ = [
    "AxisTraffic",
    "Branch",
    "Change",
    "Cluster",
    "Mismatch",
    "ModelPlan",
    "PlanReport",
    "PlannedJob",
    "RankReport",
    "RankTime",
    "StartCost",
    "Suggestions",
    "measured_here",
    "memory_bytes",
    "pretend",
    "suggest",
]
