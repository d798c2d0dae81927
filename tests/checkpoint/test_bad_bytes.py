"""A checkpoint directory whose bytes, names and lengths were changed in every way: an earlier good step, or an error
that names the file; never a wrong value, another kind of exception, foreign code, a hang, or memory for what nobody has.

Two ranks' checkpoints are written and restored through the whole of ``FlashCheckpoint``; only the saver is a thread of
this process, so that thousands of cases take seconds. ``FUZZ_ROUNDS`` is the number of random rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import json
import os
import random
import re
import resource
import shutil
import socket
import sys
import tempfile
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch import nn

from resilience.checkpoint import digest, hire, manifest, reading, turns
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.link import Place
from resilience.checkpoint.manifest import File, Manifest
from resilience.checkpoint.reading import open_disk
from resilience.checkpoint.receipt import Level
from resilience.checkpoint.restore import Wish, load_parts
from resilience.checkpoint.saver import restores
from resilience.checkpoint.saver.process import Saver
from resilience.checkpoint.state import parts_of
from resilience.checkpoint.stores import local
from resilience.checkpoint.stores.claims import DirectoryInUse
from resilience.checkpoint.stores.local import Directory
from resilience.checkpoint.together import Together
from resilience.errors import CheckpointError, NothingToRestore

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "200"))
WORLD = 2
STEPS = (4, 9, 14)
NAMES = [f"step-{step:08d}" for step in STEPS]
NEWEST = NAMES[-1]
ROOM = 3 << 30  # bytes of address space that reading may take beyond what this process has
HOLE = 1 << 42  # bytes that a file is extended by, and that nobody has
Tree = dict[str, bytes]  # files by their path below the directory


# -- what is saved ----------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    """A value that is kept by its name."""

    RED = 1


def tensors(seed: int) -> dict[str, Any]:
    """Return tensors of all kinds, full of noise; of the same sizes whatever the seed."""
    noise = torch.Generator().manual_seed(seed)

    def raw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = int(numpy.prod(shape)) * dtype.itemsize
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=noise).view(dtype).view(shape)

    kinds = ["float64", "float32", "float16", "bfloat16", "int64", "int8", "uint8", "uint16", "complex64", "complex128"]
    kinds += ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    found: dict[str, Any] = {kind: raw(getattr(torch, kind), 3, 5) for kind in kinds}
    tied = raw(torch.float32, 40, 30)
    return {
        **found,
        "bool": torch.rand(17, generator=noise) < 0.5,
        "scalar": raw(torch.int32).view(()),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "tied": [tied, {"again": tied}],
        "turned": raw(torch.float32, 4, 6).t(),
        "array": numpy.random.default_rng(seed).integers(0, 1 << 60, (2, 3)),
    }


def values(seed: int) -> dict[Any, Any]:
    """Return values of all kinds that are no tensors; their encoding is as long whatever the seed."""
    noise = random.Random(seed)
    return {
        "plain": [None, True, noise.randrange(1 << 40, 1 << 41), -noise.random(), "ä" + f"{seed:06d}", b"\0\xff"],
        "odd": (float("nan"), float("-inf"), -0.0, noise.randrange(1 << 90, 1 << 91), complex(noise.random(), -0.0)),
        "boxes": [{1, 2}, frozenset("ab"), OrderedDict(b=1, a=[seed + 1000]), Counter(x=2), deque([3, 4], maxlen=5)],
        "more": [defaultdict(list, a=[1]), range(1, 9, 2), bytearray(b"abc"), argparse.Namespace(lr=noise.random())],
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), numpy.float32(0.5), Colour.RED],
        (1, "key"): {"nested": {"deeply": [[[noise.random()]]]}, "long": [noise.random() for _ in range(40)]},
    }


def state_of(step: int, who: int) -> dict[str, Any]:
    return {"tensors": tensors(step * 100 + who), "values": values(step * 100 + who), "step": step + 1000}


def told(value: Any, seen: dict[int, int]) -> Any:
    """Return what a state is, to the bit, as plain data: types, order, and which tensors are one."""
    kind: Any = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind = (str(value.dtype), tuple(value.shape), seen.setdefault(id(value), len(seen)))
        within: Any = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, numpy.ndarray):
        within = (value.dtype.str, value.shape, value.tobytes())
    elif isinstance(value, dict):
        within = [(told(key, seen), told(item, seen)) for key, item in value.items()]
    elif isinstance(value, (list, tuple, deque)):
        within = (getattr(value, "maxlen", None), [told(item, seen) for item in value])
    elif isinstance(value, (set, frozenset)):
        within = sorted(map(repr, value))
    else:
        within = repr(value)
    return kind, within


class Thing:
    """Something with a state."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Rank:
    """Everything that one rank trains."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shared, self.own = Thing(), Thing()
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parts, _ = parts_of(self.things(), ["shared"], rng=False)

    def things(self) -> dict[str, Any]:
        return {"shared": self.shared, "own": self.own, "model": self.model, "optimizer": self.optimizer}

    def advance(self, step: int) -> None:
        """Take the state that belongs to a step."""
        self.shared.state, self.own.state = state_of(step, 7), state_of(step, self.rank)
        noise = torch.Generator().manual_seed(1000 + step)
        for parameter in self.model.parameters():
            parameter.data = torch.rand(parameter.shape, generator=noise)
            self.optimizer.state[parameter] = {"momentum_buffer": torch.rand(parameter.shape, generator=noise)}
        self.optimizer.param_groups[0]["lr"] = 0.5 + step / 1024

    def lose(self) -> None:
        """Take a state that belongs to no step."""
        self.shared.state = self.own.state = None
        for parameter in self.model.parameters():
            parameter.data.fill_(-1)

    def told(self) -> Any:
        state = {name: thing.state_dict() for name, thing in self.things().items()}
        return told(state, {})


# -- a job whose saver is a thread ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    """What restoring came to: the step that it says, and what is there now; or the error."""

    step: int
    told: Any = None
    error: BaseException | None = None


class Nobody(dict[Any, Any]):
    """Forgets at once who is on a directory."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextlib.contextmanager
def job(home: Path) -> Iterator[list[tuple[Rank, FlashCheckpoint]]]:
    """Two ranks and their saver, all of them in this process, and their end in good order."""
    folder = Path(tempfile.mkdtemp(prefix="ck-"))  # short: a socket lives in it
    saver = Saver(str(folder / "s"), None, 600.0)
    thread = threading.Thread(target=saver.run, name="saver")
    thread.start()
    made: list[tuple[Rank, FlashCheckpoint]] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hire, "find_or_start", lambda run, directory: saver.path)
            patch.setattr(turns, "_open", Nobody())  # as ranks have processes of their own
            for number in range(WORLD):
                patch.setenv("RANK", str(number))
                patch.setenv("LOCAL_RANK", str(number))
                rank = Rank(number)
                options: dict[str, Any] = {"disk_every": None, "keep": 9, "rng": False, "restore_timeout": 30}
                made.append((rank, FlashCheckpoint(home, replicated=["shared"], **options, **rank.things())))
            yield made
    finally:
        for _, checkpoint in made:
            checkpoint.close()
        saver.end_soon()
        thread.join(60)
        assert not thread.is_alive()
        for key in list(saver.selector.get_map().values()):
            os.close(key.fileobj) if isinstance(key.fileobj, int) else cast(socket.socket, key.fileobj).close()
        saver.selector.close()
        shutil.rmtree(folder)


def save(home: Path) -> None:
    """Write all steps."""
    with job(home) as ranks:
        for step in STEPS:
            for rank, checkpoint in ranks:
                rank.advance(step)
                checkpoint.save(step, disk=True, wait=30)
            for _, checkpoint in ranks:
                assert checkpoint.wait(level=Level.DURABLE, timeout=30).level is Level.DURABLE


def restored(home: Path, *, fresh: bool = False) -> list[Found]:
    """Restore all ranks; return what each has come to."""

    def one(rank: Rank, checkpoint: FlashCheckpoint) -> Found:
        rank.lose()
        try:
            found = checkpoint.restore(allow_fresh_start=fresh) - 1
        except BaseException as error:  # noqa: BLE001 - what may come is what this is about
            return Found(-1, None, error)
        return Found(found, rank.told())

    with job(home) as ranks, ThreadPoolExecutor(WORLD) as pool, watched():
        return list(pool.map(lambda pair: one(*pair), ranks))


_CODE = {"exec", "compile", "import", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}
_foreign: list[str] = []  # what was run or imported while it was watched
_watched = threading.Event()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _CODE and _watched.is_set():
        _foreign.append(f"{event} {arguments[:1]}")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Take note of code that is run or imported."""
    _watched.set()
    try:
        yield
    finally:
        _watched.clear()


@pytest.fixture
def little_memory(pristine: Tree) -> Iterator[None]:
    """Let nobody take much more memory than there is in use."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def patch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as made:
        made.setattr(digest, "_CHUNK", 4096)  # several chunks in small files
        for name in [name for name in os.environ if name.startswith(("RESILIENCE_", "TORCHELASTIC_"))]:
            made.delenv(name)
        made.setenv("WORLD_SIZE", str(WORLD))
        made.setenv("LOCAL_WORLD_SIZE", str(WORLD))
        before = sys.getswitchinterval()
        sys.setswitchinterval(0.0002)  # ranks and saver are threads that wait for each other
        yield
        sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def pristine(patch: None, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """What a job has written: three checkpoints of two ranks."""
    home = tmp_path_factory.mktemp("bad") / "checkpoints"
    save(home)
    assert [found.step for found in restored(home)] == [STEPS[-1]] * WORLD  # and everything that is needed is imported
    sys.addaudithook(_hook)
    return tree_of(home)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[Any]]:
    """What every rank has at every step."""
    ranks = [Rank(number) for number in range(WORLD)]
    found = {}
    for step in STEPS:
        for rank in ranks:
            rank.advance(step)
        found[step] = [rank.told() for rank in ranks]
    return found


def tree_of(home: Path) -> Tree:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def lay(home: Path, tree: Tree) -> Path:
    """Make a directory what it was. Only what differs is written: that is faster."""
    folders = {str(Path(name).parent) for name in tree}
    for path in sorted(home.rglob("*")):
        name = str(path.relative_to(home))
        if path.is_symlink() or (path.is_file() and tree.get(name) != path.read_bytes()):
            path.unlink()
        elif path.is_dir() and name not in folders:
            shutil.rmtree(path)
    for name in [name for name in tree if not (home / name).exists()]:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(tree[name])
    return home


@pytest.fixture
def home(tmp_path: Path, pristine: Tree) -> Path:
    return lay(tmp_path / "checkpoints", pristine)


# -- what may come of it ----------------------------------------------------------------------------------------------


def verdict(found: list[Found], expected: dict[int, list[Any]], vandal: Vandal) -> str:
    """Say what is wrong: nothing, if all ranks are at one step with its state to the bit, or have an error that names
    a file.

    A step that was not touched must be reached, or a later one. Of a step whose digests were forged anything may come,
    but no other kind of error.
    """
    wrong = [f"foreign code: {_foreign}"] if _foreign else []
    step, whole = found[0].step, vandal.newest_untouched()
    if len({item.step for item in found}) != 1:
        wrong.append(f"ranks go on from different steps: {found}")
    for rank, item in enumerate(found):
        if item.error is not None:
            wrong += error_verdict(item.error, whole, vandal)
        elif not (step == -1 and vandal.left_nothing):
            right = step in vandal.forged_steps() or (step in expected and item.told == expected[step][rank])
            wrong += [] if right and step >= whole else [f"rank {rank} went on from step {step}, and is not right"]
    return "; ".join(wrong)


def error_verdict(error: BaseException, whole: int, vandal: Vandal) -> list[str]:
    """Say what is wrong with an error."""
    if not isinstance(error, CheckpointError) or out_of_memory(error):
        return [f"another kind of error: {error!r}"]
    if whole >= 0:
        return [f"step {whole} is good, and was not restored: {error!r}"]
    named = vandal.forged or vandal.left_nothing or any(name in str(error) for name in vandal.names())
    return [] if named else [f"no file is named: {error!r}"]


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was asked for that is not there, however it is said."""
    return error is not None and (isinstance(error, MemoryError) or out_of_memory(error.__cause__))


def assert_none(wrong: list[str]) -> None:
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong[:8])


# -- damage -----------------------------------------------------------------------------------------------------------


def flip(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped": lambda data, noise: flip(data, noise.randrange(len(data)), noise.randrange(8)) if data else b"\0",
    "first byte": lambda data, noise: flip(data, 0) if data else b"\0",
    "last byte": lambda data, noise: flip(data, len(data) - 1) if data else b"\0",
    "noise": lambda data, noise: noise.randbytes(len(data)),
    "zeros": lambda data, noise: bytes(len(data)),
    "hole": lambda data, noise: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "emptied": lambda data, noise: b"",
    "cut": lambda data, noise: data[: noise.randrange(len(data) or 1)],
    "cut by one": lambda data, noise: data[:-1],
    "cut in front": lambda data, noise: data[noise.randrange(len(data) or 1) :],
    "turned": lambda data, noise: data[len(data) // 2 :] + data[: len(data) // 2],
    "extended": lambda data, noise: data + b"\0",
    "doubled": lambda data, noise: data + data,
    "pushed": lambda data, noise: noise.randbytes(4) + data,
}


Act = tuple[str, ...]  # what a vandal does, and to what


class Vandal:
    """Does something to a directory, and knows to what."""

    def __init__(self, home: Path, noise: random.Random) -> None:
        self.home = home
        self.noise = noise
        self.touched: set[str] = set()
        self.forged: set[str] = set()

    def has_touched(self, step: str) -> bool:
        """Whether something was done to a checkpoint."""
        return any(name == step or name.startswith(f"{step}/") for name in self.touched)

    def newest_untouched(self) -> int:
        """Return the newest step that nothing was done to, or -1."""
        return max([step for step, name in zip(STEPS, NAMES, strict=True) if not self.has_touched(name)], default=-1)

    def forged_steps(self) -> set[int]:
        """Return the steps whose digests say nothing any more."""
        return {int(name[5:]) for name in self.forged}

    def names(self) -> set[str]:
        """Return what an error may name: files; of a manifest or a folder the checkpoint."""
        paths = [Path(name) for name in self.touched]
        return {path.parts[0] if path.name == manifest.NAME else path.name for path in paths}

    @property
    def left_nothing(self) -> bool:
        """Whether nothing has the name of a checkpoint any more."""
        return not any(re.fullmatch(r"step-\d+(\.\d+)?", path.name) for path in self.home.iterdir())

    def do(self, act: Act) -> None:
        """Do one thing, unless what it takes is not there any more."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            getattr(self, act[0])(*act[1:])

    def change(self, how: str, name: str) -> None:
        """Change the bytes of a file."""
        data = (self.home / name).read_bytes()
        self.touched.add(name)
        (self.home / name).write_bytes(CHANGES[how](data, self.noise))

    def delete(self, name: str) -> None:
        """Remove a file or a folder."""
        self.touched.add(name)
        path = self.home / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def replace(self, by: str, name: str) -> None:
        """Put something else in the place of a file."""
        self.delete(name)
        if by == "folder":
            (self.home / name).mkdir()
        else:
            (self.home / name).symlink_to(self.home / name)

    def swap(self, name: str, other: str) -> None:
        """Have two files, or folders, change places."""
        if name == other or not (self.home / other).exists():
            return
        self.touched |= {name, other}
        (self.home / name).rename(self.home / ".between")
        (self.home / other).rename(self.home / name)
        (self.home / ".between").rename(self.home / other)

    def copy(self, name: str, other: str) -> None:
        """Put a file in the place of another one."""
        self.touched.add(other)
        shutil.copyfile(self.home / name, self.home / other)

    def rename(self, name: str, other: str) -> None:
        """Give something another name."""
        self.touched |= {name, other}
        (self.home / name).rename(self.home / other)

    def duplicate(self, name: str, other: str) -> None:
        """Copy a whole checkpoint; that harms nobody."""
        shutil.copytree(self.home / name, self.home / other)

    def write(self, name: str, text: str) -> None:
        """Write a small file beside or into the checkpoints."""
        self.touched.add(name)
        (self.home / name).write_text(text)

    def forge(self, step: str) -> None:
        """Make digests and sizes in a manifest fit what is there, as damage before they were computed would."""
        folder = self.home / step
        known = json.loads((folder / manifest.NAME).read_bytes().partition(b"\n")[2])
        for item in (*known["shards"], *known["values"]):
            item.update(forged(File(**item), (folder / item["name"]).read_bytes()))
        write_signed(folder, known)
        self.forged |= {step, f"step-{known['step']:08d}"}


def head_of(data: bytes) -> int:
    """Return how long the header of a shard is."""
    return int.from_bytes(data[:8], "little") + 8


def forged(file: File, data: bytes) -> dict[str, Any]:
    """Return what a manifest says of a file that holds ``data``."""
    head = min(head_of(data), len(data)) if file.head else 0
    body = memoryview(data)[head:]
    found = [digest.digest(data[:head])] if head else []
    return {"nbytes": len(data), "head": head, "digests": (*found, *digest.digests(body, file.chunk))}


def put(path: Path, data: bytes) -> None:
    """Write a file over itself: one that is emptied first is written out by the file system, which takes its time."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def write_signed(folder: Path, known: dict[str, Any]) -> None:
    """Write a manifest of any contents, with the right digest in front."""
    body = json.dumps(known).encode()
    put(folder / manifest.NAME, f"{digest.NAME} {digest.digest(body)}\n".encode() + body)


def of_step(tree: Tree, step: str) -> list[str]:
    return sorted(name for name in tree if name.startswith(step))


def acts_on(name: str) -> list[Act]:
    """Return everything that may be done to one file of a checkpoint."""
    step, _, file = name.partition("/")
    found: list[Act] = [("change", how, name) for how in CHANGES]
    found += [("delete", name), ("replace", "folder", name), ("replace", "loop", name), ("rename", name, f"{name}.old")]
    others = [other for other in NAMES if other != step]
    found += [("copy", f"{others[0]}/{file}", name), ("swap", name, f"{others[1]}/{file}")]
    if file != manifest.NAME:
        sibling = f"{step}/rank-{1 - int(file[5:10]):05d}{file[10:]}"
        found += [("copy", sibling, name), ("swap", name, sibling)]
    return found


def test_checkpoint_of_these_tests_is_restored_to_the_bit_where_nothing_is_changed(
    home: Path, expected: dict[int, list[Any]]
) -> None:
    for step in reversed(STEPS):
        found = restored(home)
        assert [item.step for item in found] == [step] * WORLD
        assert [item.told for item in found] == expected[step]
        shutil.rmtree(home / f"step-{step:08d}")


@pytest.mark.usefixtures("little_memory")
def test_whatever_is_done_to_any_file_of_the_newest_checkpoint_an_earlier_one_is_restored(
    home: Path, pristine: Tree, expected: dict[int, list[Any]]
) -> None:
    wrong = []
    for act in [act for name in of_step(pristine, NEWEST) for act in acts_on(name)]:
        vandal = Vandal(lay(home, pristine), random.Random(str(act)))
        vandal.do(act)
        assert tree_of(home) != pristine, f"{act} changed nothing"
        found = restored(home)
        said = verdict(found, expected, vandal) or ("it was not noticed" if found[0].step == STEPS[-1] else "")
        wrong += [f"{act}: {said}"] if said else []
    assert_none(wrong)


@pytest.mark.usefixtures("little_memory")
def test_whatever_is_done_to_any_file_of_the_only_checkpoint_is_an_error_that_names_it_and_no_fresh_start(
    home: Path, pristine: Tree, expected: dict[int, list[Any]]
) -> None:
    alone = {name: data for name, data in pristine.items() if not name.startswith(tuple(NAMES[:-1]))}
    wrong = []
    for act in [act for name in of_step(pristine, NEWEST) for act in acts_on(name)]:
        vandal = Vandal(lay(home, alone), random.Random(str(act)))
        vandal.do(act)
        if tree_of(home) == alone:
            continue  # what it takes is not there
        vandal.touched |= set(NAMES)
        found = restored(home, fresh=True)
        said = verdict(found, expected, vandal) or ("it was not noticed" if found[0].error is None else "")
        wrong += [f"{act}: {said}"] if said else []
    assert_none(wrong)


def test_error_names_every_step_and_what_is_wrong_with_it_where_all_are_bad(home: Path, pristine: Tree) -> None:
    for name, how in zip(NAMES, ("cut by one", "last byte", "first byte"), strict=True):
        Vandal(home, random.Random(5)).do(("change", how, f"{name}/rank-00001.safetensors"))
    for found in restored(home, fresh=True):
        assert isinstance(found.error, NothingToRestore), found
        for step in STEPS:
            assert re.search(rf"step[- ]0*{step}\b", str(found.error)), found.error


@pytest.mark.parametrize("bad", [NEWEST, f"{NEWEST}.2"])
def test_bad_checkpoint_does_not_hide_a_good_one_of_the_same_step(
    home: Path, expected: dict[int, list[Any]], bad: str
) -> None:
    vandal = Vandal(home, random.Random(6))
    vandal.do(("duplicate", NEWEST, f"{NEWEST}.2"))
    vandal.do(("change", "last byte", f"{bad}/rank-00000.safetensors"))
    found = restored(home)
    assert [item.step for item in found] == [STEPS[-1]] * WORLD
    assert [item.told for item in found] == expected[STEPS[-1]]


def test_very_many_bad_checkpoints_are_an_error_in_words_too(home: Path, pristine: Tree) -> None:
    """What is wrong with all of them is more than one message between processes holds."""
    lay(home, {f"step-{step:08d}/{manifest.NAME}": b"rubbish" for step in range(1500)})
    for found in restored(home, fresh=True):
        assert isinstance(found.error, NothingToRestore), found
        assert "its digest is wrong" in str(found.error)


NAMED: list[list[Act]] = [
    [("rename", NEWEST, "step-14")],
    [("rename", NEWEST, "step-00000014.2")],
    [("rename", NEWEST, "step-00000099")],  # its manifest says what it is
    [("rename", NEWEST, "step-00000014.old")],
    [("rename", NEWEST, "step-")],
    [("rename", NEWEST, ".partial-00000014")],
    [("rename", NEWEST, "sTEP-00000014")],
    [("swap", NEWEST, NAMES[0])],
    [("swap", NEWEST, NAMES[0]), ("swap", NAMES[1], NEWEST)],
    [("delete", NEWEST)],
    [("delete", NEWEST), ("delete", NAMES[1])],
    [("replace", "folder", NEWEST)],
    [("replace", "loop", NEWEST)],
    [("duplicate", NAMES[0], "step-00000014.2")],
    [("duplicate", NEWEST, "step-00000014.2"), ("change", "flipped", f"{NEWEST}/rank-00000.values")],
    [("duplicate", NAMES[1], "step-00000077"), ("delete", NAMES[1]), ("delete", NEWEST)],
    [("swap", f"{NEWEST}/{manifest.NAME}", f"{NAMES[0]}/{manifest.NAME}")],
    [("write", f"{NEWEST}/.aside", "")],
    [("write", f"{NEWEST}/.aside", "\0\x80{[")],
    [("write", f"{NEWEST}/.aside", "x" * 100_000)],
    [("write", f"{NEWEST}/rank-00002.values", "of nobody")],
    [("write", "step-00000050", "no folder")],
    [("write", "step-99999999999999999999999999999999", "no folder")],
    [("write", "rank-00000.values", "astray")],
    [("duplicate", NEWEST, f"{NAMES[1]}/{NEWEST}")],
    [("delete", ".lock")],
    [("change", "noise", ".lock")],
    [("replace", "folder", ".restores.json")],
    [("replace", "loop", ".restores.json")],
]


@pytest.mark.usefixtures("little_memory")
def test_names_of_folders_say_nothing_and_what_is_beside_the_files_does_no_harm(
    home: Path, pristine: Tree, expected: dict[int, list[Any]]
) -> None:
    wrong = []
    for acts in NAMED:
        vandal = Vandal(lay(home, pristine), random.Random(str(acts)))
        for act in acts:
            vandal.do(act)
        said = verdict(restored(home), expected, vandal)
        wrong += [f"{acts}: {said}"] if said else []
    assert_none(wrong)


@pytest.mark.usefixtures("little_memory")
def test_damaged_memory_of_what_was_tried_leads_to_a_good_step_or_the_one_before(
    home: Path, pristine: Tree, expected: dict[int, list[Any]]
) -> None:
    """``.restores.json`` has no digest: a flipped digit may have a good checkpoint passed over, and that is all."""
    noise, data = random.Random(3), json.dumps([[1, STEPS[-1], 1], [1, STEPS[0], 0]]).encode()
    path, wrong = home / ".restores.json", []
    seen: dict[str, bytes] = {}
    bad = [flip(data, at, bit) for at in range(len(data)) for bit in range(8)] + [data[:at] for at in range(len(data))]
    bad += [change(data, noise) for change in CHANGES.values()] + [b"[" * 100_000, b"[[1, 14, " + b"9" * 9999 + b"]]"]
    bad += [
        b"[[1, 14, -5]]",
        b'{"123": 4}',
        b"[[1, 14, 1e300]]",
        b"[[-1, -14, 2]]",
        b"[[1, 14, 2], [1, 9, 2], [1, 4, 2]]",
    ]
    for text in bad:
        path.write_bytes(text)
        seen.setdefault(repr(sorted(restores.read(Directory(home)).items())), text)
    assert len(seen) > 20
    for text in seen.values():
        lay(home, {**pristine, path.name: text})
        vandal = Vandal(home, noise)
        vandal.touched |= {NEWEST, path.name}
        said = verdict(restored(home), expected, vandal)
        wrong += [f"{text[:60]!r}: {said}"] if said else []
    assert_none(wrong)


@pytest.mark.usefixtures("little_memory")
def test_lock_of_another_job_with_anything_in_it_is_still_a_refusal_in_words(home: Path) -> None:
    noise, wrong = random.Random(4), []
    holder = Directory(home)
    holder.claim("the-other-job")
    data = (home / ".lock").read_bytes()
    bad = [flip(data, at, noise.randrange(8)) for at in range(len(data))] + [data[:at] for at in range(len(data))]
    bad += [change(data, noise) for change in CHANGES.values()] + [b"[" * 4096, b'{"host":' * 500, b"9" * 4096, b"null"]
    for text in bad:
        (home / ".lock").write_bytes(text)
        try:
            Directory(home).claim("this-job")
            wrong.append(f"{text[:60]!r}: claimed")
        except DirectoryInUse as error:
            wrong += [] if str(home) in str(error) else [f"{text[:60]!r}: {error}"]
        except Exception as error:  # noqa: BLE001 - what may come is what this is about
            wrong.append(f"{text[:60]!r}: {error!r}")
    holder.close()
    assert_none(wrong)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", [manifest.NAME, ".aside", "rank-00000.values", "rank-00000.safetensors"])
def test_file_that_is_larger_than_all_memory_is_not_read(home: Path, pristine: Tree, name: str) -> None:
    with (home / NEWEST / name).open("ab") as file:
        try:
            file.truncate(HOLE)  # takes no room on the disk
        except OSError:
            pytest.skip("the file system has no such files: left out is their size")
    complaints: list[str] = []
    assert [item.manifest.step for item in Directory(home).stored(complaints.append)] == [9, 4]
    assert len(complaints) == 1
    assert NEWEST in complaints[0]


@pytest.mark.usefixtures("little_memory")
def test_memory_of_what_was_tried_that_is_larger_than_all_memory_is_not_read(home: Path) -> None:
    with (home / ".restores.json").open("ab") as file:
        try:
            file.truncate(HOLE)
        except OSError:
            pytest.skip("the file system has no such files: left out is their size")
    assert restores.read(Directory(home)) == {}


@pytest.mark.parametrize("name", [manifest.NAME, ".aside", "rank-00000.values", "rank-00000.safetensors"])
def test_pipe_in_the_place_of_a_file_is_not_waited_for(home: Path, name: str) -> None:
    path = home / NEWEST / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if name.startswith("rank-"):  # and the manifest says that it is as long as pipes are
        told = json.loads((home / NEWEST / manifest.NAME).read_bytes().partition(b"\n")[2])
        (entry,) = [file for file in (*told["shards"], *told["values"]) if file["name"] == name]
        entry |= {"nbytes": 0, "head": 0, "digests": []}
        body = json.dumps(told).encode()
        put(home / NEWEST / manifest.NAME, f"{digest.NAME} {digest.digest(body)}\n".encode() + body)
    found: list[int] = []
    looking = threading.Thread(target=lambda: found.extend(it.manifest.step for it in Directory(home).stored()))
    looking.start()
    looking.join(10)
    waits = looking.is_alive()
    while looking.is_alive():  # somebody opens the other end, or it would wait for ever
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        looking.join(0.05)
    assert not waits
    assert found == [9, 4]


# -- every byte -------------------------------------------------------------------------------------------------------


class Inline:
    """Runs at once what it is given: very many pools of threads would take most of the time."""

    def __init__(self, threads: int) -> None:
        pass

    def submit(self, act: Callable[..., str], *arguments: Any) -> Future[str]:
        found: Future[str] = Future()
        found.set_result(act(*arguments))
        return found

    def shutdown(self) -> None:
        pass


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ThreadPoolExecutor", Inline)


# What restore() takes for a bad checkpoint and goes on to the one before.
BAD = (CheckpointError, OSError, ValueError, RuntimeError, KeyError, TypeError)


def read(folder: Path, found: Manifest, rank: Rank) -> None:
    """Do what a rank does that restores a checkpoint from disk."""
    with watched():
        opened = open_disk(folder, found, rank.rank)
        load_parts(rank.parts, opened, Place.here(), Wish(), Together(needed=False))
        wrong = opened.check.wrong()
    if wrong:
        raise CheckpointError(wrong)


def refusal(folder: Path, found: Manifest | None, rank: Rank, name: str) -> str:
    """Say what is wrong with how a damaged file is refused: nothing, if the error names it. ``found``: its manifest,
    where that is good."""
    try:
        read(folder, found or local.read_manifest(folder), rank)
    except CheckpointError as error:
        return "" if name in str(error) or name == manifest.NAME else f"no file is named: {error!r}"
    except Exception as error:  # noqa: BLE001 - what may come is what this is about
        return f"another kind of error: {error!r}"
    return "it was not noticed"


def spots(name: str, data: bytes) -> Iterator[int]:
    """Yield the bytes of a file that are changed one by one: all of what has a structure (of one rank), some others."""
    head = head_of(data) if name.endswith(".safetensors") else len(data)
    text = len(data[:head].rstrip(b" "))
    yield from range(0, text, 7 if "00001" in name else 1)
    yield from range(text, head, 61)
    yield from range(head, len(data), 29)
    yield len(data) - 1


@pytest.mark.usefixtures("little_memory", "one_thread")
def test_one_flipped_bit_in_any_byte_is_refused_by_a_rank_that_reads_it_and_the_file_is_named(
    home: Path, pristine: Tree
) -> None:
    noise, wrong, count = random.Random(1), [], 0
    folder = home / NEWEST
    good = local.read_manifest(folder)
    for path in of_step(pristine, NEWEST):
        name, data = Path(path).name, pristine[path]
        known, rank = None if name == manifest.NAME else good, Rank(int("00001.values" in name))
        for at in spots(name, data):
            put(folder / name, flip(data, at, noise.randrange(8)))
            said = refusal(folder, known, rank, name)
            wrong += [f"{name}, byte {at}: {said}"] if said else []
            count += 1
        put(folder / name, data)
        read(folder, good, rank)
    assert count > 7_000
    assert_none(wrong + _foreign)


@pytest.mark.usefixtures("little_memory", "one_thread")
def test_file_that_ends_anywhere_or_goes_on_is_refused_and_named(home: Path, pristine: Tree) -> None:
    wrong, rank, folder = [], Rank(0), home / NEWEST
    for path in of_step(pristine, NEWEST):
        name, data = Path(path).name, pristine[path]
        lengths = {*range(0, len(data), 1 if len(data) < 4000 else 41), len(data) - 1, 0, 7, 8, 9, 4095, 4096, 4097}
        for length in sorted((length for length in lengths if length < len(data)), reverse=True):
            os.truncate(folder / name, length)
            said = refusal(folder, None, rank, name)
            wrong += [f"{name} of {length} bytes: {said}"] if said else []
        for more in (b"\0", b" ", b"\n", data[-1:], data):
            put(folder / name, data + more)
            said = refusal(folder, None, rank, name)
            wrong += [f"{name} with {len(more)} bytes more: {said}"] if said else []
        put(folder / name, data)
    read(folder, local.read_manifest(folder), rank)
    assert_none(wrong + _foreign)


@pytest.mark.rare
@pytest.mark.usefixtures("little_memory", "one_thread")
def test_damage_that_the_digests_do_not_show_gives_no_other_kind_of_error_either(home: Path, pristine: Tree) -> None:
    """As of a memory that was damaged before it was written: values may differ then, but nothing else happens."""
    noise, wrong, rank, folder = random.Random(2), [], Rank(0), home / NEWEST
    good = local.read_manifest(folder)
    for name in ("rank-00000.values", "rank-00000.safetensors"):
        data, is_shard = pristine[f"{NEWEST}/{name}"], name.endswith(".safetensors")
        end = len(data[: head_of(data)].rstrip(b" ")) if is_shard else len(data)
        for at in range(0, end, 2 if is_shard else 1):
            changed = flip(data, at, noise.randrange(8))
            put(folder / name, changed)
            shards, values = (
                tuple(
                    dataclasses.replace(file, **forged(file, changed)) if file.name == name else file for file in files
                )
                for files in (good.shards, good.values)
            )
            try:
                read(folder, dataclasses.replace(good, shards=shards, values=values), rank)
            except Exception as error:  # noqa: BLE001 - what may come is what this is about
                if not isinstance(error, BAD) or out_of_memory(error):
                    wrong.append(f"{name}, byte {at}: {error!r}")
        put(folder / name, data)
    assert_none(wrong + _foreign)


# -- what damage does before it is found ------------------------------------------------------------------------------


class Picky(Thing):
    """Refuses a state that can't be, as scripts do."""

    def load_state_dict(self, state: Any) -> None:
        if int(state["position"]) not in range(1000):
            raise self.error
        super().load_state_dict(state)

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


@pytest.mark.spawns
@pytest.mark.parametrize("error", [IndexError("no such batch"), AssertionError(), AttributeError("x"), ValueError("x")])
def test_script_that_chokes_on_damaged_tensors_goes_on_from_the_step_before(
    tmp_path: Path, saver_home: Path, error: Exception
) -> None:
    """Digests are checked beside the loading: a script may be given what is damaged, and raise whatever it likes."""
    thing, home = Picky(error), tmp_path / "checkpoints"
    with FlashCheckpoint(home, loader=thing, rng=False, disk_every=1) as checkpoint:
        for step in range(2):
            thing.state = {"position": torch.tensor(step)}
            checkpoint.save(step)
            checkpoint.wait()
    (path,) = home.glob("step-00000001/*.safetensors")
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    with FlashCheckpoint(home, loader=thing, rng=False) as checkpoint:
        assert checkpoint.restore() == 1
        assert int(thing.state["position"]) == 0
    shutil.rmtree(home / "step-00000000")
    with FlashCheckpoint(home, loader=thing, rng=False) as checkpoint, pytest.raises(NothingToRestore, match=path.name):
        checkpoint.restore()


# -- at random --------------------------------------------------------------------------------------------------------


def random_acts(tree: Tree, noise: random.Random) -> list[Act]:
    """Return some things to do, to one checkpoint or to all."""
    steps = noise.sample(NAMES, noise.randrange(1, len(NAMES) + 1))
    files = [name for step in steps for name in of_step(tree, step)]
    found: list[Act] = []
    for _ in range(noise.choice([1, 1, 2, 3, 6, 12])):
        kind = noise.randrange(10)
        if kind < 7:
            found.append(noise.choice(acts_on(noise.choice(files))))
        elif kind == 7:
            found.append(noise.choice(noise.choice(NAMED)))
        elif kind == 8:
            found.append(("swap", noise.choice(steps), noise.choice(steps)))
        else:
            found += [("change", noise.choice(list(CHANGES)), noise.choice(files)), ("forge", noise.choice(steps))]
    return found


@pytest.mark.usefixtures("little_memory")
def test_many_things_at_once_lead_to_a_good_step_or_an_error_that_names_a_file(
    home: Path, pristine: Tree, expected: dict[int, list[Any]]
) -> None:
    wrong = []
    for seed in range(ROUNDS):
        noise = random.Random(seed)
        acts = random_acts(pristine, noise)
        vandal = Vandal(lay(home, pristine), noise)
        for act in acts:
            vandal.do(act)
        said = verdict(restored(home, fresh=seed % 2 == 0), expected, vandal)
        wrong += [f"seed {seed}, {acts}: {said}"] if said else []
    assert_none(wrong)
