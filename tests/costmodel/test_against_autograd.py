"""What the model says autograd saves, against what it saves."""

import pytest
import torch

from autoplan.capture.front import capture
from autoplan.zoo import build
from costmodel.cluster import Cluster
from costmodel.evaluate import _Evaluation
from costmodel.model import CostModel
from searchspace.resolve import resolve
from tests.costmodel.plans import whole


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("gpt-tiny", 0.01),
        ("bert-tiny", 0.01),
        ("resnet-tiny", 0.01),
        ("vit-tiny", 0.05),
        ("llama-tiny", 0.12),  # on CPU rms_norm is not one kernel, and saves the normalised input as well
    ],
)
def test_saved_bytes(name, tolerance):
    example = build(name, batch=8, device="cpu")
    graph = capture(example.model, example.args, example.kwargs).graph
    plan = whole(graph)
    resolution = resolve(graph, plan)
    model = CostModel(graph, Cluster.parse("cpu:1"), plan.recipe, resolution.time)
    predicted = _Evaluation(resolution, model)._activations(0).saved

    elsewhere = [*example.model.parameters(), *example.model.buffers(), *example.kwargs.values()]
    known = {t.untyped_storage().data_ptr() for t in elsewhere if isinstance(t, torch.Tensor)}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        example.model(*example.args, **example.kwargs)
    assert predicted == pytest.approx(sum(saved.values()), rel=tolerance)
