"""Checkpoints of hand-made layouts: any plan, any world size, plain torch, and kills in the middle.

Optimizers are element-wise, so shards that step on parts of the same gradients give parts of the plain
model's parameters, exactly.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from autoplan.runtime.checkpoint import load, optimizer_state_dict, save
from autoplan.runtime.checkpoint_holding import Holding, ModelTensor, shard_of, shards_on, single_device
from autoplan.runtime.launch import WorkerPool
from searchspace.errors import CheckpointError
from searchspace.layout import Layout, R, Region, Split, local_shape, region_of, whole
from searchspace.mesh import Mesh

Make = Callable[[list[dict[str, Any]]], Optimizer]


class Tied(nn.Module):
    """11 words (uneven over 2, 3, 4), a tied head, an odd width, a frozen and a scalar parameter, buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.Linear(6, 13)
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.randn(3), persistent=False)
        self.double()
        self.norm.running_mean.normal_()


@dataclass(frozen=True)
class Layouts:
    """How each parameter lies; those not named are replicated on all of ``mesh``."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    meshes: Mapping[str, Mesh]

    def of(self, name: str) -> tuple[Layout, Mesh]:
        mesh = self.meshes.get(name, self.mesh)
        return self.layouts.get(name, (R,) * len(mesh.axes)), mesh


PAIR, QUAD = Mesh.line(2), Mesh((("dp", 2), ("tp", 2)), (0, 1, 2, 3))
PLANS = {
    "replicated on one": Layouts(Mesh.line(1), {}, {}),
    "zero, uneven, over 2": Layouts(
        PAIR, {"embedding.weight": (Split(0),), "up.weight": (Split(0),), "up.bias": (Split(0),)}, {}
    ),
    "two stages": Layouts(
        PAIR, {}, {"embedding.weight": Mesh.line(1), "up.weight": Mesh.line(1, first=1), "scale": Mesh.line(1, first=1)}
    ),
    "dp x tp over 4": Layouts(
        QUAD,
        {
            "embedding.weight": (R, Split(0)),
            "up.weight": (Split(1), Split(0)),
            "up.bias": (Split(0), Split(0)),
            "norm.weight": (Split(0, 2), R),
        },
        {},
    ),
}


class Sharded:
    """What the ranks in ``ranks`` hold of a model under some layouts, with one optimizer over all of it."""

    def __init__(self, model: nn.Module, plan: Layouts, ranks: tuple[int, ...], make: Make | None = None) -> None:
        self.model, self.names = model, dict(model.named_parameters())
        self.locals: list[tuple[str, Region, nn.Parameter]] = []
        kept = model.state_dict(keep_vars=True)
        tensors, shards = list(single_device(model).tensors), []
        for turn, tensor in enumerate(tensors):
            source = kept[tensor.name]
            layout, mesh = plan.of(tensor.name)
            data: dict[int, Tensor] = {}
            for rank in (r for r in mesh.devices if r in ranks):
                region = region_of(whole(tensor.shape), layout, mesh, rank)
                data[rank] = cut(source.detach(), region).clone()
                if isinstance(source, nn.Parameter):
                    data[rank] = nn.Parameter(data[rank], requires_grad=source.requires_grad)
                    self.locals.append((tensor.name, region, data[rank]))
            shards += shards_on(tensor, layout, mesh, data, turn)
        self.holding = Holding(tuple(tensors), tuple(shards))
        self.optimizer = make(self.groups()) if make is not None else None

    def groups(self) -> list[dict[str, Any]]:
        """Two groups: matrices, and the rest."""
        return [
            {"params": [p for _, _, p in self.locals if p.dim() == 2]},
            {"params": [p for _, _, p in self.locals if p.dim() != 2], "lr": 0.05},
        ]

    def step(self, number: int) -> None:
        assert self.optimizer is not None
        for name, region, parameter in self.locals:
            if parameter.requires_grad:
                parameter.grad = cut(gradient(name, self.names[name], number), region).clone()
        self.optimizer.step()


def cut(tensor: Tensor, region: Region) -> Tensor:
    return tensor[tuple(slice(low, high) for low, high in region)]


def gradient(name: str, parameter: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def plain(model: nn.Module, make: Make) -> Sharded:
    """The plain model and a plain optimizer, stepped in the same way."""
    found = Sharded.__new__(Sharded)
    found.model, found.names = model, dict(model.named_parameters())
    found.locals = [(n, whole(tuple(p.shape)), p) for n, p in found.names.items()]  # type: ignore[misc]
    found.holding = single_device(model)
    found.optimizer = make(found.groups())
    return found


def adamw(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def sgd(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def read_by_torch(path: Path, model: nn.Module) -> dict[str, Any]:
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    return state["model"]


def same(model: nn.Module, other: nn.Module) -> None:
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def agree(sharded: Sharded, model: nn.Module) -> None:
    """The shards are parts of ``model``."""
    expected = model.state_dict()
    for shard in sharded.holding.shards:
        assert torch.equal(shard.data, cut(expected[str(shard.path[-1])], shard.region)), shard.name


# -- plans, world sizes, the plain model -------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("after", PLANS)
@pytest.mark.parametrize("before", PLANS)
def test_a_run_goes_on_under_another_plan_exactly(before: str, after: str, make: Make, tmp_path: Path) -> None:
    uninterrupted = plain(Tied(), make)
    first = Sharded(Tied(), PLANS[before], (0, 1, 2, 3), make)
    for number in range(2):
        uninterrupted.step(number)
        first.step(number)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(first.optimizer, T_max=9)
    save(first.holding, tmp_path / "ck", optimizer=first.optimizer, scheduler=scheduler, extra={"epoch": 3})

    second = Sharded(Tied(seed=1), PLANS[after], (0, 1, 2, 3), make)
    restored = load(second.holding, tmp_path / "ck", optimizer=second.optimizer)
    assert restored.extra == {"epoch": 3}
    agree(second, uninterrupted.model)
    torch.optim.lr_scheduler.CosineAnnealingLR(uninterrupted.optimizer, T_max=9)
    for number in (2, 3):
        uninterrupted.step(number)
        second.step(number)
    agree(second, uninterrupted.model)


@pytest.mark.parametrize("before", PLANS)
def test_torch_reads_it_into_the_plain_model(before: str, tmp_path: Path) -> None:
    uninterrupted = plain(Tied(), adamw)
    first = Sharded(Tied(), PLANS[before], (0, 1, 2, 3), adamw)
    for number in range(2):
        uninterrupted.step(number)
        first.step(number)
    save(first.holding, tmp_path / "ck", optimizer=first.optimizer)

    continued = plain(Tied(seed=1), adamw)
    state = read_by_torch(tmp_path / "ck", continued.model)
    assert "head.weight" in state and "table" not in state  # tied under both names; not persistent
    assert continued.optimizer is not None
    continued.optimizer.load_state_dict(optimizer_state_dict(tmp_path / "ck", continued.model, continued.optimizer))
    same(continued.model, uninterrupted.model)
    for number in (2, 3):
        uninterrupted.step(number)
        continued.step(number)
    same(continued.model, uninterrupted.model)


def test_torchs_own_optimizer_format(tmp_path: Path) -> None:
    """``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` understand the names."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    source = Sharded(model, Layouts(PAIR, {"0.weight": (Split(0),), "1.weight": (Split(1),)}, {}), (0, 1), adamw)
    source.step(0)
    save(source.holding, tmp_path / "ck", optimizer=source.optimizer)
    target = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    ready = plain(target, adamw)
    assert ready.optimizer is not None
    state = {"optimizer": get_optimizer_state_dict(target, ready.optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=tmp_path / "ck")
    set_optimizer_state_dict(target, ready.optimizer, state["optimizer"])
    reference = plain(model, adamw)
    reference.step(0)
    for a, b in zip(target.parameters(), model.parameters(), strict=True):
        assert torch.equal(ready.optimizer.state[a]["exp_avg"], reference.optimizer.state[b]["exp_avg"])  # type: ignore[union-attr]
        assert ready.optimizer.state[a]["step"] == 1


def test_the_plain_model_is_saved_in_the_same_format(tmp_path: Path) -> None:
    uninterrupted = plain(Tied(), adamw)
    uninterrupted.step(0)
    save(uninterrupted.holding, tmp_path / "ck", optimizer=uninterrupted.optimizer)
    second = Sharded(Tied(seed=1), PLANS["dp x tp over 4"], (0, 1, 2, 3), adamw)
    load(second.holding, tmp_path / "ck", optimizer=second.optimizer)
    uninterrupted.step(1)
    second.step(1)
    agree(second, uninterrupted.model)


def test_a_checkpoint_that_torch_saved_is_loaded(tmp_path: Path) -> None:
    source = plain(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double(), adamw)
    source.step(0)
    assert source.optimizer is not None
    state = {"model": source.model.state_dict(), "optimizer": get_optimizer_state_dict(source.model, source.optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=tmp_path / "ck")
    target = Sharded(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double(),
        Layouts(PAIR, {"0.weight": (Split(0),)}, {}),
        (0, 1),
        adamw,
    )
    load(target.holding, tmp_path / "ck", optimizer=target.optimizer)
    source.step(1)
    target.step(1)
    agree(target, source.model)


def test_each_region_is_written_once_and_aliases_cost_nothing(tmp_path: Path) -> None:
    sharded = Sharded(Tied(), PLANS["dp x tp over 4"], (0, 1, 2, 3))
    save(sharded.holding, tmp_path / "ck")
    metadata = dcp.FileSystemReader(tmp_path / "ck").read_metadata()
    stored = metadata.state_dict_metadata
    assert len(stored["model.embedding.weight"].chunks) == 2  # 11 = 6 + 5 rows, of 2 x 2 ranks
    assert sorted(tuple(c.sizes) for c in stored["model.up.weight"].chunks) == [(6, 3), (6, 3), (7, 3), (7, 3)]
    places = {index: (info.relative_path, info.offset) for index, info in metadata.storage_data.items()}
    of = {
        name: [p for i, p in places.items() if i.fqn == f"model.{name}"] for name in ("embedding.weight", "head.weight")
    }
    assert of["embedding.weight"] == of["head.weight"] and len(of["head.weight"]) == 2


def test_it_becomes_a_file_of_torch_save(tmp_path: Path) -> None:
    model = Tied()
    sharded = Sharded(model, PLANS["zero, uneven, over 2"], (0, 1), adamw)
    sharded.step(0)
    save(sharded.holding, tmp_path / "ck", optimizer=sharded.optimizer, extra={"note": "x"})
    dcp_to_torch_save(tmp_path / "ck", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(found) == {"model", "optimizer", "extra", "rng"}
    assert set(found["model"]) == set(model.state_dict())
    assert found["optimizer"]["param_groups"][1]["params"][-1] in found["model"]
    assert found["optimizer"]["state"]["up.weight"]["exp_avg"].shape == (13, 6)


@settings(max_examples=40)
@given(data=st.data())
def test_any_regions_to_any_other_regions(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3), "shape"))
    tensor = ModelTensor("w", shape)
    value = torch.arange(whole_size(shape), dtype=torch.float64).reshape(shape)

    def layout(label: str) -> tuple[Layout, Mesh]:
        axes, placements, extents = [], [], list(shape)
        for i in range(data.draw(st.integers(1, 3), label)):
            choices = [d for d, e in enumerate(extents) if e > 1]
            dim = data.draw(st.sampled_from([None, *choices]), "dim")
            size = data.draw(st.integers(2, min(3, extents[dim]) if dim is not None else 3), "size")
            axes.append((f"a{i}", size))
            placements.append(R if dim is None else Split(dim))
            if dim is not None:
                extents[dim] //= size
        mesh = Mesh(tuple(axes), tuple(range(Mesh_size(axes))))
        return tuple(placements), mesh

    (before, mesh), (after, other) = layout("axes before"), layout("axes after")
    parts = {r: cut(value, region_of(whole(shape), before, mesh, r)).clone() for r in mesh.devices}
    path = tmp_path_factory.mktemp("any") / "ck"
    save(Holding((tensor,), tuple(shards_on(tensor, before, mesh, parts, data.draw(st.integers(0, 7))))), path)
    empty = {
        r: torch.full(local_shape(region_of(whole(shape), after, other, r)), -1.0, dtype=torch.float64)
        for r in other.devices
    }
    shards = shards_on(tensor, after, other, empty)
    load(Holding((tensor,), tuple(shards)), path)
    for shard in shards:
        assert torch.equal(shard.data, cut(value, shard.region))
    shutil.rmtree(path)


def whole_size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def Mesh_size(axes: list[tuple[str, int]]) -> int:
    return torch.Size([size for _, size in axes]).numel()


# -- what is saved besides ---------------------------------------------------------------------------


def test_scheduler_random_state_and_information(tmp_path: Path) -> None:
    def everything(seed: int) -> tuple[Sharded, Any]:
        sharded = Sharded(Tied(), PLANS["two stages"], (0, 1), adamw)
        assert sharded.optimizer is not None
        stages = [
            torch.optim.lr_scheduler.LinearLR(sharded.optimizer, total_iters=3),
            torch.optim.lr_scheduler.MultiStepLR(sharded.optimizer, [2, 5]),
        ]
        return sharded, torch.optim.lr_scheduler.SequentialLR(sharded.optimizer, stages, milestones=[3])

    first, scheduler = everything(0)
    for number in range(5):
        first.step(number)
        scheduler.step()
    torch.manual_seed(7)
    holding = replace(first.holding, information={"step": 5, "seed": 3, "plan": "{}"})
    save(holding, tmp_path / "ck", optimizer=first.optimizer, scheduler=scheduler)
    expected = torch.rand(3)

    second, other = everything(1)
    restored = load(second.holding, tmp_path / "ck", optimizer=second.optimizer, scheduler=other)
    assert torch.equal(torch.rand(3), expected)
    assert restored.information == {"step": 5, "seed": 3, "plan": "{}"} and restored.extra == {}
    for _ in range(4):
        scheduler.step()
        other.step()
        assert other.get_last_lr() == scheduler.get_last_lr()


def test_dtypes_are_converted_and_float32_masters_serve_a_bf16_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 5)
    save(single_device(model), tmp_path / "ck")
    half = nn.Linear(3, 5).bfloat16()
    read_by_torch(tmp_path / "ck", half)
    assert torch.equal(half.weight, model.weight.bfloat16())


def test_a_tied_parameter_saved_under_its_other_name(tmp_path: Path) -> None:
    source = plain(Tied(), adamw)
    source.step(0)
    tensors = tuple(ModelTensor("head.weight", t.shape) if t.aliases else t for t in source.holding.tensors)
    renamed = {t.name: t for t in tensors}
    shards = tuple(
        shard_of(renamed[str(s.path[-1])] if not s.aliases else renamed["head.weight"], s.region, s.data, True)
        for s in source.holding.shards
    )
    save(replace(source.holding, tensors=tensors, shards=shards), tmp_path / "ck", optimizer=source.optimizer)
    target = plain(Tied(seed=1), adamw)
    load(target.holding, tmp_path / "ck", optimizer=target.optimizer)
    source.step(1)
    target.step(1)
    same(target.model, source.model)


# -- errors ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sharded = Sharded(Tied(), PLANS["zero, uneven, over 2"], (0, 1), adamw)
    sharded.step(0)
    save(sharded.holding, tmp_path / "ck", optimizer=sharded.optimizer)
    return tmp_path / "ck"


def message(path: Path, model: nn.Module | None = None, **more: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(single_device(model or Tied()), path, **more)
    return str(caught.value)


def test_another_model_is_named_by_its_differences(saved: Path) -> None:
    other = Tied()
    other.up = nn.Linear(6, 14).double()
    other.more = nn.Linear(2, 2)
    del other.scale
    text = message(saved, other)
    assert "of another model: 2 missing (more.weight, more.bias); 1 unknown (scale); 2 of another shape" in text
    assert "(up.weight [13, 6] instead of [14, 6], up.bias [13] instead of [14])" in text


def test_nothing_is_changed_by_a_load_that_fails(saved: Path) -> None:
    other, before = Tied(seed=1), Tied(seed=1)
    other.more = nn.Linear(2, 2)
    message(saved, other)
    for name, value in before.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_damage_names_the_file(saved: Path) -> None:
    data = next(saved.glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    assert f"{data} is cut short: it has {len(content) // 2} bytes of {len(content)}" in message(saved)
    data.write_bytes(b"\0" * len(content))
    assert f"{data} is damaged" in message(saved)
    data.unlink()
    assert f"is incomplete: {data.name} is missing" in message(saved)
    metadata = saved / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:100])
    assert f"{metadata} is damaged" in message(saved)
    metadata.write_bytes(pickle.dumps({"something": "else"}))
    assert f"{metadata} is damaged: 'dict' object" in message(saved)
    metadata.write_bytes(pickle.dumps(dcp.Metadata({})))
    assert f"{metadata} is damaged: it does not describe a checkpoint" in message(saved)
    metadata.unlink()
    assert "is no complete checkpoint: .metadata is missing" in message(saved)
    shutil.rmtree(saved)
    assert f"no checkpoint at {saved}: no such folder" in message(saved)
    saved.write_text("text")
    assert "it is a file" in message(saved)


def test_optimizers_that_do_not_fit(saved: Path, tmp_path: Path) -> None:
    model = Tied()
    one = torch.optim.AdamW(model.parameters())
    assert "the checkpoint has 2 parameter groups, the optimizer 1" in message(saved, model, optimizer=one)
    other = plain(model, sgd).optimizer
    text = message(saved, model, optimizer=other)
    assert "saved by another kind of optimizer than SGD: it has no momentum, dampening" in text
    vectors, matrices = ([p for p in model.parameters() if (p.dim() == 2) == wanted] for wanted in (False, True))
    swapped = torch.optim.AdamW([{"params": vectors}, {"params": matrices}])
    text = message(saved, model, optimizer=swapped)
    assert "scale is in parameter group 0 of the optimizer, in the checkpoint in group 1 (5 such parameters)" in text
    foreign = torch.optim.AdamW(nn.Linear(2, 3).parameters())
    with pytest.raises(CheckpointError, match=r"a parameter of shape \[3, 2\] that is not one of the model's"):
        save(single_device(model), tmp_path / "no", optimizer=foreign)
    save(single_device(model), tmp_path / "bare")
    assert "holds no optimizer state" in message(tmp_path / "bare", model, optimizer=one)
    schedule = torch.optim.lr_scheduler.ConstantLR(one)
    assert "holds no scheduler state" in message(tmp_path / "bare", model, scheduler=schedule)


def test_state_that_cannot_be_cut_otherwise_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 6)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(
        CheckpointError, match=r"optimizer state 'row_var' of weight has shape \[6, 1\], its shard has shape \[6, 4\]"
    ):
        save(single_device(model), tmp_path / "ck", optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_extra_must_be_plain_data(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="extra cannot be saved: use tensors, numbers, strings"):
        save(single_device(nn.Linear(2, 2)), tmp_path / "ck", extra={"model": Tied()})
    with pytest.raises(CheckpointError, match="extra cannot be saved"):
        save(single_device(nn.Linear(2, 2)), tmp_path / "ck", extra={"f": lambda: 0})
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="holds notes and is no checkpoint; choose another path"):
        save(single_device(nn.Linear(2, 2)), tmp_path)
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        save(single_device(nn.Linear(2, 2)), tmp_path / "notes")
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_shards_that_do_not_cover_a_tensor_are_refused(tmp_path: Path) -> None:
    tensor = ModelTensor("w", (5,))
    parts = {0: torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"model.w: the ranks write 3 of 5 elements"):
        save(Holding((tensor,), tuple(shards_on(tensor, (Split(0),), PAIR, parts))), tmp_path / "ck")


# -- processes ---------------------------------------------------------------------------------------


def _on_this_rank(sharded: Sharded) -> Holding:
    return replace(sharded.holding, process=dist.get_rank(), distributed=dist.get_world_size() > 1)


def _steps(plan: str, path: str, numbers: list[int], resume: str | None) -> None:
    """On each rank: continue from ``resume``, step, save."""
    rank = dist.get_rank()
    sharded = Sharded(Tied(seed=len(numbers)), PLANS[plan], (rank,), adamw)
    holding = _on_this_rank(sharded)
    if resume is not None:
        load(holding, resume, optimizer=sharded.optimizer)
    else:
        load_like(sharded, Tied())
    for number in numbers:
        sharded.step(number)
    torch.manual_seed(100 + rank)
    save(holding, path, optimizer=sharded.optimizer)


def load_like(sharded: Sharded, model: nn.Module) -> None:
    for shard in sharded.holding.shards:
        shard.data.detach().copy_(cut(model.state_dict()[str(shard.path[-1])], shard.region))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp x tp over 4", "two stages"),
        ("two stages", "dp x tp over 4"),
        ("zero, uneven, over 2", "replicated on one"),
        ("replicated on one", "zero, uneven, over 2"),
    ],
)
def test_processes_go_on_under_another_world_size(before: str, after: str, pool: WorkerPool, tmp_path: Path) -> None:
    world = {name: max(plan.mesh.devices) + 1 for name, plan in PLANS.items()}
    pool.run(_steps, before, str(tmp_path / "a"), [0, 1], None, ranks=world[before])
    pool.run(_steps, after, str(tmp_path / "b"), [2, 3], str(tmp_path / "a"), ranks=world[after])
    uninterrupted = plain(Tied(), adamw)
    for number in range(4):
        uninterrupted.step(number)
    found = Tied(seed=1)
    read_by_torch(tmp_path / "b", found)
    same(found, uninterrupted.model)
    assert len(list((tmp_path / "a").glob("*.distcp"))) == world[before]


def _random_numbers(path: str, saving: bool) -> float:
    sharded = Sharded(Tied(), PLANS["dp x tp over 4"], (dist.get_rank(),))
    holding = _on_this_rank(sharded)
    torch.manual_seed(dist.get_rank())
    if saving:
        save(holding, path)
    else:
        torch.rand(5)
        load(holding, path)
    return float(torch.rand(()))


def test_each_process_gets_its_own_random_state_back(pool: WorkerPool, tmp_path: Path) -> None:
    expected = pool.run(_random_numbers, str(tmp_path / "ck"), True)
    assert pool.run(_random_numbers, str(tmp_path / "ck"), False) == expected
    assert len(set(expected)) == 4


def _failing(path: str, how: str) -> str:
    rank = dist.get_rank()
    sharded = Sharded(Tied(), PLANS["dp x tp over 4"], (rank,), adamw)
    holding = _on_this_rank(sharded)
    optimizer = sharded.optimizer
    assert optimizer is not None
    if how == "load":
        try:
            load(holding, path if rank != 2 else path + " that is not there")
        except CheckpointError as error:
            return str(error)
    if how == "state" and rank == 2:
        optimizer.state[sharded.locals[0][2]]["history"] = torch.zeros(3, 3, 3)
    if how == "groups" and rank == 2:
        optimizer.add_param_group({"params": []})
    if how == "disk" and rank == 2:

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        torch.save, real = full, torch.save
    try:
        save(holding, path, optimizer=optimizer, extra={"half": rank})
    except CheckpointError as error:
        return str(error)
    finally:
        if how == "disk" and rank == 2:
            torch.save = real
    return ""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("state", "on process 2: optimizer state 'history' of"),
        ("groups", "rank 2 has 3 parameter groups, rank 0 has 2"),
        ("disk", "on process 2: OSError: [Errno 28] No space left on device"),
        ("load", "that is not there: no such folder"),
    ],
)
def test_if_one_process_fails_all_fail_and_the_old_checkpoint_stays(
    how: str, expected: str, pool: WorkerPool, tmp_path: Path
) -> None:
    assert pool.run(_failing, str(tmp_path / "ck"), "") == [""] * 4
    before = sorted(p.name for p in (tmp_path / "ck").iterdir())
    messages = pool.run(_failing, str(tmp_path / "ck"), how)
    assert len(messages) == 4 and all(expected in text for text in messages), messages
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


# -- kills in the middle -----------------------------------------------------------------------------


def _save_until(call: int, path: Path, value: float) -> bool:
    """Save in a child that is killed before its ``call``-th change of a file; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        seen = 0

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call_or_die(*args: Any, **kwargs: Any) -> Any:
                nonlocal seen
                if seen == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1
                return real(*args, **kwargs)

            return call_or_die

        try:
            torch.save = counted(torch.save)
            for name in ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
                setattr(os, name, counted(getattr(os, name)))
            save(filled(value), path)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code == 0


def filled(value: float) -> Holding:
    model = nn.Linear(3, 4)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return single_device(model)


def content(path: Path) -> float:
    model = nn.Linear(3, 4)
    read_by_torch(path, model)
    load(single_device(model), path)
    values = {v for p in model.parameters() for v in p.flatten().tolist()}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("existing", [False, True])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(existing: bool, tmp_path: Path) -> None:
    path = tmp_path / "ck"
    found, call, done = [], 0, False
    while not done:
        shutil.rmtree(path, ignore_errors=True)
        if existing:
            save(filled(1), path)
        done = _save_until(call, path, 2)
        found.append(content(path) if path.exists() else None)
        for other in tmp_path.glob(".*"):
            if (other / ".metadata").exists():  # what looks valid is whole
                assert content(other) == 2
        save(filled(3), path)  # the next one clears what was left
        assert content(path) == 3
        assert len(list(path.iterdir())) == 2 and list(tmp_path.iterdir()) == [path]
        call += 1
    old = 1.0 if existing else None
    assert found == sorted(found, key=lambda v: v == 2)  # from the old to the new, once
    assert found[0] == old and found[-1] == 2 and call > 10
