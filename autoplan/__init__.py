"""autoplan: search a parallelization plan for a PyTorch model, and run it.

plan = autoplan.search(model, args, kwargs, cluster="h100:8x8", global_batch=512)
parallel = autoplan.parallelize(model, args, kwargs, plan=plan)
"""

# The functions search and sweep share names with subpackages.  A subpackage sets its name here once,
# when it is first imported: so they are imported first, and the functions are bound after.
import autoplan.capture as _capture  # noqa: F401
import autoplan.search as _search  # noqa: F401
import autoplan.sweep as _sweep  # noqa: F401
from autoplan.api import parallelize, search, this_cluster
from autoplan.capture.captured import Captured
from autoplan.capture.verification import verify_rule
from autoplan.operators.composite import composite
from autoplan.runtime.optimizers import register_optimizer
from autoplan.runtime.parallel import Parallel
from autoplan.sweep.sweep import sweep
from autoplan.verification import verify
from costmodel.cluster import Cluster
from searchspace.errors import (
    AutoplanError,
    CaptureError,
    CheckpointError,
    ClusterError,
    ExecutionError,
    IllegalPlanError,
    InfeasibleError,
    NonFiniteError,
    PlanError,
    PlanFileError,
    PlanMismatchError,
    RankLostError,
    SearchError,
    VerificationError,
)
from searchspace.plan import Plan

__all__ = [
    "AutoplanError",
    "CaptureError",
    "Captured",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "ExecutionError",
    "IllegalPlanError",
    "InfeasibleError",
    "NonFiniteError",
    "Parallel",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PlanMismatchError",
    "RankLostError",
    "SearchError",
    "VerificationError",
    "composite",
    "parallelize",
    "register_optimizer",
    "search",
    "sweep",
    "this_cluster",
    "verify",
    "verify_rule",
]
