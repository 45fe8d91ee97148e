"""Built-in model configurations in plain PyTorch: no download, no weights, the loss computed inside.

model, args, kwargs = zoo.build("gpt3-175b", batch=8)      # on meta: no memory
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from autoplan.zoo import bert, gpt, llama, mlp, resnet, vit
from autoplan.zoo.preset import Example, Inputs, Preset
from searchspace.errors import ModelError

__all__ = ["CONFIGS", "DTYPES", "Example", "build", "names", "parameter_count"]

CONFIGS: Mapping[str, Preset] = MappingProxyType(
    {name: config for family in (gpt, llama, bert, vit, resnet, mlp) for name, config in family.CONFIGS.items()}
)
"""Every configuration by name."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "bf16": torch.bfloat16,
        "float16": torch.float16,
    }
)


def names() -> tuple[str, ...]:
    """Names that :func:`build` knows, by family and size."""
    return tuple(CONFIGS)


def build(
    name: str,
    *,
    batch: int = 8,
    sequence: int | None = None,
    device: str | torch.device = "meta",
    dtype: str | torch.dtype = "float32",
    labels: bool = True,
    seed: int = 0,
    **sizes: Any,
) -> Example:
    """The model ``name`` and example inputs of one call.

    Args:
        batch: samples in the example inputs.
        sequence: tokens per sample; default: the configuration's own.  Image models have none.
        device: ``"meta"`` (nothing is allocated), ``"cpu"``, ``"cuda"``...
        dtype: of weights and floating-point inputs, as a torch dtype or one of ``DTYPES``.
        labels: whether the call has labels, so that the model returns its loss; else its prediction.
        seed: of weights and inputs; the global generator is left as it was.
        sizes: fields of the configuration to change, e.g. ``layers=4, vocabulary=50257``.

    Raises ModelError for an unknown name (with the nearest ones), size or dtype.
    """
    config = _resized(name, _find(name), {"sequence": sequence, **sizes})
    if batch < 1:
        raise ModelError(f"{name}: expected batch >= 1, got {batch}")
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind is None or not kind.is_floating_point:
        raise ModelError(f"{name}: unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    where = torch.device(device)
    former = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[] if where.type != "cuda" else [where]):
        torch.manual_seed(seed)
        try:
            torch.set_default_dtype(kind)
            with where:
                model = config.model()
                kwargs = config.inputs(Inputs(batch, where, kind, labels))
        except ValueError as error:
            raise ModelError(f"{name}: {error}") from None
        finally:
            torch.set_default_dtype(former)
    return Example(model, (), kwargs)


def parameter_count(name: str) -> int:
    """Number of parameters of a configuration, tied ones counted once; nothing is allocated."""
    return sum(p.numel() for p in build(name, batch=1).model.parameters())


def _find(name: str) -> Preset:
    if name in CONFIGS:
        return CONFIGS[name]
    near = difflib.get_close_matches(name, CONFIGS, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(CONFIGS)}"
    raise ModelError(f"no model {name!r} in the zoo; {hint}")


def _resized(name: str, config: Preset, sizes: Mapping[str, Any]) -> Preset:
    changes = {field: value for field, value in sizes.items() if value is not None}
    if "sequence" in changes and config.sequence is None:
        raise ModelError(f"{name} takes no sequence; leave out sequence={changes['sequence']}")
    for field, value in changes.items():
        if (kind := get_type_hints(type(config)).get(field)) is not None:
            try:
                TypeAdapter(kind).validate_python(value, strict=True)
            except ValidationError:
                what = getattr(kind, "__name__", kind) if isinstance(kind, type) else kind
                raise ModelError(f"{name}: expected {field} of type {what}, got {value!r}") from None
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ModelError(f"{name}: expected {field} >= 1, got {value}")
    try:
        return replace(config, **changes)  # type: ignore[type-var]
    except TypeError:
        known = ", ".join(vars(config))
        raise ModelError(f"{name} has no size {', '.join(sorted(changes))!r}; it has {known}") from None
