"""A disk that loses power: what storage did is recorded, and replayed on a disk that keeps only what it was told to keep.

After a cut each folder is found as it was when it was last fsynced, or as it was left, in every combination; and the contents of a
file that was not fsynced as they were, as they were left, or as zeros of the right length.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Operation = tuple[Any, ...]  # what, path or number of the file, and what else it takes
DATA = ("kept", "left", "zeros")


class Node:
    """A file or a folder: as it is, and as it is on the disk for certain."""

    def __init__(self, folder: bool) -> None:
        self.folder = folder
        self.names: dict[str, Node] = {}
        self.kept_names: dict[str, Node] = {}
        self.data = bytearray()
        self.kept_data = b""

    def keep(self) -> None:
        self.kept_names, self.kept_data = dict(self.names), bytes(self.data)


class Disk:
    """What a list of operations makes of an empty disk."""

    def __init__(self, operations: list[Operation]) -> None:
        self.root = Node(folder=True)
        self.files: list[Node] = []
        for operation in operations:
            getattr(self, operation[0])(*operation[1:])

    def at(self, path: str) -> Node:
        node = self.root
        for name in Path(path).parts:
            node = node.names[name]
        return node

    def _put(self, path: str, node: Node) -> None:
        self.at(str(Path(path).parent)).names[Path(path).name] = node

    def _take(self, path: str) -> Node:
        return self.at(str(Path(path).parent)).names.pop(Path(path).name)

    def mkdir(self, path: str) -> None:
        self._put(path, Node(folder=True))

    def create(self, path: str) -> None:
        self.files.append(Node(folder=False))
        self._put(path, self.files[-1])

    def write(self, number: int, data: bytes, at: int) -> None:
        held = self.files[number].data
        held.extend(bytes(max(0, at - len(held))))
        held[at : at + len(data)] = data

    def cut(self, number: int, size: int) -> None:
        held = self.files[number].data
        held.extend(bytes(max(0, size - len(held))))
        del held[size:]

    def fsync(self, number: int) -> None:
        self.files[number].keep()

    def sync(self, path: str) -> None:
        self.at(path).keep()

    def rename(self, source: str, target: str) -> None:
        self._put(target, self._take(source))

    def remove(self, path: str) -> None:
        self._take(path)

    def mark(self, step: int) -> None:
        """A checkpoint is acknowledged as durable, or (negative) about to be removed. Nothing happens on the disk."""

    def remains(self) -> Iterator[dict[str, bytes | None]]:
        """Yield everything that may be found after a cut: paths, and contents (``None``: a folder)."""
        folders = [self.root, *_folders(self.root)]
        dirty = [node for node in folders if node.names != node.kept_names]
        for choice in itertools.product((True, False), repeat=len(dirty)):
            lost = [node for node, is_lost in zip(dirty, choice, strict=True) if is_lost]
            for data in DATA:
                found: dict[str, bytes | None] = {}
                _collect(self.root, "", lost, data, found)
                yield found


def _folders(node: Node) -> list[Node]:
    """Every folder that is there or was when it was last kept."""
    inner = {id(child): child for child in (*node.names.values(), *node.kept_names.values()) if child.folder}
    return [found for child in inner.values() for found in (child, *_folders(child))]


def _collect(node: Node, at: str, lost: list[Node], data: str, found: dict[str, bytes | None]) -> None:
    for name, child in (node.kept_names if node in lost else node.names).items():
        path = f"{at}{name}"
        if child.folder:
            found[path] = None
            _collect(child, f"{path}/", lost, data, found)
        elif bytes(child.data) == child.kept_data or data == "kept":
            found[path] = child.kept_data
        else:
            found[path] = bytes(child.data) if data == "left" else bytes(len(child.data))


class Recorder:
    """Records what is done below a folder, through the calls that storage makes, while doing it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations: list[Operation] = []
        self._root = root
        self._numbers: dict[str, int] = {}  # by path
        self._files: dict[int, int] = {}  # by descriptor
        self._folders: dict[int, str] = {}
        self._count = 0
        self._real = {name: getattr(os, name) for name in ("open", "close", "pwrite", "ftruncate", "fsync")}
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))
        self._mkdir, self._rename, self._rmtree = Path.mkdir, Path.rename, shutil.rmtree
        made, renamed = self._made, self._renamed  # as functions: then they are methods of a path

        def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
            made(path, *args, **kwargs)

        def rename(path: Path, target: Path) -> Path:
            return renamed(path, target)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rename", rename)
        monkeypatch.setattr(shutil, "rmtree", self._removed)

    def _name(self, path: object) -> str | None:
        text = os.fspath(path) if isinstance(path, (str, Path)) else ""
        return os.path.relpath(text, self._root) if text.startswith(f"{self._root}/") else None

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        name = self._name(path)
        new = name is not None and flags & os.O_CREAT and not Path(path).exists()
        fd: int = self._real["open"](path, flags, *args, **kwargs)
        if name is not None and flags & os.O_DIRECTORY:
            self._folders[fd] = name
        elif name is not None:
            if new:
                self.operations.append(("create", name))
                self._numbers[name], self._count = self._count, self._count + 1
            self._files[fd] = self._numbers[name]
        elif os.fspath(path) == str(self._root) and flags & os.O_DIRECTORY:
            self._folders[fd] = "."
        return fd

    def _close(self, fd: int) -> None:
        self._files.pop(fd, None)
        self._folders.pop(fd, None)
        self._real["close"](fd)

    def _pwrite(self, fd: int, data: Any, at: int) -> int:
        wrote: int = self._real["pwrite"](fd, data, at)
        if fd in self._files:
            self.operations.append(("write", self._files[fd], bytes(data[:wrote]), at))
        return wrote

    def _ftruncate(self, fd: int, size: int) -> None:
        self._real["ftruncate"](fd, size)
        if fd in self._files:
            self.operations.append(("cut", self._files[fd], size))

    def _fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        if fd in self._files:
            self.operations.append(("fsync", self._files[fd]))
        elif fd in self._folders:
            self.operations.append(("sync", self._folders[fd]))

    def _made(self, path: Path, *args: Any, **kwargs: Any) -> None:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "mkdir", self._mkdir)
            path.mkdir(*args, **kwargs)
        self.operations += [("mkdir", name) for folder in missing[::-1] if (name := self._name(folder)) is not None]

    def _renamed(self, path: Path, target: Path) -> Path:
        source, name = self._name(path), self._name(target)
        assert source is not None
        assert name is not None
        moved = {other: number for other, number in self._numbers.items() if f"{other}/".startswith(f"{source}/")}
        for other, number in moved.items():
            del self._numbers[other]
            self._numbers[name + other.removeprefix(source)] = number
        self.operations.append(("rename", source, name))
        return self._rename(path, target)

    def _removed(self, path: Path, ignore_errors: bool = False) -> None:
        """The manifest goes last: the worst order there is."""
        if path.is_dir():
            inside = sorted(path.iterdir(), key=lambda item: item.name == "manifest.json")
            self.operations += [("remove", name) for item in (*inside, path) if (name := self._name(item)) is not None]
        self._rmtree(path, ignore_errors=ignore_errors)
