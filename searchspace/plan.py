"""The plan: transformation, placement and order, three parts that can be read, edited and recombined.

A :class:`Plan` is frozen.  ``plan.replace(order=other.order)`` recombines.  The JSON form is
stable in order and formatting, so that two plans diff well; its schema is ``Plan.json_schema()``.
Whether a plan is *legal* for a graph is decided by ``searchspace.resolve``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from searchspace.errors import AutoplanError, IllegalPlanError, PlanError, PlanFileError, PlanMismatchError
from searchspace.mesh import Mesh
from searchspace.schedule import Task, parse_tasks

SCHEMA_VERSION = 1

Precision = Literal["float32", "bf16", "autocast"]
Mode = Literal["train", "inference"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))


class SiteLayouts(_Part):
    """How one stage keeps a parameter: placement by mesh axis; an axis left out follows the consumers.

    ``stored`` is how the weight is kept between uses (split: ZeRO-3), ``gradient`` how its gradient
    is kept between micro-batches (``P``: summed at the end of the step; split: ZeRO-2).
    """

    stored: dict[str, str] = Field(default_factory=dict)
    gradient: dict[str, str] = Field(default_factory=dict)


class ParameterPlan(_Part):
    """Where a parameter lives.

    ``home`` is the stage whose mesh holds the optimizer's copy, ``optimizer`` its placement by axis
    (split while stored replicated: ZeRO-1); axes left out are as stored.  ``sites`` is by stage index.
    """

    home: int | None = None
    optimizer: dict[str, str] = Field(default_factory=dict)
    sites: dict[int, SiteLayouts] = Field(default_factory=dict)


class Transformation(_Part):
    """op-trans.

    ``operators``: for each operator, by mesh axis of its stage, the label of the rule's choice:
    an identifier, or ``+i,j`` for passing partial sums through.  What is left out is replicated.
    ``parameters``: by the parameter's qualified name in the model.
    ``recompute``: regions whose activations are recomputed in backward, each a module path, an
    operator, or a range ``first..last`` of operators.  ``separate``: regions, written alike, that
    become segments of their own: what is gathered for one (ZeRO-3) is dropped before the next.
    """

    micro_batches: int = Field(default=1, ge=1)
    operators: dict[str, dict[str, str]] = Field(default_factory=dict)
    parameters: dict[str, ParameterPlan] = Field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    separate: tuple[str, ...] = ()


class Stage(_Part):
    """Operators that run on one mesh.  An operator that depends on no parameter may be in several."""

    axes: dict[str, int]
    devices: tuple[int, ...]
    operators: tuple[str, ...]

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(tuple(self.axes.items()), self.devices)


class Placement(_Part):
    """op-assign: the stages, in forward order."""

    stages: tuple[Stage, ...]


class Lane(_Part):
    """Devices that share one order of tasks, written ``"0F0 0F1 0B0 0B1"``."""

    devices: tuple[int, ...]
    tasks: str

    @cached_property
    def parsed(self) -> tuple[Task, ...]:
        return parse_tasks(self.tasks)


class Order(_Part):
    """op-order: every device is in exactly one lane; a lane lists all tasks of its devices' stages."""

    lanes: tuple[Lane, ...]


class ModelInfo(_Part):
    """The model a plan was made for: its fingerprint and one line per parameter and buffer."""

    name: str
    fingerprint: str
    signature: tuple[str, ...] = ()


class ClusterInfo(_Part):
    """The cluster a plan was made for, ``device:NxM``."""

    name: str
    devices: int = Field(ge=1)


class Recipe(_Part):
    """What is trained and how: mode, precision, optimizer (for its memory), global batch."""

    mode: Mode = "train"
    precision: Precision = "float32"
    optimizer: str = "adamw"
    global_batch: int | None = Field(default=None, ge=1)


class Prediction(_Part):
    """What the cost model expects of one step: seconds, and peak bytes by stage."""

    seconds: float
    peak_bytes: tuple[int, ...] = ()
    breakdown: dict[str, float] = Field(default_factory=dict)


class RunnerUp(_Part):
    """A plan that lost: what it is called, and its predicted step time and peak memory."""

    name: str
    seconds: float
    peak_bytes: int
    fits: bool = True


class SearchRecord(_Part):
    """How a plan was found.

    ``bound_seconds`` is a lower bound on the step time of any plan in the declared space under the
    same cost model; ``gap`` is ``(seconds - bound) / seconds``.
    """

    seed: int = 0
    seconds: float = 0.0
    bound_seconds: float = 0.0
    gap: float = 1.0
    status: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    runners_up: tuple[RunnerUp, ...] = ()


class Plan(_Part):
    """A complete answer: how every operator is split, where it runs, and in which order."""

    schema_version: int = SCHEMA_VERSION
    model: ModelInfo
    cluster: ClusterInfo
    recipe: Recipe = Recipe()
    transformation: Transformation
    placement: Placement
    order: Order
    prediction: Prediction | None = None
    search: SearchRecord | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        for index, stage in enumerate(self.placement.stages):
            with _located(f"/placement/stages/{index}"):
                _ = stage.mesh
        for index, lane in enumerate(self.order.lanes):
            with _located(f"/order/lanes/{index}"):
                _ = lane.parsed
        if self.placement.stages and self.world_size > self.cluster.devices:
            raise IllegalPlanError(
                f"/cluster/devices: the cluster has {self.cluster.devices} devices, but a stage uses device "
                f"{self.world_size - 1}"
            )
        return self

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that a stage uses, ascending."""
        return tuple(sorted({d for stage in self.placement.stages for d in stage.devices}))

    @property
    def world_size(self) -> int:
        """Ranks that must take part: one more than the highest device id."""
        return max(self.devices) + 1

    def replace(self, **parts: Any) -> Plan:
        """A plan with some parts exchanged; predictions are dropped unless given."""
        if {"transformation", "placement", "order"} & parts.keys():
            parts = {"prediction": None, "search": None, **parts}
        return Plan(**{name: parts.get(name, getattr(self, name)) for name in Plan.model_fields})

    def summary(self) -> str:
        """What a person wants to know first, as text: stages, splits, time, memory, bound, runners-up."""
        from searchspace.summary import summary

        return summary(self)

    def to_json(self) -> str:
        """The JSON text: two-space indent, fields in declared order, final newline."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=False), indent=2) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON text; atomic: an interrupted save leaves the file that was there."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Parse; PlanFileError (with line and column, or JSON pointer) or PlanMismatchError (version)."""
        try:
            data = json.loads(text, object_pairs_hook=_without_duplicates)
        except json.JSONDecodeError as error:
            raise PlanFileError(
                f"{source}: not JSON, or cut short: {error.msg} at line {error.lineno} column {error.colno}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise PlanFileError(f"{source}: {error}") from None
        if not isinstance(data, dict):
            raise PlanFileError(f"{source}: expected a JSON object, got {type(data).__name__}")
        version = data.get("schema_version")
        if isinstance(version, int) and version != SCHEMA_VERSION:
            raise PlanMismatchError(
                f"{source}: schema version {version} is not supported; this autoplan reads version {SCHEMA_VERSION}"
            )
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise PlanFileError("\n".join(_pointers(source, error))) from None
        except AutoplanError as error:
            raise PlanFileError(f"{source}: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file; PlanFileError when it is missing or not a plan."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanFileError(f"{path}: cannot read the plan: {error}") from None
        return cls.from_json(text, str(path))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The published JSON Schema."""
        return cls.model_json_schema()


def _pointers(source: str, error: ValidationError) -> list[str]:
    return [
        f"{source}: /{'/'.join(map(str, item['loc']))}: {item['msg']}"
        for item in error.errors(include_url=False, include_context=False)
    ]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice in one object")
        found[key] = value
    return found


@contextmanager
def _located(pointer: str) -> Iterator[None]:
    """Errors about a part of a plan say which part, as a JSON pointer."""
    try:
        yield
    except PlanError as error:
        raise type(error)(f"{pointer}: {error}") from None


def check_writable(path: Path) -> None:
    """Raise PlanFileError where no file can be written at ``path``: to be told before the work, not after."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if path.is_dir():
        raise PlanFileError(f"{path}: is a folder; give the name of a file")
    if not folder.is_dir():
        raise PlanFileError(f"{path}: {folder} is no folder")
    if not os.access(folder, os.W_OK):
        raise PlanFileError(f"{path}: no permission to write in {folder}")


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` through a temporary file in the same folder."""
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
