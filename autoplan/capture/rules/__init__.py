"""The meaning of operators: one generic rule for each family, never one for each operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache

from autoplan.capture import discovery
from autoplan.capture.call import Call, Traits
from autoplan.capture.rules import (
    attention,
    composite,
    convolution,
    creation,
    indexing,
    losses,
    normalisation,
    pointwise,
    products,
    recurrent,
    reductions,
    views,
)
from autoplan.capture.rules.building import opaque, packet
from autoplan.capture.rules.creation import draws
from autoplan.operators.composite import NAMESPACE as COMPOSITE
from searchspace.errors import AutoplanWarning

FamilyRule = Callable[[Call], Traits | None]

_BY_PACKET: dict[str, FamilyRule] = {
    **dict.fromkeys(products.PRODUCTS, products.product),
    **dict.fromkeys(reductions.REDUCTIONS, reductions.reduction),
    **dict.fromkeys(reductions.ALONG, reductions.along),
    **dict.fromkeys(views.REGROUPS, views.regroup),
    **dict.fromkeys(views.PERMUTES, views.permute),
    **dict.fromkeys(views.EXPANDS, views.expand),
    **dict.fromkeys(convolution.CONVOLUTIONS, convolution.convolution),
    **dict.fromkeys(pointwise.ELEMENTWISE_LOSSES, pointwise.elementwise_loss),
    **dict.fromkeys(creation.CREATIONS, creation.creation),
    **dict.fromkeys(creation.LIKE, creation.like),
    **dict.fromkeys(creation.WHOLE, creation.whole),
    "histc": reductions.histogram,
    "einsum": products.einsum,
    "tensordot": products.tensordot,
    "bilinear": products.bilinear,
    "view_as_real": views.complex_parts,
    "view_as_complex": views.complex_parts,
    "diagonal": views.diagonal,
    "as_strided": views.whole,
    "meshgrid": views.meshgrid,
    "slice": indexing.slicing,
    "narrow": indexing.slicing,
    "select": indexing.select,
    "cat": indexing.concatenate,
    "concat": indexing.concatenate,
    "stack": indexing.stack,
    "pad": indexing.pad,
    "constant_pad_nd": indexing.pad,
    "gather": indexing.gather,
    "index_select": indexing.index_select,
    "embedding": indexing.embedding,
    "index": indexing.advanced,
    "index_put": indexing.index_put,
    "scatter": indexing.scatter,
    "scatter_add": indexing.scatter,
    "scatter_reduce": indexing.scatter,
    "index_add": indexing.index_add,
    "index_copy": indexing.index_add,
    "index_fill": indexing.index_add,
    "slice_scatter": indexing.written_view,
    "select_scatter": indexing.written_view,
    "diagonal_scatter": indexing.written_view,
    "one_hot": indexing.one_hot,
    "unfold": indexing.unfold,
    "layer_norm": normalisation.layer_norm,
    "native_layer_norm": normalisation.layer_norm,
    "rms_norm": normalisation.layer_norm,
    "_fused_rms_norm": normalisation.layer_norm,
    "group_norm": normalisation.samplewise,
    "native_group_norm": normalisation.native_group_norm,
    "local_response_norm": normalisation.samplewise,
    "instance_norm": normalisation.instance_norm,
    "batch_norm": normalisation.batch_norm,
    "_native_batch_norm_legit_functional": normalisation.batch_norm,
    "_native_batch_norm_legit_no_training": normalisation.batch_norm,
    "scaled_dot_product_attention": attention.attention,
    "prelu": pointwise.channelwise,
    "glu": pointwise.glu,
}
_BY_TARGET: dict[str, FamilyRule] = {
    **{f"aten.{name}": recurrent.recurrent for name in recurrent.RECURRENT},
    "aten.max.other": pointwise.pointwise,
    "aten.min.other": pointwise.pointwise,
    "autoplan.arange.default": creation.positions,
    "autoplan.uniform.default": creation.drawn,
    "autoplan.normal.default": creation.drawn,
    "autoplan.dropout.default": pointwise.drawn,
    "autoplan.bernoulli.default": pointwise.drawn,
    "autoplan.mean.default": reductions.mean_parts,
    "autoplan.embedding.default": losses.embedding,
    "autoplan.class_maximum.default": losses.over_classes,
    "autoplan.exp_sum_and_pick.default": losses.over_classes,
    "autoplan.exp_sum.default": losses.over_classes,
    "autoplan.pick.default": losses.over_classes,
    "autoplan.token_loss.default": losses.over_tokens,
    "autoplan.log_sum.default": losses.over_tokens,
    "autoplan.mask_ignored.default": losses.over_tokens,
    "autoplan.count_valid.default": losses.count,
    "autoplan.channel_mean.default": normalisation.channel_statistic,
    "autoplan.channel_variance.default": normalisation.channel_statistic,
    "autoplan.channel_normalise.default": normalisation.channel_normalise,
    "autoplan.running_average.default": normalisation.running,
    "autoplan.group_norm.default": normalisation.groups,
    "autoplan.grouped_convolution.default": convolution.grouped,
    "autoplan.causal_attention.default": attention.attention,
    "autoplan.triangle.default": indexing.triangle,
    "autoplan.fused_linear.default": products.fused_linear,
}


def family_rule(target: str) -> FamilyRule | None:
    """The rule of the family that ``target`` belongs to, or None."""
    if target in _BY_TARGET:
        return _BY_TARGET[target]
    if target.startswith(COMPOSITE + "."):
        return composite.composite
    name = packet(target)
    if target.startswith("aten.") and name in _BY_PACKET:
        return _BY_PACKET[name]
    if target.startswith("aten.") and convolution.WINDOWS.match(name):
        return convolution.windows
    if draws(target):
        return creation.stateful
    if target.startswith("aten.") and pointwise.is_pointwise(target):
        return pointwise.pointwise
    return None


@lru_cache(maxsize=65536)
def describe(call: Call) -> Traits:
    """How ``call`` may be split, what it costs, and what autograd keeps for it.

    An operator of no known family gets the rule that running it on small data discovers; what that rejects is
    replicated, with one AutoplanWarning that names it.
    """
    rule = family_rule(call.target)
    found = rule(call) if rule is not None else None
    if found is None:
        found = discovery.discover(call)
    if found is None:
        _warn(call.target)
        found = opaque(call)
    return found


_warned: dict[str, None] = {}


def _warn(target: str) -> None:
    """Name an operator once."""
    if target not in _warned:
        _warned[target] = None
        warnings.warn(
            f"operator {target} has no dimension rule and none was discovered: it is replicated on all devices",
            AutoplanWarning,
            stacklevel=3,
        )
