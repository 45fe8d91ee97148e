"""The zoo: published sizes, clean export, no allocation, losses that train."""

import math
import time

import pytest
import torch

from autoplan import zoo
from searchspace.errors import ModelError

TINY = ("gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "mlp-tiny")


def transformer(layers: int, width: int, hidden: int) -> int:
    """Parameters of pre-norm layers with biases: four projections, two of the feed-forward, two norms."""
    return layers * (4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width)


def llama(layers: int, width: int, kv: int, hidden: int) -> int:
    per_layer = 2 * width * width + 2 * width * kv + 3 * width * hidden + 2 * width
    return layers * per_layer + 2 * 128_256 * width + width


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt3-125m", (51_200 + 2048) * 768 + transformer(12, 768, 3072) + 2 * 768),
        ("gpt3-175b", (51_200 + 2048) * 12288 + transformer(96, 12288, 49152) + 2 * 12288),
        ("llama3-8b", 8_030_261_248),  # the published model's own count
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", llama(126, 16384, 1024, 53248)),
        ("bert-base", 109_514_298),  # published masked language model: 109,514,298
        ("vit-base-16", 86_567_656),
        ("vit-large-16", 304_326_632),
        ("resnet-18", 11_689_512),
        ("resnet-50", 25_557_032),
        ("resnet-152", 60_192_808),
        ("wide-resnet-101", 126_886_696),
        ("mlp-tiny", 2 * (16 * 32 + 32 + 32 * 16 + 16) + 16 * 8 + 8),
    ],
)
def test_parameters_of_published_models(name: str, expected: int) -> None:
    assert zoo.parameter_count(name) == expected


def test_largest_model_is_built_in_seconds_without_memory() -> None:
    start = time.perf_counter()
    model, args, kwargs = zoo.build("gpt3-175b", batch=1536)
    assert time.perf_counter() - start < 10
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers(), *kwargs.values()])
    assert args == () and kwargs["tokens"].shape == (1536, 2048)


@pytest.mark.parametrize("name", TINY)
def test_exported_model_computes_the_same(name: str) -> None:
    model, args, kwargs = zoo.build(name, batch=3, device="cpu", dtype="float64", seed=1)
    loss = model(*args, **kwargs)
    assert loss.shape == () and torch.isfinite(loss)
    model = zoo.build(name, batch=3, device="cpu", dtype="float64", seed=1).model  # batch norm updates its buffers
    exported = torch.export.export(model, args, kwargs, strict=False).module()
    torch.testing.assert_close(exported(*args, **kwargs), loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", TINY)
def test_exports_on_meta(name: str) -> None:
    program = torch.export.export(*zoo.build(name, batch=2), strict=False)
    assert any("cross_entropy" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("name", TINY)
def test_training_lowers_the_loss(name: str) -> None:
    model, args, kwargs = zoo.build(name, batch=4, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = model(*args, **kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in model.parameters())


def test_initial_loss_of_a_language_model_is_that_of_a_uniform_guess() -> None:
    model, _, kwargs = zoo.build("gpt-tiny", device="cpu")
    assert model(**kwargs).item() == pytest.approx(math.log(256), rel=0.02)


def test_seed_decides_weights_and_inputs_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (zoo.build("gpt-tiny", device="cpu", seed=3) for _ in range(2))
    other = zoo.build("gpt-tiny", device="cpu", seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert torch.equal(first.kwargs["tokens"], second.kwargs["tokens"])
    assert not torch.equal(first.model.token.weight, other.model.token.weight)


def test_embeddings_are_tied_where_the_published_model_ties_them() -> None:
    gpt, bert = zoo.build("gpt-tiny").model, zoo.build("bert-tiny").model
    assert gpt.head.weight is gpt.token.weight and bert.head.weight is bert.token.weight
    llama_model = zoo.build("llama-tiny").model
    assert llama_model.head.weight is not llama_model.token.weight


def test_sizes_can_be_changed() -> None:
    model, _, kwargs = zoo.build("gpt-tiny", batch=7, sequence=96, vocabulary=50257, dtype="bf16")
    assert kwargs["tokens"].shape == (7, 96)
    assert model.position.weight.shape == (96, 64)
    assert model.token.weight.shape == (50257, 64) and model.token.weight.dtype == torch.bfloat16
    assert zoo.build("vit-tiny", dtype=torch.float16).kwargs["images"].dtype == torch.float16


def test_padding_does_not_reach_the_other_positions() -> None:
    model, _, kwargs = zoo.build("bert-tiny", batch=2, device="cpu", dtype="float64", labels=False)
    kwargs["attention_mask"][:, -5:] = False
    first = model(**kwargs)
    kwargs["tokens"][:, -5:] = 0
    torch.testing.assert_close(model(**kwargs)[:, :-5], first[:, :-5])


def test_without_labels_the_model_predicts() -> None:
    model, _, kwargs = zoo.build("llama-tiny", batch=2, labels=False, device="cpu")
    assert "labels" not in kwargs and model(**kwargs).shape == (2, 64, 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gpt3-175B"}, "no model 'gpt3-175B' in the zoo; did you mean gpt3-175b"),
        ({"name": "qqqqqq"}, "there are gpt-tiny"),
        ({"name": "vit-tiny", "sequence": 8}, "vit-tiny takes no sequence; leave out sequence=8"),
        ({"name": "gpt-tiny", "sequence": 0}, "expected sequence >= 1, got 0"),
        ({"name": "gpt-tiny", "batch": 0}, "expected batch >= 1, got 0"),
        ({"name": "gpt-tiny", "dtype": "int3"}, "unknown dtype 'int3'; known: float64"),
        ({"name": "gpt-tiny", "depth": 3}, "gpt-tiny has no size 'depth'; it has layers, width"),
        ({"name": "gpt-tiny", "heads": 5}, "expected a width that 5 heads divide, got 64"),
        ({"name": "llama-tiny", "groups": 3}, "heads / groups whole, got 64, 4, 3"),
        ({"name": "vit-tiny", "patch": 7}, "an image that patches of 7 divide, got 32"),
    ],
)
def test_bad_requests_are_explained(arguments: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("(", r"\(")):
        zoo.build(**arguments)
