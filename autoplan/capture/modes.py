"""Training and evaluation mode: whether the forward that was captured is that of the other mode too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

import torch
from torch import nn

from autoplan.capture.captured import Captured
from autoplan.capture.front import capture_call
from autoplan.capture.standin import SavedModule
from searchspace.errors import AutoplanWarning, CaptureError


def in_mode(captured: Captured, training: bool) -> Captured:
    """The same call of ``captured.model.train(training)``; the model is as before afterwards."""
    c = captured
    with _switched(c.model, training):
        return capture_call(c.model, c.signature, c.mode, c.precision, c.loss_fn, c.device, c.graph.name)


def difference(captured: Captured, training: bool) -> str:
    """See :meth:`Captured.difference`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoplanWarning)  # the capture has said it
            other = in_mode(captured, training)
    except CaptureError as error:
        return f"it cannot be captured so: {error}"
    mine, theirs = captured.graph, other.graph
    for ours, others in zip_longest(mine.operators, theirs.operators):
        if ours != others:
            op = ours or others
            return f"{op.target} in {op.module or 'the model'}"
    for (buffer, _), (other_buffer, _) in zip_longest(mine.buffer_updates, theirs.buffer_updates, fillvalue=("", "")):
        if buffer != other_buffer:
            graph = mine if buffer else theirs
            return f"buffer {graph.tensor[buffer or other_buffer].source} is updated"
    if not _same_constants(captured, other):
        return "a tensor that the model makes is another one"
    outputs = (captured.structure.tensors, captured.structure.baked) == (other.structure.tensors, other.structure.baked)
    return "" if mine == theirs and outputs else "its outputs are others"


def _same_constants(one: Captured, other: Captured) -> bool:
    return one.constants.keys() == other.constants.keys() and all(
        value.is_meta or torch.equal(value, other.constants[name]) for name, value in one.constants.items()
    )


@contextmanager
def _switched(model: nn.Module, training: bool) -> Iterator[None]:
    """``model`` in a mode; undoes whatever a ``train`` of its own changes besides."""
    saved = [SavedModule(module) for module in model.modules()]
    learned = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.train(training)
        yield
    finally:
        for state in saved:
            state.restore()
        for parameter, flag in learned:
            parameter.requires_grad_(flag)
