"""Hand-made graphs: transformer-like models without torch, with the rules that capture would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from searchspace.graph import Family, Graph, InputRef, Operator, Tensor
from searchspace.layout import Shape
from searchspace.rule import DimUse, DimUses, Rule


def rule(text: str, *, sums: str = "", maxima: str = "", added: Sequence[int] = (), linear: Any = ()) -> Rule:
    """``"b s k, n k -> b s n"``: one word per dimension, ``.`` without identifier, ``h:64`` with unit 64."""

    def uses(side: str) -> tuple[DimUses, ...]:
        return tuple(tuple(map(use, part.split())) for part in side.split(",")) if side.strip() else ()

    def use(word: str) -> DimUse | None:
        name, _, unit = word.partition(":")
        return None if name == "." else DimUse(name, int(unit or 1))

    left, _, right = text.partition("->")
    outputs = tuple(tuple(map(use, part.split())) for part in right.split(","))
    reductions = tuple((i, "sum") for i in sums.split()) + tuple((i, "max") for i in maxima.split())
    return Rule(uses(left), outputs, reductions, tuple(added), tuple(map(tuple, linear)), text)  # type: ignore[arg-type]


@dataclass
class Builder:
    """Collects tensors and operators; every method returns the name of what it made."""

    dtype: str = "float32"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    def input(self, name: str, shape: Shape, dtype: str | None = None, batch_dim: int | None = 0) -> str:
        self.tensors[name] = Tensor(name, shape, dtype or self.dtype, "input", source=name, batch_dim=batch_dim)
        self.inputs.append(name)
        return name

    def parameter(self, name: str, *shape: int) -> str:
        self.tensors[name] = Tensor(name, shape, self.dtype, "parameter", True, source=name)
        return name

    def op(
        self,
        target: str,
        inputs: Sequence[str],
        shape: Shape,
        how: Rule,
        *,
        module: str = "",
        family: Family = "pointwise",
        flops: float | None = None,
        saved: Sequence[int] = (),
        dtype: str | None = None,
        grad: bool | None = None,
    ) -> str:
        name = f"{target.split('.')[1]}_{len(self.operators)}"
        needs = any(self.tensors[i].requires_grad for i in inputs) if grad is None else grad
        self.tensors[name] = Tensor(name, shape, dtype or self.dtype, "activation", needs)
        everything = (*inputs, name)
        self.operators.append(
            Operator(
                name, target, tuple(map(InputRef, range(len(inputs)))), (), tuple(inputs), (name,), how, module,
                float(prod(shape)) if flops is None else flops,
                tuple(everything[i] for i in saved) if needs else (), 0, family,
            )
        )  # fmt: skip
        return name

    def linear(self, x: str, prefix: str, out: int, bias: bool = True, weight: str | None = None) -> str:
        """``x`` of shape (..., k) times a weight (out, k)."""
        shape = self.tensors[x].shape
        dims = " ".join("abc"[: len(shape) - 1])
        w = weight or self.parameter(f"{prefix}.weight", out, shape[-1])
        inputs = [x, w] + ([self.parameter(f"{prefix}.bias", out)] if bias else [])
        text = f"{dims} k, n k{', n' if bias else ''} -> {dims} n"
        how = rule(text, sums="k", added=(2,) if bias else (), linear=() if bias else ((0,), (1,)))
        flops = 2.0 * prod(shape) * out
        return self.op(
            "aten.linear.default",
            inputs,
            (*shape[:-1], out),
            how,
            module=prefix,
            family="matmul",
            flops=flops,
            saved=(0, 1),
        )

    def layer_norm(self, x: str, prefix: str) -> str:
        shape = self.tensors[x].shape
        dims = " ".join("abc"[: len(shape) - 1])
        inputs = [x, self.parameter(f"{prefix}.weight", shape[-1]), self.parameter(f"{prefix}.bias", shape[-1])]
        return self.op(
            "aten.layer_norm.default", inputs, shape, rule(f"{dims} ., ., . -> {dims} ."), module=prefix,
            family="normalisation", saved=(0,), flops=8.0 * prod(shape),
        )  # fmt: skip

    def pointwise(self, target: str, *xs: str, module: str = "", saved: Sequence[int] = ()) -> str:
        shape = self.tensors[xs[0]].shape
        dims = " ".join("abcd"[: len(shape)])
        linear = [tuple(range(len(xs)))] if target == "aten.add.Tensor" else []
        how = rule(", ".join([dims] * len(xs)) + f" -> {dims}", linear=linear)
        return self.op(target, xs, shape, how, module=module, saved=saved)

    def attention(self, x: str, prefix: str, heads: int) -> str:
        batch, seq, hidden = self.tensors[x].shape
        d = hidden // heads
        parts = []
        for which in "qkv":
            y = self.linear(x, f"{prefix}.{which}", hidden)
            y = self.op("aten.view.default", [y], (batch, seq, heads, d), rule(f"b s h:{d} -> b s h .", linear=((0,),)),
                        module=prefix, family="view", flops=0)  # fmt: skip
            parts.append(
                self.op("aten.transpose.int", [y], (batch, heads, seq, d), rule("b s h d -> b h s d", linear=((0,),)),
                        module=prefix, family="view", flops=0)
            )  # fmt: skip
        y = self.op(
            "aten.scaled_dot_product_attention.default", parts, (batch, heads, seq, d),
            rule("b h . ., b h . ., b h . . -> b h . ."), module=prefix, family="attention",
            flops=4.0 * batch * heads * seq * seq * d, saved=(0, 1, 2, 3),
        )  # fmt: skip
        y = self.op("aten.transpose.int", [y], (batch, seq, heads, d), rule("b h s d -> b s h d", linear=((0,),)),
                    module=prefix, family="view", flops=0)  # fmt: skip
        y = self.op("aten.reshape.default", [y], (batch, seq, hidden), rule(f"b s h . -> b s h:{d}", linear=((0,),)),
                    module=prefix, family="view", flops=0)  # fmt: skip
        return self.linear(y, f"{prefix}.out", hidden)

    def embedding(self, ids: str, prefix: str, rows: int, hidden: int) -> str:
        weight = self.parameter(f"{prefix}.weight", rows, hidden)
        dims = " ".join("ab"[: len(self.tensors[ids].shape)])
        return self.op(
            "autoplan.embedding.default", [ids, weight], (*self.tensors[ids].shape, hidden),
            rule(f"{dims}, v h -> {dims} h", sums="v"), module=prefix, family="embedding", saved=(0,), flops=0,
        )  # fmt: skip

    def cross_entropy(self, logits: str, labels: str) -> str:
        """Mean over all tokens, from pieces that split along tokens and vocabulary."""
        shape = self.tensors[logits].shape
        rows, lead = shape[:-1], " ".join("ab"[: len(shape) - 1])
        top = self.op("autoplan.row_max.default", [logits], rows, rule(f"{lead} v -> {lead}", maxima="v"),
                      module="loss", family="loss", grad=False)  # fmt: skip
        total = self.op("autoplan.sum_exp.default", [logits, top], rows, rule(f"{lead} v, {lead} -> {lead}", sums="v"),
                        module="loss", family="loss", saved=(0, 1), flops=5.0 * prod(shape))  # fmt: skip
        picked = self.op("autoplan.pick.default", [logits, labels], rows, rule(f"{lead} v, {lead} -> {lead}", sums="v"),
                         module="loss", family="loss", saved=(1,))  # fmt: skip
        each = self.op("autoplan.nll.default", [total, top, picked], rows, rule(f"{lead}, {lead}, {lead} -> {lead}"),
                       module="loss", family="loss", saved=(0,))  # fmt: skip
        loss = self.op("aten.sum.default", [each], (), rule(f"{lead} -> ", sums=lead, linear=((0,),)), module="loss",
                       family="reduction")  # fmt: skip
        count = self.op("autoplan.count.default", [labels], (), rule(f"{lead} -> ", sums=lead), module="loss",
                        family="reduction")  # fmt: skip
        return self.op("aten.div.Tensor", [loss, count], (), rule(",  -> ", linear=((0,),)), module="loss", saved=(1,))

    def graph(self, name: str, loss: str, batch: int) -> Graph:
        return Graph(
            name, tuple(self.tensors.values()), tuple(self.operators), tuple(self.inputs), (loss,), loss, (), batch
        )


def gpt(
    layers: int = 4, hidden: int = 64, heads: int = 4, seq: int = 16, vocab: int = 97, batch: int = 8,
    tied: bool = False, dtype: str = "float32",
) -> Graph:  # fmt: skip
    """A GPT: token and position embeddings, pre-norm layers, final norm, head, mean cross entropy."""
    b = Builder(dtype)
    ids = b.input("ids", (batch, seq), "int64")
    labels = b.input("labels", (batch, seq), "int64")
    positions = b.op(
        "aten.arange.default", [], (seq,), rule("-> ."), module="", family="creation", dtype="int64", flops=0
    )
    x = b.embedding(ids, "wte", vocab, hidden)
    p = b.embedding(positions, "wpe", seq, hidden)
    x = b.op("aten.add.Tensor", [x, p], (batch, seq, hidden), rule("b s h, s h -> b s h", linear=((0, 1),)))
    for i in range(layers):
        h = f"h.{i}"
        y = b.attention(b.layer_norm(x, f"{h}.ln_1"), f"{h}.attn", heads)
        x = b.pointwise("aten.add.Tensor", x, y, module=h)
        y = b.linear(b.layer_norm(x, f"{h}.ln_2"), f"{h}.mlp.up", 4 * hidden)
        y = b.pointwise("aten.gelu.default", y, module=f"{h}.mlp", saved=(0,))
        y = b.linear(y, f"{h}.mlp.down", hidden)
        x = b.pointwise("aten.add.Tensor", x, y, module=h)
    x = b.layer_norm(x, "ln_f")
    logits = b.linear(x, "head", vocab, bias=False, weight="wte.weight" if tied else None)
    return b.graph("gpt", b.cross_entropy(logits, labels), batch)


def feed_forward(batch: int = 64, hidden: int = 1024, inner: int = 4096, dtype: str = "float32") -> Graph:
    """The feed-forward of the planner cases: linear, relu, linear, no bias; loss is a sum."""
    b = Builder(dtype)
    x = b.input("x", (batch, hidden))
    y = b.linear(x, "up", inner, bias=False)
    y = b.pointwise("aten.relu.default", y, module="act", saved=(1,))
    y = b.linear(y, "down", hidden, bias=False)
    loss = b.op("aten.sum.default", [y], (), rule("a b -> ", sums="a b", linear=((0,),)), family="reduction")
    return b.graph("feed_forward", loss, batch)


def experts(count: int = 8, tokens: int = 4096, hidden: int = 1024) -> Graph:
    """Experts as one batched matrix product; the tokens are already sorted by expert."""
    b = Builder()
    x = b.input("x", (count, tokens, hidden), batch_dim=None)
    w = b.parameter("w", count, hidden, hidden)
    y = b.op(
        "aten.bmm.default", [x, w], (count, tokens, hidden),
        rule("e m k, e k n -> e m n", sums="k", linear=((0,), (1,))),
        family="matmul", flops=2.0 * count * tokens * hidden * hidden, saved=(0, 1),
    )  # fmt: skip
    loss = b.op("aten.sum.default", [y], (), rule("e m n -> ", sums="e m n", linear=((0,),)), family="reduction")
    return b.graph("experts", loss, 1)
