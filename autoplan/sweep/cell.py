"""One cell of a sweep: what is searched, and what came out."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from autoplan.model_reference import model_name, source_digest
from searchspace.errors import AutoplanError, InfeasibleError
from searchspace.plan import Plan
from searchspace.quantity_text import bytes_text

Status = Literal["ok", "infeasible", "failed"]


CAPTURE_OPTIONS = ("mode", "precision", "loss_fn", "loss_args", "batch_dims")
"""Options of a search that decide what is captured."""


@dataclass(frozen=True)
class Cell:
    """One search.

    Fields
        key: names the cell's files: readable, and unique by a digest of everything that decides the result,
            the text that defines the model included.
        search, capture: keyword arguments of ``autoplan.search`` and ``autoplan.capture``.
        model_options: keyword arguments of the model's function.
        function: makes the model, when it is not known by a reference.
    """

    key: str
    model: str
    cluster: str
    global_batch: int | None
    sequence: int | None
    memory_limit: int | None
    search: Mapping[str, Any]
    capture: Mapping[str, Any]
    model_options: Mapping[str, Any]
    function: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls,
        model: str | Callable[..., Any],
        cluster: str,
        global_batch: int | None = None,
        sequence: int | None = None,
        memory_limit: int | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        model_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Cell:
        """``model`` is a reference or a function; ``options`` are keyword arguments of ``autoplan.search``."""
        name = model_name(model)
        what = (name, cluster, global_batch, sequence, memory_limit)
        digest = _digest(*what, dict(options), dict(model_options), source_digest(model))
        limit = "" if memory_limit is None else bytes_text(memory_limit).replace(" ", "")
        parts = (name, cluster, _tagged("b", global_batch), _tagged("s", sequence), limit)
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(filter(None, parts)))[-100:].strip("-.")
        return cls(
            f"{readable}-{digest}",
            *what,
            search={name: value for name, value in options.items() if name not in CAPTURE_OPTIONS},
            capture={name: value for name, value in options.items() if name in CAPTURE_OPTIONS},
            model_options=dict(model_options),
            function=None if isinstance(model, str) else model,
        )

    @property
    def capture_key(self) -> tuple[str, int | None]:
        """Cells with equal keys are searched on the same capture."""
        return self.model, self.sequence

    @property
    def portable(self) -> Cell:
        """The cell for another process: without what only the capture needs."""
        return replace(self, function=None, capture={})


@dataclass(frozen=True)
class CellResult:
    """What a search gave, as one row of the table.

    ``error`` and ``missing_bytes`` (by how much the smallest plan exceeds the limit, where known) say why
    there is no plan; times are in seconds.
    """

    key: str
    model: str
    cluster: str
    global_batch: int | None
    sequence: int | None
    memory_limit: int | None
    status: Status
    step_seconds: float | None = None
    samples_per_second: float | None = None
    peak_bytes: int | None = None
    bound_seconds: float | None = None
    gap: float | None = None
    devices_used: int | None = None
    stages: int | None = None
    micro_batches: int | None = None
    search_seconds: float = 0.0
    fingerprint: str = ""
    error: str = ""
    missing_bytes: int | None = None

    @classmethod
    def of(cls, cell: Cell, status: Status, **values: Any) -> CellResult:
        about = (cell.key, cell.model, cell.cluster, cell.global_batch, cell.sequence, cell.memory_limit)
        return cls(*about, status, **values)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def run_cell(cell: Cell, captured: Any) -> tuple[CellResult, Plan | None]:
    """Search one cell on what ``autoplan.capture`` returned.  Whatever fails is a result, not an exception."""
    from autoplan import api

    start = time.perf_counter()
    try:
        plan = api.search(
            captured,
            cluster=cell.cluster,
            global_batch=cell.global_batch,
            memory_limit=cell.memory_limit,
            **cell.search,
        )
    except InfeasibleError as error:
        return _failed(cell, "infeasible", str(error), start, error.missing_bytes), None
    except AutoplanError as error:
        return _failed(cell, "failed", str(error), start), None
    except Exception as error:
        return _failed(cell, "failed", f"{type(error).__name__}: {error}", start), None
    return _found(cell, plan, time.perf_counter() - start), plan


def _found(cell: Cell, plan: Plan, seconds: float) -> CellResult:
    predicted, record = plan.prediction, plan.search
    step = predicted.seconds if predicted is not None else None
    batch = plan.recipe.global_batch
    return CellResult.of(
        cell,
        "ok",
        step_seconds=step,
        samples_per_second=batch / step if batch and step else None,
        peak_bytes=max(predicted.peak_bytes, default=None) if predicted is not None else None,
        bound_seconds=record.bound_seconds if record is not None else None,
        gap=record.gap if record is not None else None,
        devices_used=len(plan.devices),
        stages=len(plan.placement.stages),
        micro_batches=plan.transformation.micro_batches,
        search_seconds=seconds,
        fingerprint=plan.model.fingerprint,
    )


def _failed(cell: Cell, status: Status, error: str, start: float, missing: int | None = None) -> CellResult:
    seconds = time.perf_counter() - start
    return CellResult.of(cell, status, error=error, search_seconds=seconds, missing_bytes=missing)


def _tagged(tag: str, value: int | None) -> str:
    return "" if value is None else f"{tag}{value}"


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=_stable).encode()).hexdigest()[:10]


def _stable(value: Any) -> str:
    """A text for an option that JSON does not know: the same in every process for the same object."""
    if callable(value):
        return source_digest(value)
    from ray import cloudpickle

    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    except Exception:
        return type(value).__qualname__  # the sweep refuses it with its path
