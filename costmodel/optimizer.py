"""Optimizers: state they keep per parameter, and the memory traffic of a step.

Traffic is that of torch's default multi-tensor ("foreach") kernels, counted from their sequence of
element-wise operations; the state is float32, as the master weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.device import DeviceSpec
from costmodel.units import Bytes, Seconds
from searchspace.errors import IllegalPlanError
from searchspace.graph import DTYPE_BYTES


@dataclass(frozen=True)
class OptimizerCost:
    """Values per parameter: ``states`` kept, ``traffic`` read and written by a step, ``temporaries`` alive in it."""

    states: int
    traffic: int
    temporaries: int = 1


OPTIMIZERS: Mapping[str, OptimizerCost] = {
    "none": OptimizerCost(0, 0, 0),
    "sgd": OptimizerCost(0, 3, 0),  # p += -lr g
    "momentum": OptimizerCost(1, 8, 0),  # buf *= mu; buf += g; p += -lr buf
    "adagrad": OptimizerCost(1, 12),
    "rmsprop": OptimizerCost(1, 14),
    "adadelta": OptimizerCost(2, 24),
    # p *= 1 - lr wd; m.lerp_(g); v *= b2; v += g g; s = sqrt v; s /= c; s += eps; p += m / s
    "adam": OptimizerCost(2, 19),
    "adamw": OptimizerCost(2, 21),
    "adamax": OptimizerCost(2, 19),
    "nadam": OptimizerCost(2, 24),
    "radam": OptimizerCost(2, 24),
    "lion": OptimizerCost(1, 12),
}


def optimizer_cost(name: str) -> OptimizerCost:
    """The entry of ``name``; IllegalPlanError with the known names."""
    if name.lower() not in OPTIMIZERS:
        raise IllegalPlanError(f"unknown optimizer {name!r}; known optimizers are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name.lower()]


def state_bytes(elements: int, optimizer: str, dtype: str = "float32") -> Bytes:
    """Bytes of optimizer state for ``elements`` parameters whose master copy is in ``dtype``."""
    return optimizer_cost(optimizer).states * elements * DTYPE_BYTES[dtype]


def step_seconds(elements: int, optimizer: str, device: DeviceSpec, dtype: str = "float32") -> Seconds:
    """One step on ``elements`` parameters: memory bound, and linear (kernels take many parameters at once)."""
    return optimizer_cost(optimizer).traffic * elements * DTYPE_BYTES[dtype] / device.memory_rate


def step_bytes(elements: int, optimizer: str, dtype: str = "float32") -> Bytes:
    """Bytes of temporaries while the optimizer steps on ``elements`` parameters."""
    return optimizer_cost(optimizer).temporaries * elements * DTYPE_BYTES[dtype]
