"""What a job is rendered from: a dataclass of values, its flags, its values file, and what is said about each of them.

Rule: the dataclass is the one list. Flags, the keys of a values file and the documentation come from it; an unknown key raises and
names the nearest.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.reader import ReaderError

from resilience.errors import ConfigError, nearest

_Values = TypeVar("_Values")
# What PyYAML raises for what looks like a date or a number, and is none: 2024-02-30, 0b_, !!int "". ValueError: encodings too.
# ValueError and OverflowError: a character beyond the last one.
_NO_VALUE = (ValueError, OverflowError, IndexError, KeyError, AttributeError)
_SHOWN = 60
_MOST_BITS = 1000  # of a number: Python refuses to print one that is much longer


class ValuesError(ConfigError):
    """A value of a training job that can't be meant."""


def value(default: Any, doc: str) -> Any:
    """Return a field with its default and what it means."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def settle(values: Any, needed: tuple[str, ...]) -> None:
    """Have every field in its type; raise for one of another, and for one that is needed and missing."""
    for item in dataclasses.fields(values):
        typed = _typed(item.name, getattr(values, item.name), item)
        _refuse_surrogates(item.name, typed)
        object.__setattr__(values, item.name, typed)
    for name in needed:
        if not getattr(values, name):
            how = (
                f"give --{name.replace('_', '-')}"
                if name != "script"
                else "give it behind --, as in `-- train.py --lr 0.1`"
            )
            raise ValuesError(f"{name} is missing: {how}, or the key {name!r} in the file that --values names.")


def documentation(kind: Any) -> dict[str, str]:
    """Return what each value means."""
    return {item.name: str(item.metadata["doc"]) for item in dataclasses.fields(kind)}


def from_mapping(kind: type[_Values], given: Mapping[str, Any], source: str = "values") -> _Values:
    """Return the values in a mapping; raise for a key that there is not."""
    known = documentation(kind)
    for key in given:
        if key not in known:
            raise ValuesError(f"unknown value {key!r} ({source}).{nearest(str(key), known)}")
    return kind(**given)


def from_file(path: str) -> dict[str, Any]:
    """Return what a values file says, unchecked but for its form."""
    data = b""
    try:
        data = Path(path).read_bytes()
        found = _Loader(data.decode("utf-8")).get_single_data()  # what yaml.safe_load does: plain data only
    except RecursionError as error:
        raise ValuesError(f"the values file {path} can't be read: its lists or keys are nested too deeply.") from error
    except OSError as error:
        raise ValuesError(f"the values file {path} can't be read: {error.strerror}.") from error
    except (yaml.YAMLError, *_NO_VALUE) as error:
        raise ValuesError(f"the values file {path} can't be read: {_what_yaml_says(error, data)}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValuesError(f"the values file {path} must hold keys and values, not {type(found).__name__}.")
    return found


class _Loader(yaml.SafeLoader):
    """YAML's safe one, which says where a value is that looks like a date or a number, and is none."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _NO_VALUE as error:
            kind = node.tag.rpartition(":")[2]
            raise _NoValueError(None, None, f"{str(node.value)[:_SHOWN]!r} is no {kind}", node.start_mark) from error


class _NoValueError(yaml.MarkedYAMLError):
    """A word that YAML takes for a date or a number, and is none."""


def _what_yaml_says(error: Exception, data: bytes) -> str:
    """Return in one line what is wrong in a file, on which line, and what to do where that is known."""
    if isinstance(error, UnicodeDecodeError):
        lines = data[: error.start].count(b"\n")
        return f"on line {lines + 1}: it is not written as UTF-8."
    if isinstance(error, ReaderError):
        lines = data.decode("utf-8").count("\n", 0, error.position)
        return f"on line {lines + 1}: the character {chr(error.character)!r} can't be in it."
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{' '.join(str(error).split())}."
    begun = f", {error.context}" if error.context else ""
    if begun and error.context_mark is not None and error.context_mark.line != error.problem_mark.line:
        begun += f" that begins on line {error.context_mark.line + 1}"
    quote = " A text that is no date or number: quote it." if isinstance(error, _NoValueError) else ""
    return f"on line {error.problem_mark.line + 1}{begun}: {error.problem}.{quote}"


def as_file(kind: Any) -> str:
    """Return a values file with every value, its default and what it means."""
    lines = []
    for item in dataclasses.fields(kind):
        default = _default(item)
        shown = yaml.safe_dump(list(default) if isinstance(default, tuple) else default, default_flow_style=True)
        lines.append(f"{item.name}: {shown.splitlines()[0]}  # {item.metadata['doc']}\n")
    return "".join(lines)


def add_flags(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Add a flag for every value, a values file below them, and the script behind ``--``."""
    parser.add_argument("--values", metavar="FILE", help="YAML file with any of the values below; flags go before it")
    for item in dataclasses.fields(kind):
        if item.name != "script":
            _add(parser, item)
    parser.add_argument("script", nargs="*", help="the training script and its arguments, behind --")


def from_flags(kind: type[_Values], args: argparse.Namespace) -> _Values:
    """Return what the flags say, and below them the values file."""
    given = from_file(args.values) if args.values else {}
    flags = {name: getattr(args, name) for name in documentation(kind)}
    told = {name: text for name, text in flags.items() if text not in (None, [])}
    return from_mapping(kind, {**given, **told}, args.values or "flags")


def launcher_flags(values: Any) -> list[str]:
    """Return what a launcher is told on every engine; the values that these need have the same names everywhere."""
    least = values.min_nodes or values.nodes
    flags = [
        f"--nnodes={values.nodes}" if least == values.nodes else f"--nnodes={least}:{values.nodes}",
        f"--nproc-per-node={values.ranks}",
        f"--max-restarts={values.max_restarts}",
        f"--ft-stop-grace={values.stop_grace}",
    ]
    if values.network_check:
        flags += ["--network-check", *([f"--accelerator={values.accelerator}"] if values.accelerator else [])]
    return flags


def _default(item: dataclasses.Field[Any]) -> Any:
    return {} if item.default is dataclasses.MISSING else item.default


def _add(parser: argparse.ArgumentParser, item: dataclasses.Field[Any]) -> None:
    flag, doc = f"--{item.name.replace('_', '-')}", str(item.metadata["doc"]).replace("%", "%%")
    default = _default(item)
    more: dict[str, Any] = {
        "dest": item.name,
        "help": f"{doc} (default: {str(default).replace('%', '%%')})" if default not in ("", (), {}) else doc,
    }
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_const", const=True, **more)
    elif isinstance(default, int):
        parser.add_argument(flag, type=int, metavar="N", **more)
    elif isinstance(default, tuple):
        more["help"] = doc.replace("; a list, or one line", "").replace("; a list of lines", "") + "; once for each"
        parser.add_argument(flag, action="append", metavar="X", **more)
    elif isinstance(default, dict):
        parser.add_argument(flag, action=_Pairs, metavar="NAME=X", **more)
    else:
        parser.add_argument(flag, metavar="X", **more)


class _Pairs(argparse.Action):
    """``--env NAME=X``, as often as one likes."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        name, sign, text = str(values).partition("=")
        if not sign or not name:
            raise ValuesError(f"{option_string} {values}: write NAME=X.")
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), name: text})


def _refuse_surrogates(name: str, typed: Any) -> None:
    """Raise for halves of characters (YAML's "\\uD800", bytes of another encoding in a flag): no file can hold them."""
    texts = [typed] if isinstance(typed, str) else typed if isinstance(typed, tuple) else []
    texts = [*typed.keys(), *typed.values()] if isinstance(typed, Mapping) else texts
    for text in texts:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValuesError(f"{name} has {text!r} in it, which is no text: it can't be written as UTF-8.")


def _text(word: Any) -> str:
    """Return what a value of a mapping says; yes and no as YAML writes them."""
    return str(word).lower() if isinstance(word, bool) else str(word)


def _is_word(given: Any) -> bool:
    return isinstance(given, (str, float)) or (isinstance(given, int) and given.bit_length() <= _MOST_BITS)


def _words(name: str, text: str) -> list[str]:
    """Return the words of a text, as a shell reads them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValuesError(f"{name} is {text!r}, which no shell can read: {error}. Write a list of words.") from error


def _typed(name: str, given: Any, item: dataclasses.Field[Any]) -> Any:
    """Return a value in the type of its field; raise where it is of another one."""
    default = _default(item)
    if isinstance(default, bool):
        fits, wanted = isinstance(given, bool), "true or false"
    elif isinstance(default, int):
        fits, wanted = type(given) is int and _is_word(given), "a whole number"
    elif isinstance(default, tuple):
        given = _words(name, given) if isinstance(given, str) else given
        fits = isinstance(given, (list, tuple)) and all(map(_is_word, given))
        given, wanted = tuple(map(str, given)) if fits else given, "a list of words, or one line of them"
    elif isinstance(default, dict):
        fits = isinstance(given, Mapping) and all(map(_is_word, given.values()))
        given, wanted = {str(k): _text(v) for k, v in given.items()} if fits else given, "names and texts"
    else:
        fits = type(given) is not bool and _is_word(given)
        given, wanted = str(given) if fits else given, "a text"
    if not fits:
        shown = repr(given) if type(given) is not int or _is_word(given) else "a number of many digits"
        raise ValuesError(f"{name} is {shown}: it must be {wanted}.")
    return given
