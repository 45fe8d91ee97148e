"""Local operators (see :mod:`autoplan.operators.registry`); needs torch only."""

from autoplan.operators import (
    attention,
    convolution,
    creation,
    embedding,
    linear,
    loss,
    normalisation,
    randomness,
    reduction,
)
from autoplan.operators.registry import local_operator, names, resolve

__all__ = [
    "attention",
    "convolution",
    "creation",
    "embedding",
    "linear",
    "local_operator",
    "loss",
    "names",
    "normalisation",
    "randomness",
    "reduction",
    "resolve",
]
