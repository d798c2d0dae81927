"""Was a tensor written to while it was to be copied? Version counters and bytes are looked at: neither tells all.

Counters do not move for fused optimizers, ``.data`` and numpy. So some bytes of every tensor are noted when it is to be copied, in
three places, other ones from save to save. The copy has to have them, and the tensor has to be like its copy when that is made: a
write before, while or after it was copied is found if it touched one of the places, as one that touched all of a tensor does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_CHUNK = 64  # bytes that are noted in each place
_MOST = 1024  # tensors of which places are noted in one save; where there are more they take turns
_STRIDE = 0x9E3779B1  # from save to save the places move by this, so that in time they are everywhere


class Watch:
    """Tells which of some tensors was written to since it was made, after they were copied.

    ``everything``: they have been copied already, into ``targets`` of :meth:`written`, and all of it is compared.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[torch.Tensor], turn: int, everything: bool) -> None:
        self._names, self._sources = names, sources
        self._turn, self._everything = turn, everything
        self._versions = list(map(_version, sources))
        number = len(sources)
        first = turn * _MOST % number if number > _MOST else 0
        chosen = [] if everything else [index % number for index in range(first, first + min(number, _MOST))]
        self._noted = {index: self._look(sources[index], _is_straight(sources[index])) for index in chosen}

    def written(self, targets: Sequence[torch.Tensor]) -> str:
        """Return the name of a tensor that differs from its copy, or whose counter has moved; an empty text if there is none."""
        for name, source, before in zip(self._names, self._sources, self._versions, strict=True):
            if _version(source) != before:
                return name
        if self._everything:
            pairs = zip(self._names, self._sources, targets, strict=True)
            return next((name for name, source, target in pairs if not _equal(_plain(source), target)), "")
        for index, noted in self._noted.items():
            straight = _is_straight(self._sources[index])
            copied = self._look(targets[index], straight)
            if not _same(noted, copied) or not _same(self._look(self._sources[index], straight), copied):
                return self._names[index]
        return ""

    def _look(self, tensor: torch.Tensor, straight: bool) -> Sequence[bytes | torch.Tensor]:
        """Note what is in some places of a tensor: bytes of a ``straight`` one, else rows. On a device the notes stay there:
        reading them would wait for it. (Not run on a GPU.)"""
        if straight:
            start, nbytes = tensor.data_ptr(), tensor.nbytes
            if nbytes <= 4 * _CHUNK:
                return [ctypes.string_at(start, nbytes)] if nbytes else []
            last = nbytes - _CHUNK
            return [ctypes.string_at(start + at, _CHUNK) for at in (0, self._turn * _STRIDE % last, last)]
        with torch.no_grad():
            found = _plain(tensor)
            if found.numel() == 0 or found.dim() == 0:
                return [found.clone()]
            rows = (0, self._turn * _STRIDE % len(found), len(found) - 1)
            return [found[row].clone() for row in rows]


def _is_straight(tensor: torch.Tensor) -> bool:
    """Whether its bytes are what they stand for, in order, in this process's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def _same(one: Sequence[bytes | torch.Tensor], other: Sequence[bytes | torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        _equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bytes are the same: as numbers NaN would differ from itself."""
    return bool(torch.equal(_bytes(one), _bytes(other)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
