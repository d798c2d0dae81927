"""``resilience kubernetes podgroup``: groups for people without the controller, from flags, from a job's file or from the cluster.

Rule: ``render`` talks to no cluster unless a job there is named; what a scheduler can't express goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from resilience.integrations.kubernetes.podgroups import crd
from resilience.integrations.kubernetes.podgroups.group import DEFAULT_QUEUE, PodGroup, PodGroupError, Role, whole
from resilience.integrations.kubernetes.podgroups.jobs import KINDS, wish
from resilience.integrations.kubernetes.podgroups.schedulers import SCHEDULERS, GangScheduler, read, scheduler

from resilience.command import Parser
from resilience.errors import nearest

_PROG = "resilience kubernetes podgroup"


def main(argv: list[str]) -> int:
    """Run a command; return the exit code."""
    args = _parser().parse_args(argv)
    act = {"render": _render, "apply": _apply, "join": _join, "crd": _crd}[args.command]
    return act(args)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=_PROG, description="Groups of Pods that start together or not at all.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="render|apply|join|crd")
    render = commands.add_parser("render", help="print the group as YAML")
    apply = commands.add_parser("apply", help="create the group in the cluster, or change it")
    for one in (render, apply):
        _add_description(one)
        _add_cluster(one)
    join = commands.add_parser("join", help="label Pods that wait, so that they belong to a group")
    join.add_argument("group", help="the group's name")
    join.add_argument("pods", nargs="+", metavar="pod")
    join.add_argument("--role", default="", help="the Pods' role in the group")
    join.add_argument("--namespace", "-n", default="default")
    _add_scheduler(join, "t9k")
    _add_cluster(join)
    commands.add_parser("crd", help="print the definition of T9k's PodGroup, for a cluster that has none")
    return parser


def _add_scheduler(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--scheduler", default=default, metavar="|".join(SCHEDULERS), help="the gang scheduler")
    parser.add_argument(
        "--scheduler-name", default="", metavar="NAME", help="its schedulerName, where that is not the usual one"
    )


def _add_description(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("a job's group").add_mutually_exclusive_group()
    source.add_argument("--file", "-f", metavar="FILE", help="a job's YAML; - is stdin")
    source.add_argument("--job", metavar="KIND/NAME", help="a job in the cluster")
    own = parser.add_argument_group("a group of your own")
    own.add_argument("--name")
    own.add_argument("--min-member", type=int, metavar="N", help="so many Pods start together")
    own.add_argument("--queue", metavar="QUEUE", help=f"(default: {DEFAULT_QUEUE})")
    own.add_argument("--priority", type=int, metavar="0…100")
    own.add_argument(
        "--role", action="append", default=[], metavar="NAME=N", help="so many Pods of a role; may be repeated"
    )
    parser.add_argument("--namespace", "-n", default="")
    _add_scheduler(parser, "")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kubeconfig", metavar="FILE")
    parser.add_argument("--context", metavar="NAME")


def _render(args: argparse.Namespace) -> int:
    for group, by in _described(args):
        marks = by.marks(group, group.roles[0].name if group.roles else "")
        carried = {
            key: dict(more) for key, more in (("labels", marks.labels), ("annotations", marks.annotations)) if more
        }
        needs = yaml.safe_dump({"metadata": carried, "spec": {"schedulerName": marks.scheduler_name}}, sort_keys=False)
        sys.stdout.write("---\n# Create it before its Pods, which need:\n")
        others = ", ".join(role.name for role in group.roles[1:])
        own = {**marks.labels, **marks.annotations}.keys() - {*by.marks(group).labels, *by.marks(group).annotations}
        for line in needs.splitlines():
            more = f"  # or {others}: each Pod its own" if others and line.split(":")[0].strip() in own else ""
            sys.stdout.write(f"#   {line}{more}\n")
        sys.stdout.write(yaml.safe_dump(by.resource(group), sort_keys=False))
    return 0


def _apply(args: argparse.Namespace) -> int:
    from resilience.integrations.kubernetes.podgroups.apply import ensure  # noqa: PLC0415 - only with a cluster

    api = _connect(args)
    for described, by in _described(args, api):
        group = dataclasses.replace(described, namespace=described.namespace or "default")
        done, _ = ensure(api, group, by, by_hand=True)
        sys.stdout.write(f"podgroup.{by.kind.group}/{group.name} {done} in namespace {group.namespace}\n")
    return 0


def _join(args: argparse.Namespace) -> int:
    from resilience.integrations.kubernetes.podgroups.apply import admission, join  # noqa: PLC0415

    api = _connect(args)
    by = scheduler(args.scheduler, args.scheduler_name)
    group, _ = read(api.get(by.kind, args.group, args.namespace))
    for pod in args.pods:
        admission(api, group, by, pod, args.role)  # of several all or none: a Pod's group can't be changed afterwards
    for pod in args.pods:
        sys.stdout.write(f"pod/{pod} {join(api, group, by, pod, args.role)}\n")
    return 0


def _crd(args: argparse.Namespace) -> int:
    sys.stdout.write(yaml.safe_dump(crd.pod_group(), sort_keys=False))
    return 0


def _connect(args: argparse.Namespace) -> Any:
    from resilience.integrations.kubernetes.api import Api  # noqa: PLC0415

    return Api.connect(args.kubeconfig, args.context)


def _described(args: argparse.Namespace, api: Any = None) -> Iterator[tuple[PodGroup, GangScheduler]]:
    """Yield the groups that the command line asks for, and say what their scheduler can't express."""
    found: list[tuple[PodGroup, GangScheduler, tuple[str, ...]]]
    if not (args.file or args.job):
        found = [(_own(args), scheduler(args.scheduler or "t9k", args.scheduler_name), ())]
    else:
        given = [
            flag
            for flag in ("name", "min_member", "queue", "priority", "role")
            if getattr(args, flag) not in (None, [])
        ]
        if given:
            raise PodGroupError(f"--{given[0].replace('_', '-')} is for a group of your own: a job says it itself.")
        jobs = _from_file(args.file) if args.file else [_from_cluster(args, api or _connect(args))]
        found = list(_of_jobs(jobs, args))
    for group, by, notes in found:
        for note in dict.fromkeys((*notes, *by.notes(group))):
            sys.stderr.write(f"{_PROG}: note: {note}\n")
        yield group, by


def _own(args: argparse.Namespace) -> PodGroup:
    needed = {"--name": args.name, "--min-member": args.min_member}
    missing = " and ".join(flag for flag, told in needed.items() if told in (None, ""))
    if missing:
        raise PodGroupError(f"give {missing}, or a job with --file or --job.")
    return PodGroup(
        args.name, args.min_member, args.queue or DEFAULT_QUEUE, args.priority, _roles(args.role), args.namespace
    )


def _roles(words: Sequence[str]) -> tuple[Role, ...]:
    found = []
    for word in words:
        name, _, text = word.partition("=")
        number = whole(text)
        if number is None:
            raise PodGroupError(f"--role={word}: write NAME=N, as in --role=worker=2.")
        found.append(Role(name, number))
    return tuple(found)


def _of_jobs(
    jobs: Sequence[Any], args: argparse.Namespace
) -> Iterator[tuple[PodGroup, GangScheduler, tuple[str, ...]]]:
    asked = False
    for job in jobs:
        wanted = wish(job)
        if wanted is None:
            continue
        asked = True
        by = scheduler(args.scheduler, args.scheduler_name) if args.scheduler else wanted.scheduler
        group = dataclasses.replace(wanted.group, namespace=wanted.group.namespace or args.namespace)
        notes = tuple(
            note for note in wanted.notes if by is wanted.scheduler or note not in wanted.scheduler.notes(group)
        )
        yield group, by, notes
    if not asked:
        raise PodGroupError(
            "no job there asks for a group. A T9k job does with spec.scheduler.t9kScheduler, a Job or JobSet with the label "
            "resilience.dev/gang: t9k."
        )


def _from_file(name: str) -> list[Any]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        documents = [item for item in yaml.safe_load_all(text) if item]
    except (OSError, yaml.YAMLError) as error:
        raise PodGroupError(f"{name} can't be read: {error}") from error
    if not all(isinstance(item, dict) for item in documents):
        raise PodGroupError(f"{name} holds something that is no Kubernetes object.")
    jobs = [item for item in documents if str(item.get("kind")) in KINDS]
    if not jobs:
        kinds = ", ".join(sorted({str(item.get("kind")) for item in documents})) or "nothing"
        close = nearest(str(documents[0].get("kind")), KINDS) if documents else ""
        raise PodGroupError(f"{name} has no job of a kind that we know: it has {kinds}.{close}")
    return jobs


def _from_cluster(args: argparse.Namespace, api: Any) -> Any:
    kind, _, name = args.job.partition("/")
    known = {word.lower(): found for word, found in KINDS.items()}.get(kind.lower())
    if known is None or not name:
        raise PodGroupError(f"--job={args.job}: write KIND/NAME.{nearest(kind, KINDS)} Kinds: {', '.join(KINDS)}.")
    found = api.get(known.kind, name, args.namespace or "default")
    return {**found, "kind": known.name, "apiVersion": known.api_version}
