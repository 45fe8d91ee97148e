"""The folder of a checkpoint: written atomically, and examined before it is read.

A checkpoint is what its ``.metadata`` file names.  Everything is written into a hidden sibling folder
first.  That folder is renamed into place, or, where a checkpoint is there already, its data files (no two
saves give them the same names) are moved in and ``.metadata`` is replaced: at every moment the path holds
the old checkpoint or the new one, whole, for torch's own readers too.  The next save removes what a killed
one has left.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import uuid
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from searchspace.errors import CheckpointError

METADATA = ".metadata"
_PENDING = ".metadata.pending"
_DATA = "*.distcp"


class AtomicWriter(FileSystemWriter):
    """Writes a checkpoint of which ``path`` holds all or nothing."""

    def __init__(self, path: Path) -> None:
        self._target = path
        self._draft = draft_of(path)
        super().__init__(self._draft)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the coordinator makes the folder, before any rank writes

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _check_replaceable(self._target)
        discard(self._draft)
        self._draft.mkdir(parents=True)
        save = uuid.uuid4().hex[:8]
        plans = super().prepare_global_plan(plans)
        return [
            dataclasses.replace(
                plan, storage_data=dataclasses.replace(plan.storage_data, prefix=f"{save}{plan.storage_data.prefix}")
            )
            for plan in plans
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        names: dict[int, list[str]] = {}  # aliases share their description, and so what was written
        for name, stored in metadata.state_dict_metadata.items():
            names.setdefault(id(stored), []).append(name)
        named = [
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=name))
            for written in results
            for result in written
            for name in names[id(metadata.state_dict_metadata[result.index.fqn])]
        ]
        super().finish(metadata, [named])
        _commit(self._draft, self._target)


def draft_of(path: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return path.parent / f".{path.name}.saving"


def discard(draft: Path) -> None:
    """Remove a draft, or what is left of one."""
    if draft.exists():
        shutil.rmtree(draft)


def _check_replaceable(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder")
    foreign = [entry for entry in path.iterdir() if not _of_a_checkpoint(entry)]
    if foreign and not (path / METADATA).exists():
        raise CheckpointError(f"{path} holds {foreign[0].name} and is no checkpoint; choose another path")


def _of_a_checkpoint(entry: Path) -> bool:
    return entry.match(_DATA) or entry.name in (METADATA, _PENDING)


def _commit(draft: Path, target: Path) -> None:
    """Let ``target`` hold what ``draft`` holds."""
    _sync(draft)
    if not target.exists():
        os.rename(draft, target)
        _sync(target.parent)
        return
    # A draft without its metadata is no checkpoint, whatever happens from here on.
    os.rename(draft / METADATA, target / _PENDING)
    names = sorted(path.name for path in draft.glob(_DATA))
    for name in names:
        os.rename(draft / name, target / name)
    _sync(target)
    os.replace(target / _PENDING, target / METADATA)
    _sync(target)
    for path in sorted(target.glob(_DATA)):
        if path.name not in names:
            path.unlink()
    discard(draft)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ExaminedReader(FileSystemReader):
    """Reads a checkpoint whose metadata was read before."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            try:
                super().read_data(LoadPlan(items), planner)
            except CheckpointError:
                raise
            except Exception as error:
                text = (str(error).splitlines() or [type(error).__name__])[0]
                raise CheckpointError(f"{self.path}/{name} is damaged: {text}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def examine(path: Path) -> Metadata:
    """The metadata of the checkpoint at ``path``.

    Raises CheckpointError, naming the file, when there is no checkpoint, its metadata cannot be read, a
    data file is missing or cut short, or a tensor is not covered by what was written of it.
    """
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: {'it is a file' if path.exists() else 'no such folder'}")
    file = path / METADATA
    if not file.exists():
        raise CheckpointError(f"{path} is no complete checkpoint: {METADATA} is missing")
    try:
        metadata = FileSystemReader(path).read_metadata()
        storage = {index: (info.relative_path, info.offset + info.length) for index, info in _storage(metadata).items()}
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error or type(error).__name__}") from None
    needed: dict[str, int] = {}
    for name, end in storage.values():
        needed[name] = max(needed.get(name, 0), end)
    for name, size in sorted(needed.items()):
        if not (path / name).is_file():
            raise CheckpointError(f"{path} is incomplete: {name} is missing")
        found = (path / name).stat().st_size
        if found < size:
            raise CheckpointError(f"{path / name} is cut short: it has {found} bytes of {size}")
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            held = sum(prod(chunk.sizes) for chunk in stored.chunks)
            if held < prod(stored.size):
                raise CheckpointError(f"{file}: {key} has {held} of {prod(stored.size)} elements")
    return metadata


def _storage(metadata: Metadata) -> Mapping[Any, Any]:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise TypeError("it does not describe a checkpoint")
    return metadata.storage_data
