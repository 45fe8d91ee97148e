"""Captured graphs compute what the model computes: outputs, loss, gradients, buffers, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture import capture
from autoplan.capture.structure import flatten, is_cache
from searchspace.errors import CaptureError
from searchspace.graph import Context, Graph
from tests.capture.interpreter import run_captured
from tests.capture.models import GPT, MODELS, build, tokens


def own_loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def assert_same_as_eager(
    captured: Any, model: nn.Module, args: Any, kwargs: Any, loss_of: Any = own_loss, tolerance: float = 1e-12
) -> None:
    """Equality of outputs, loss, gradients and buffers with a copy of the eager model, called with the same.

    Differences are relative to the largest value of any gradient, and larger where the model computes in float32.
    """
    graph: Graph = captured.graph
    reference = copy.deepcopy(model)
    expected = reference(*copy.deepcopy(args), **kwargs)
    loss = loss_of(expected)
    loss.backward()
    found = run_captured(captured, args, kwargs)
    close(found[graph.loss], loss, 1.0, tolerance)
    output = captured.unflatten_outputs(found)
    assert type(output) is type(expected)
    leaves, wanted_leaves = (
        {path: leaf for path, leaf in flatten(value)[0] if not is_cache(leaf)} for value in (output, expected)
    )
    assert list(leaves) == list(wanted_leaves)
    for path, leaf in leaves.items():
        close(leaf, wanted_leaves[path], 1.0, tolerance)
    trained = [t for t in graph.parameters if t.requires_grad]
    gradients = torch.autograd.grad(found[graph.loss], [found[t.name] for t in trained], allow_unused=True)
    references = [reference.get_parameter(t.source).grad for t in trained]
    largest = max(float(g.abs().max()) for g in references if g is not None)
    for tensor, gradient, wanted in zip(trained, gradients, references, strict=True):
        assert (gradient is None) == (wanted is None), tensor.source
        if wanted is not None:
            close(gradient, wanted, largest, tolerance)
    updates = dict(graph.buffer_updates)
    for name in captured.named_buffers():
        close(found[updates.get(name, name)], reference.get_buffer(graph.tensor[name].source), 1.0, tolerance)


def close(found: Any, expected: Any, scale: float, tolerance: float) -> None:
    """max |a - b| <= tolerance x max(scale, max |b|) for floating-point tensors, equality for all others."""
    if not isinstance(expected, torch.Tensor) or not expected.is_floating_point():
        assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
        return
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    difference = float((found - expected).detach().abs().max())
    assert difference <= tolerance * max(scale, float(expected.detach().abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_graph_equals_eager_model(name: str) -> None:
    model, args, kwargs = build(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    captured = capture(model, args, kwargs)
    assert_same_as_eager(captured, model, args, kwargs, tolerance=1e-6 if name.startswith("hf_") else 1e-12)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_meta_gives_the_same_graph_as_real(name: str) -> None:
    model, args, kwargs = build(name)
    real = capture(model, args, kwargs).graph
    model = model.to("meta")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if isinstance(model, GPT):
        model.head.weight = model.wte.weight
    args = tuple(arg.to("meta") for arg in args)
    kwargs = {key: value.to("meta") for key, value in kwargs.items()}
    assert capture(model, args, kwargs).graph == real


@pytest.mark.parametrize("name", MODELS)
def test_inference_has_no_loss_and_no_gradient(name: str) -> None:
    model, args, kwargs = build(name)
    model.train()
    captured = capture(model, args, kwargs, mode="inference")
    assert model.training
    assert captured.graph.loss is None
    assert not captured.graph.buffer_updates
    assert not any(tensor.requires_grad for tensor in captured.graph.tensors)
    with torch.no_grad():
        expected = model.eval()(*args, **kwargs)
    output = captured.unflatten_outputs(run_captured(captured, args, kwargs))
    close(own_loss(output), own_loss(expected), 1.0, 1e-6 if name.startswith("hf_") else 1e-12)


def test_tied_parameter_is_one_tensor_with_aliases() -> None:
    model, args, kwargs = build("gpt")
    captured = capture(model, args, kwargs)
    tensor = captured.graph.tensor["p_wte_weight"]
    assert (tensor.source, tensor.aliases) == ("wte.weight", ("head.weight",))
    assert captured.names(tensor) == ("wte.weight", "head.weight")
    assert captured.parameter("p_wte_weight") is captured.parameter("head.weight") is model.head.weight
    assert len(captured.graph.parameters) == len(list(model.parameters()))
    consumers = {op.target for op, _ in captured.graph.consumers["p_wte_weight"]}
    assert len(consumers) == 2


def test_operator_names_are_module_path_and_kind() -> None:
    model, args, kwargs = build("gpt")
    graph = capture(model, args, kwargs).graph
    assert "h.0.up/linear" in graph.operator
    assert graph.operator["h.1.ln_2/layer_norm"].module == "h.1.ln_2"
    assert all(name.isidentifier() for name in graph.tensor)
    assert capture(model, args, kwargs).graph == graph


def test_bf16_casts_parameters_and_inputs_but_not_buffers() -> None:
    model, args, kwargs = build("resnet")
    captured = capture(model.float(), (args[0].float(), args[1]), kwargs, precision="bf16")
    dtypes = {t.kind: {u.dtype for u in captured.graph.of_kind(t.kind)} for t in captured.graph.tensors}
    assert dtypes["parameter"] == {"bfloat16"}
    assert dtypes["input"] == {"bfloat16", "int64"}
    assert dtypes["buffer"] == {"float32", "int64"}
    inputs = captured.flatten_call((args[0].float(), args[1]))
    assert inputs["x_args_0"].dtype == torch.bfloat16


def test_bf16_graph_equals_model_in_bf16() -> None:
    model, args, kwargs = build("gpt")
    captured = capture(model.float(), args, kwargs, precision="bf16")
    found = run_captured(captured, args)[captured.graph.loss]
    close(found, copy.deepcopy(model).bfloat16()(*args), 1.0, 2**-7)


def test_autocast_records_context_and_real_dtypes() -> None:
    model, args, kwargs = build("gpt")
    model = model.float()
    captured = capture(model, args, kwargs, precision="autocast")
    linear = captured.graph.operator["h.0.up/linear"]
    assert linear.context.autocast == "bfloat16"
    assert captured.graph.tensor[linear.outputs[0]].dtype == "bfloat16"
    assert captured.graph.tensor["p_h_0_up_weight"].dtype == "float32"
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(*args)
    assert expected.dtype == torch.float32
    close(run_captured(captured, args)[captured.graph.loss], expected, 1.0, 1e-6)


class Regions(nn.Module):
    """Autocast and no_grad regions, a frozen parameter, an unused one, a constant, an integer state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen, self.unused = (nn.Linear(6, 6) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.table = torch.linspace(0, 1, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("again", self.steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.a(x).abs().mean()
            self.steps += 1
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(x)
            with torch.autocast("cpu", enabled=False):
                y = self.frozen(y.float() + self.table)
        return (self.a(y) * scale.detach() / self.steps + torch.tensor([1.0, 2.0] * 3)).pow(2).mean()


def test_regions_keep_their_context() -> None:
    torch.manual_seed(0)
    model, args = Regions(), (torch.randn(4, 6),)
    captured = capture(model, args)
    graph = captured.graph
    assert_same_as_eager(captured, model, args, {})
    contexts = {op.context.autocast for op in graph.operators if op.target == "aten.linear.default"}
    assert contexts == {None, "bfloat16"}
    assert any(op.context.no_grad for op in graph.operators)
    assert not graph.tensor["p_frozen_weight"].requires_grad
    assert graph.tensor["p_unused_weight"].requires_grad
    assert not graph.consumers["p_unused_weight"]
    assert graph.tensor["b_steps"].aliases == ("again",)
    assert [buffer for buffer, _ in graph.buffer_updates] == ["b_steps"]
    assert {name: tuple(value.shape) for name, value in captured.constants.items()} == {
        "c_table": (6,),
        "c_lifted_tensor_0": (6,),
    }


def test_nested_regions_keep_both_contexts() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    a = self.lin(x)
                b = self.lin(x)
            with torch.no_grad(), torch.enable_grad():
                c = self.lin(x)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                d = self.lin(x)
            return (a + b + c + d).pow(2).mean()

    torch.manual_seed(0)
    model, args = Nested(), (torch.randn(4, 6),)
    captured = capture(model, args)
    assert_same_as_eager(captured, model, args, {}, tolerance=1e-6)
    contexts = [op.context for op in captured.graph.operators if op.target == "aten.linear.default"]
    assert contexts == [Context(True, "bfloat16"), Context(False, "bfloat16"), Context(False, None)]


class Normalised(nn.Module):
    """Operators that keep statistics, each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.batch = nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.instance(self.batch(self.lin(x))).pow(3).mean()


def test_running_statistics_become_updates() -> None:
    torch.manual_seed(0)
    model, args = Normalised().double(), (torch.randn(4, 3, 6).double(),)
    captured = capture(model, args)
    assert_same_as_eager(captured, model, args, {})
    assert len(captured.graph.buffer_updates) == 2 + 3 + 2
    assert not any(captured.graph.tensor[new].requires_grad for _, new in captured.graph.buffer_updates)


def test_common_subexpressions_are_computed_once_but_random_ones_are_not() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            dead = x.cos()
            assert dead.shape == x.shape
            return ((x.exp() @ w.t() + x.exp() @ w.t()) * torch.rand_like(x) * torch.rand_like(x)).sum()

    graph = capture(Twice(), (torch.randn(4, 4), torch.randn(4, 4)), mode="inference").graph
    targets = [op.target for op in graph.operators]
    assert targets.count("aten.exp.default") == 1
    assert targets.count("aten.matmul.default") == 1
    assert "aten.cos.default" not in targets
    assert len([op for op in graph.operators if op.name.startswith(("rand", "uniform"))]) == 2


def test_conv1d_becomes_one_linear() -> None:
    model, args, kwargs = build("hf_gpt2")
    graph = capture(model, args, kwargs).graph
    assert not any(op.target == "aten.addmm.default" for op in graph.operators)
    linear = graph.operator["transformer.h.0.mlp.c_fc/linear"]
    assert graph.tensor[linear.inputs[0]].shape == (4, 8, 24)


def test_loss_function_with_arguments() -> None:
    torch.manual_seed(0)
    model, ids, labels = GPT().double(), tokens(), tokens()

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)

    captured = capture(model, (ids,), loss_fn=loss_fn, loss_args=(labels,))
    found = run_captured(captured, (ids,), loss_args=(labels,))
    torch.testing.assert_close(found[captured.graph.loss], loss_fn(model(ids), labels))
    assert captured.graph.inputs == ("x_args_0", "x_loss_args_0")
    assert any(op.module == "loss" for op in captured.graph.operators)
    assert len(captured.graph.outputs) == 1


def test_checkpointed_regions_keep_their_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.a, x, use_reentrant=False)
            return checkpoint(self.b, x, use_reentrant=True).pow(2).mean()

    torch.manual_seed(0)
    model, args = Checkpointed().double(), (torch.randn(4, 6).double(),)
    captured = capture(model, args)
    assert_same_as_eager(captured, model, args, {})
    assert len(captured.graph.parameters) == 4


def test_masked_transformer_encoder() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    x = torch.randn(4, 6, 16).double()
    kwargs = {"mask": nn.Transformer.generate_square_subsequent_mask(6).double()}
    captured = capture(model, (x,), kwargs, loss_fn=lambda y: y.pow(2).mean())
    assert_same_as_eager(captured, model, (x,), kwargs, lambda y: y.pow(2).mean())


def test_model_state_is_restored() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.calls, self.history, self.last = 0, [], None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.history.append(x)
            self.last = self.lin(x)
            return self.last.mean()

    model = Stateful()
    history, lin, weight = model.history, model.lin, model.lin.weight
    with pytest.raises(CaptureError, match="reads and changes"):
        capture(model, (torch.randn(2, 4),))
    assert model.calls == 0
    assert model.history is history and history == []
    assert model.last is None
    assert model.lin is lin and model.lin.weight is weight


def test_lstm_parameters_are_found_in_its_flat_list() -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0].pow(2).mean()

    model, args = Recurrent().double(), (torch.randn(3, 4, 6).double(),)
    captured = capture(model, args)
    assert_same_as_eager(captured, model, args, {})
    assert not captured.constants


def test_loss_without_parameters_is_refused() -> None:
    class Identity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(CaptureError, match="does not depend on any parameter that requires a gradient"):
        capture(Identity(), (torch.randn(3, 2),), loss_fn=lambda y: y.mean())
    assert capture(Identity(), (torch.randn(3, 2),), mode="inference").graph.outputs == ("x_args_0",)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(CaptureError, match="expected mode to be one of train, inference, got 'eval'"):
        capture(nn.Linear(2, 2), (torch.randn(1, 2),), mode="eval")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="expected precision to be one of float32, bf16, autocast, got 'fp8'"):
        capture(nn.Linear(2, 2), (torch.randn(1, 2),), precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="that this machine has, such as 'cpu', got 'maia'"):
        capture(nn.Linear(2, 2), (torch.randn(1, 2),), device="maia")
    with pytest.raises(CaptureError, match="loss_fn is a module with parameters"):
        capture(nn.Linear(2, 2), (torch.randn(1, 2),), loss_fn=nn.Linear(2, 1))


def test_deep_model_on_meta_is_captured_without_weights() -> None:
    with torch.device("meta"):
        model = GPT(vocabulary=50257, width=12288, heads=96, layers=6, length=2048)
        ids = torch.zeros(8, 2048, dtype=torch.long)
    captured = capture(model, (ids, ids), precision="bf16")
    assert sum(t.bytes for t in captured.graph.parameters) > 20e9
    assert captured.graph.batch == 8
