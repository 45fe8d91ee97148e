"""Tensors made from nothing: every dimension is made as large as the shard needs."""

from __future__ import annotations

import torch

from autoplan.capture.call import Call, Traits, overload
from autoplan.capture.rules.building import elements, letters, opaque, traits, words
from searchspace.graph import LocalEnd, LocalOffset, TensorDim

CREATIONS = words("zeros ones full empty empty_strided")
LIKE = words("zeros_like ones_like full_like empty_like")
WHOLE = words("eye linspace logspace tril_indices triu_indices scalar_tensor hann_window hamming_window arange")


def draws(target: str) -> bool:
    """Whether torch says that the operator draws random numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in overload(target).tags  # type: ignore[attr-defined]


def creation(call: Call) -> Traits | None:
    """``-> a b``."""
    return traits(call, {}, [letters(len(call.outputs[0].shape))], family="creation", sizes={"size": 0})


def like(call: Call) -> Traits | None:
    """``a b -> a b``: only the shape of the input matters."""
    marks = letters(len(call.outputs[0].shape))
    return traits(call, {0: marks}, [marks], family="creation")


def whole(call: Call) -> Traits | None:
    """Made whole on every rank."""
    return traits(call, {}, [[None] * len(t.shape) for t in call.outputs], family="creation")


def positions(call: Call) -> Traits | None:
    """autoplan.arange: ``-> a`` between the shard's ends."""
    at = TensorDim(0, 0, output=True)
    return traits(call, {}, [["a"]], family="creation", replace={"first": LocalOffset(at), "last": LocalEnd(at)})


def drawn(call: Call) -> Traits | None:
    """autoplan.uniform and autoplan.normal: ``-> a b`` at the block's position."""
    rank = len(call.outputs[0].shape)
    return traits(
        call, {}, [letters(rank)], family="random", sizes={"size": 0},
        starts={"starts": [TensorDim(0, d, output=True) for d in range(rank)]},
        flops=10 * elements(call.outputs[0]), random=True,
    )  # fmt: skip


def stateful(call: Call) -> Traits | None:
    """Random operators of torch's own generator: whole, and random."""
    return opaque(call, family="random", random=True)
