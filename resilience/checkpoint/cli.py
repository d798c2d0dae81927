"""``resilience checkpoint list|show|verify|export|import|prune DIRECTORY``: look after checkpoints without a training job.

Only ``show``, ``export`` and ``import`` need torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience.checkpoint import digest, hire, shards, stores
from resilience.checkpoint.manifest import File, in_words
from resilience.checkpoint.stores import Kept, Storage
from resilience.checkpoint.stores.claims import patiently
from resilience.command import Parser
from resilience.errors import CheckpointError

_NOBODY_READS = 128 + signal.SIGPIPE  # what a shell says of a program that SIGPIPE ended


def main(argv: list[str]) -> int:
    """Run the command; return the exit code: 1 when something is wrong with a checkpoint."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where it can be told: at the end of Python it would be a traceback
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in there is flushed once more
        return _NOBODY_READS


def _run(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if isinstance(args.directory, Path) and not args.directory.is_dir() and args.act is not take_over:
        raise CheckpointError(f"{args.directory} is no directory.")
    code: int = args.act(args)
    return code


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; ``act`` is what each command does."""
    parser = Parser(prog="resilience checkpoint", description="Look after checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|show|verify|export|import|prune")

    def command(name: str, text: str, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("directory", type=_place, help="where the checkpoints are: a directory, or a URL")
        made.set_defaults(act=act)
        return made

    command("list", "list the checkpoints, newest first, and what is left out and why", list_all)
    for name, text, act in (
        ("show", "print what is in a checkpoint", show),
        ("verify", "read everything and check every digest", verify),
        ("export", "write a checkpoint in another form", export),
    ):
        made = command(name, text, act)
        made.add_argument("--step", type=int, help="of this step (default: the newest; verify: all)")
        if name == "export":
            made.add_argument("target", type=Path, help="file or directory to write")
            made.add_argument(
                "--format", choices=["safetensors", "torch", "dcp"], help="(default: by the target's name)"
            )
            made.add_argument("--rank", type=int, default=0, help="whose own state to take (default: 0)")
            made.add_argument(
                "--import",
                dest="modules",
                metavar="MODULE",
                action="append",
                default=[],
                help="import this module first: one that registers codecs, or has enums that were saved (may be repeated)",
            )
    made = command("import", "take over a checkpoint of DCP, torch.save or safetensors", take_over)
    made.add_argument("source", type=Path, help="a directory of torch.distributed.checkpoint, or a file")
    made.add_argument("--step", type=int, required=True, help="the last step that is in it")
    made.add_argument(
        "--name",
        dest="names",
        metavar="[THEIRS]=[OURS]",
        action="append",
        default=[],
        help="what a part of it is called in FlashCheckpoint(…, model=…), where that differs; THEIRS=: it is left out; "
        "=OURS: all of it is one part, a bare state_dict() of a model for example",
    )
    made = command("prune", "remove all but the newest checkpoints", prune)
    made.add_argument("--keep", type=int, required=True, help="how many stay")
    made.add_argument("--keep-every", type=int, default=0, help="steps that stay for good: every so many")
    return parser


def _place(text: str) -> stores.Where:
    place = stores.where(text)
    return Path(text) if isinstance(place, Path) and "://" not in text else place  # as it was given: for people


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _chosen(args: argparse.Namespace) -> Kept:
    wrong: list[str] = []
    found = stores.opened(args.directory).stored(wrong.append)
    sys.stderr.write("".join(f"{text}\n" for text in wrong))
    fitting = [item for item in found if args.step is None or item.manifest.step == args.step]
    if not fitting:
        which = "no checkpoint" if args.step is None else f"no checkpoint of step {args.step}"
        raise CheckpointError(f"there is {which} in {args.directory}.")
    return fitting[0]


def list_all(args: argparse.Namespace) -> int:
    """List the checkpoints."""
    wrong: list[str] = []
    stored = stores.opened(args.directory).stored(wrong.append)
    for item in stored:
        it = item.manifest
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(it.created))
        size = in_words(it.nbytes)
        _say(f"step {it.step:<10} {when}  {size:>12}  {it.world} ranks  generation {it.generation}  {item.path.name}")
    for text in wrong:
        _say(text)
    if not stored and not wrong:
        _say(f"there is no checkpoint in {args.directory}")
    return 1 if wrong or not stored else 0


def show(args: argparse.Namespace) -> int:
    """Print what is in a checkpoint."""
    from resilience.checkpoint.source import Ref  # noqa: PLC0415 - needs torch

    item = _chosen(args)
    it = item.manifest
    _say(f"step {it.step}, generation {it.generation}, cycle {it.cycle}, {it.world} ranks, {in_words(it.nbytes)}")
    _say(f"facts {json.dumps(it.facts)}")
    for file in it.shards:
        for piece in _pieces(stores.opened(args.directory), item, file):
            part = "" if piece.is_whole else f" {list(piece.shape)} from {list(piece.offsets)} on"
            _say(f"  rank {file.rank}  {piece.name}  {piece.dtype} {list(piece.whole)}{part}")

    def plain(value: Any) -> str:
        if not isinstance(value, Ref):
            return repr(value)
        return f"<{value.name}>" if value.name else f"<made by the codec {value.form[1]!r}>"

    values = _values(stores.opened(args.directory), item, 0)
    for name, value in values.items() if isinstance(values, dict) else [("state", values)]:
        text = json.dumps(_shortened(value), default=plain, skipkeys=True, ensure_ascii=False)
        _say(f"  values of rank 0  {name}  {text}")
    return 0


def _values(directory: Storage, item: Kept, rank: int) -> Any:
    """Return the values of a rank, as far as they can be read without the training script's code. No tensor is read."""
    from resilience.checkpoint import decoding, reading  # noqa: PLC0415

    file = next(file for file in item.manifest.values if file.rank == rank)
    data = memoryview(directory.read(item.path.name, file.name, 0, file.nbytes))
    if digest.digests(data, file.chunk) != list(file.digests):
        raise CheckpointError(f"{item.path / file.name}: a digest is wrong.")
    with decoding.looks_only():
        return reading.decode(data)


def _shortened(value: Any, most: int = 8) -> Any:
    """Return a value without what nobody reads: the middle of long lists (random states, mostly) and texts."""
    if isinstance(value, dict):
        return {key: _shortened(item, most) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and len(value) > most:
        return [*(_shortened(item, most) for item in value[: most - 1]), f"… {len(value)} in all"]
    if isinstance(value, (list, tuple)):
        return [_shortened(item, most) for item in value]
    if isinstance(value, (str, bytes)) and len(value) > 200:
        return f"{value[:200]!r} … {len(value)} in all"
    return value


def _pieces(directory: Storage, item: Kept, file: File) -> list[shards.Piece]:
    """Return which tensors are in a file, by its header, which is checked."""
    head = directory.read(item.path.name, file.name, 0, file.head)
    if file.head and digest.digest(head) != file.digests[0]:
        raise CheckpointError(f"{item.path / file.name}: the digest of its header is wrong.")
    try:
        return shards.parse_header(head, file.nbytes - file.head)
    except shards.ShardError as error:
        raise CheckpointError(f"{item.path / file.name}: {error}.") from error


def verify(args: argparse.Namespace) -> int:
    """Read everything and check every digest."""
    wrong: list[str] = []
    directory = stores.opened(args.directory)
    stored = [item for item in directory.stored(wrong.append) if args.step is None or item.manifest.step == args.step]
    for text in wrong:
        _say(text)
    for item in stored:
        bad = [
            text for file in (*item.manifest.shards, *item.manifest.values) for text in _verified(directory, item, file)
        ]
        wrong += bad
        _say(f"step {item.manifest.step}: {'; '.join(bad) if bad else 'good'}")
    if not stored:
        _say(f"there is no checkpoint to verify in {args.directory}")
    return 1 if wrong or not stored else 0


def _verified(directory: Storage, item: Kept, file: File) -> list[str]:
    """Return what is wrong with a file, if anything."""
    known = list(file.digests)

    def read(start: int, end: int) -> str:
        return digest.digest(directory.read(item.path.name, file.name, start, end))

    found = [read(0, file.head)] if file.head else []
    for start, end in digest.chunks(file.nbytes - file.head, file.chunk):
        found.append(read(file.head + start, file.head + end))
        _progress(f"step {item.manifest.step}, {file.name}", file.head + end, file.nbytes)
    return [f"{item.path / file.name}: a digest is wrong"] if found != known else []


def _progress(what: str, done: int, total: int) -> None:
    """Show how far it is, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(
            f"\r\x1b[K{what}: {done / 1e9:.2f} of {total / 1e9:.2f} GB" + ("\r\x1b[K" if done == total else "")
        )
        sys.stderr.flush()


def export(args: argparse.Namespace) -> int:
    """Write a checkpoint in another form."""
    from resilience.checkpoint import export as forms  # noqa: PLC0415 - needs torch

    item = _chosen(args)
    if args.target.exists():
        raise CheckpointError(f"{args.target} exists already. Nothing was written.")
    if not 0 <= args.rank < item.manifest.world:
        raise CheckpointError(f"--rank={args.rank}: the checkpoint has ranks 0 to {item.manifest.world - 1}.")
    form = args.format or forms.form_of(args.target)
    forms.import_all(args.modules)
    forms.write(item, args.rank, form, args.target)
    _say(f"step {item.manifest.step} of rank {args.rank} was written to {args.target} ({form}).")
    return 0


def take_over(args: argparse.Namespace) -> int:
    """Take over a checkpoint of others."""
    from resilience.checkpoint import foreign  # noqa: PLC0415 - needs torch

    names = dict(pair.partition("=")[::2] for pair in args.names)
    if args.step < 0 or not all("=" in pair for pair in args.names):
        raise CheckpointError("give --step=N with N of 0 or more, and --name THEIRS=OURS. Nothing was written.")
    if len(names) < len(args.names):
        raise CheckpointError("--name was given twice for one part. Nothing was written. Give each part one name.")
    foreign.take_over(args.source, args.directory, args.step, names)
    _say(f"{args.source} is step {args.step} of {args.directory} now: restore() goes on from step {args.step + 1}.")
    return 0


def prune(args: argparse.Namespace) -> int:
    """Remove all but the newest checkpoints."""
    if args.keep < 1:
        raise CheckpointError(f"--keep={args.keep}: at least one stays. Nothing was removed.")
    if args.keep_every < 0:
        raise CheckpointError(
            f"--keep-every={args.keep_every}: give a number of steps, or 0 for none that stay for good. Nothing was removed."
        )
    directory = stores.opened(args.directory)
    patiently(lambda: directory.claim("resilience checkpoint prune"), hire.DEADLINE_S)
    try:
        for gone in directory.prune(args.keep, args.keep_every):
            _say(f"{gone.path.name} is removed.")
    finally:
        directory.close()
    return 0
