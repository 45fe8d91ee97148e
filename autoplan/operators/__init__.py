"""Local operators (see :mod:`autoplan.operators.registry`); needs torch only."""

from autoplan.operators import (
    attention,
    convolution,
    creation,
    embedding,
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
    "local_operator",
    "loss",
    "names",
    "normalisation",
    "randomness",
    "reduction",
    "resolve",
]
