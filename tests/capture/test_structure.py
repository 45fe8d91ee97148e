"""Nested values come apart into leaves with paths, and together again as they were."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from autoplan.capture.structure import flatten, holds_tensors, is_cache, select

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Record:
    first: Any
    second: Any = None


leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
key = st.text("abc", min_size=1, max_size=2)
nested = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(key, inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Record, inner, inner)
        | st.dictionaries(key, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(nested)
def test_round_trip(value: Any) -> None:
    leaves, structure = flatten(value)
    again = structure.unflatten([item for _, item in leaves])
    assert again == value and type(again) is type(value)
    assert structure.leaves == len(leaves)


def test_paths_and_order() -> None:
    value = {"b": [1, (2, 3)], "a": Record(4, {"c": None})}
    leaves, structure = flatten(value, "args")
    assert leaves == [
        ("args.b.0", 1), ("args.b.1.0", 2), ("args.b.1.1", 3), ("args.a.first", 4), ("args.a.second.c", None),
    ]  # fmt: skip
    assert list(structure.unflatten([0] * 5)) == ["b", "a"]
    assert select(leaves, "args.b") == ["args.b.0", "args.b.1.0", "args.b.1.1"]


def test_model_outputs_keep_their_type() -> None:
    output = CausalLMOutputWithPast(loss=torch.ones(()), logits=torch.ones(2, 3), hidden_states=(torch.ones(1),))
    leaves, structure = flatten(output)
    assert [path for path, _ in leaves] == ["loss", "logits", "hidden_states.0"]
    again = structure.unflatten([1.0, 2.0, 3.0])
    assert isinstance(again, CausalLMOutputWithPast)
    assert (again.loss, again.logits, again.hidden_states, again.past_key_values) == (1.0, 2.0, (3.0,), None)


def test_batch_encoding_and_torch_return_types() -> None:
    leaves, structure = flatten(BatchEncoding({"input_ids": torch.ones(2), "n": 3}))
    again = structure.unflatten([item for _, item in leaves])
    assert isinstance(again, BatchEncoding) and list(again) == ["input_ids", "n"]
    leaves, structure = flatten(torch.ones(2, 3).max(1))
    assert len(leaves) == 2
    assert type(structure.unflatten([0, 1])) is torch.return_types.max


def test_structures_do_not_keep_the_value() -> None:
    value = {"x": OrderedDict(y=torch.ones(2)), "z": BatchEncoding({"w": torch.ones(2)})}
    reference = weakref.ref(value["x"]["y"]), weakref.ref(value["z"]["w"])
    structure = flatten(value)[1]
    del value
    gc.collect()
    assert [r() for r in reference] == [None, None]
    again = structure.unflatten([1, 2])
    assert again["x"] == OrderedDict(y=1) and again["z"]["w"] == 2


def test_other_mappings() -> None:
    for value in (defaultdict(list, a=1), MappingProxyType({"a": 1})):
        again = flatten(value)[1].unflatten([2])
        assert type(again) is type(value) and dict(again) == {"a": 2}


def test_caches_and_objects_are_leaves() -> None:
    cache = DynamicCache()
    assert is_cache(cache) and flatten(cache)[0] == [("", cache)]

    class Box:
        def __init__(self, content: Any) -> None:
            self.content = content

    assert holds_tensors(Box({"a": [torch.ones(1)]}))
    assert not holds_tensors(Box([1, 2]))
    assert flatten(Box(torch.ones(1)))[1].build is None


def test_wrong_number_of_leaves() -> None:
    structure = flatten((1, 2))[1]
    with pytest.raises(ValueError, match="expected 2 leaves, got 3"):
        structure.unflatten([1, 2, 3])
    with pytest.raises(ValueError, match="expected 2 leaves, got 1"):
        structure.unflatten([1])
