"""What must be alike on all ranks, compared once, where a difference would make a result silently wrong."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autoplan.runtime.transport import Transport
from autoplan.runtime.wire import as_bytes

_WORDS = 1 << 16
"""How many numbers of a tensor go into its checksum; a larger tensor is summed in as many groups."""


def differing(transport: Transport, numbers: Mapping[str, int]) -> list[str]:
    """The names whose number (of 63 bits) is not the same on all ranks; the same list on all of them.  Collective."""
    if len(transport.ranks) == transport.world or not numbers:
        return []
    mine = torch.tensor(list(numbers.values()), dtype=torch.int64)
    largest, smallest = transport.reduce([torch.stack((mine, -mine))], "max")
    return [name for name, same in zip(numbers, (largest == -smallest).tolist(), strict=True) if not same]


def digest(text: str) -> int:
    """A number of 63 bits for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def checksum(tensor: Tensor) -> int:
    """A number of 63 bits for a tensor's values: -1 on ``meta``.  Reads the tensor once, where it is."""
    if tensor.is_meta:
        return -1
    flat = as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    whole = flat.numel() // 8 * 8
    tail = flat[whole:].cpu()
    words = flat[:whole].clone() if flat.storage_offset() % 8 else flat[:whole]
    words = words.view(torch.int64)
    if words.numel() > _WORDS:
        rows = words.numel() // _WORDS
        tail = torch.cat((tail, as_bytes(words[rows * _WORDS :].cpu().clone())))
        words = words[: rows * _WORDS].view(rows, _WORDS).sum(0)  # wraps around
    return zlib.crc32(tail.numpy().tobytes(), zlib.crc32(words.cpu().numpy().tobytes()))


class Agreed(Mapping[str, Tensor]):
    """Tensors that are the same on all ranks: rank 0's, where a rank has another value.

    Making it is collective, and so is every look at a value: all ranks ask for the same names in the same order.
    """

    def __init__(self, transport: Transport, values: Mapping[str, Tensor]) -> None:
        self._transport = transport
        self._values = values
        sums = {} if len(transport.ranks) == transport.world else {n: checksum(v) for n, v in values.items()}
        different = differing(transport, sums)
        self._different: dict[str, bool] = {}
        if different:
            unknown = torch.tensor([0 in transport.ranks and sums[name] < 0 for name in different]).int()
            self._different = dict(zip(different, transport.reduce([unknown], "max").bool().tolist(), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        value = self._values[name].detach()
        if name not in self._different:
            return value
        if self._different[name]:  # rank 0 has no value, so nobody has
            return value.to("meta")
        piece = value.to(self._transport.device) if 0 in self._transport.ranks else None
        return self._transport.fetch(0, piece, tuple(value.shape), value.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
