"""The tree of exceptions.  Everything a user can cause is one of these.

AutoplanError
├── ModelError              a model cannot be found, loaded or built
├── CaptureError            the model cannot be turned into a graph
│   └── RuleError           a dimension rule is malformed or fails its verification
├── PlanError               a plan is malformed, illegal, or made for something else
│   ├── PlanFileError       the JSON text cannot be read as a plan
│   ├── PlanMismatchError   another model, world size, or schema version
│   └── IllegalPlanError    a combination of choices that has no meaning
├── ClusterError            the cluster description is unknown or empty
├── SearchError             the search cannot start or continue
│   └── InfeasibleError     no plan satisfies the constraints (says by how much)
├── ExecutionError          a program fails while it runs
│   ├── RankLostError       another rank died or stopped answering
│   └── NonFiniteError      NaN or infinity, decided by all ranks together
├── CheckpointError         a checkpoint is incomplete or does not fit
├── SweepError              a sweep's grid, its folder or its workers cannot be used
├── ProfileError            a measurement store cannot be used
└── VerificationError       plan and single device disagree
"""

from __future__ import annotations


class AutoplanError(Exception):
    """Base of every error that autoplan raises on purpose."""


class ModelError(AutoplanError):
    """A model cannot be found, loaded or built; the message names what was asked for and what there is."""


class CaptureError(AutoplanError):
    """The model cannot be captured; the message names module and line, and what to do."""


class RuleError(CaptureError):
    """A dimension rule is malformed, does not match its operator, or fails verification."""


class PlanError(AutoplanError):
    """A plan cannot be used."""


class PlanFileError(PlanError):
    """A plan file is not readable as a plan; the message holds path and JSON pointer."""


class PlanMismatchError(PlanError):
    """A plan was made for another model, world size or schema version."""


class IllegalPlanError(PlanError):
    """A plan's choices contradict a rule; the message names the operator and the rule."""


class ClusterError(AutoplanError):
    """A cluster description is unknown, malformed or empty."""


class SearchError(AutoplanError):
    """The search cannot start or go on."""


class InfeasibleError(SearchError):
    """No plan satisfies all constraints; the message says which one binds and by how much.

    ``missing_bytes`` is what the smallest plan lacks per device, where memory is what binds.
    """

    missing_bytes: int | None = None

    def __init__(self, message: str, missing_bytes: int | None = None) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class ExecutionError(AutoplanError):
    """A rank's program failed while it ran."""


class RankLostError(ExecutionError):
    """Another rank died or stopped answering within the time-out."""


class NonFiniteError(ExecutionError):
    """A loss or gradient is NaN or infinite; raised on all ranks of the same step."""


class CheckpointError(AutoplanError):
    """A checkpoint is incomplete, damaged, or does not fit the model."""


class SweepError(AutoplanError):
    """A sweep cannot start or go on: its grid, its folder or its workers."""


class ProfileError(AutoplanError):
    """A measurement or its store cannot be used."""


class VerificationError(AutoplanError):
    """A plan's results differ from the single device's."""


class AutoplanWarning(UserWarning):
    """Something works, but not as well as it could: an operator that is replicated for want of a rule."""
