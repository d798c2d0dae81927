"""The shipped manifests: the controller's Deployment, its account and its roles. ``resilience kubernetes manifests`` prints them.

Rule: the roles hold what the parts use and nothing else; a test runs the controller as that account against a real API server.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from resilience.integrations.kubernetes import controller, words
from resilience.integrations.kubernetes.api import CONTROLLER_NAMESPACE

from resilience.command import Parser

NAMESPACE, IMAGE = CONTROLLER_NAMESPACE, "resilience:latest"
RBAC = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
_PROG = "resilience kubernetes manifests"
_FILE = Path(__file__).with_name("controller.yaml")


def manifests(namespace: str = NAMESPACE, image: str = IMAGE, replicas: int = 2) -> list[dict[str, Any]]:
    """Return all of them as plain data, for a namespace and an image."""
    found = [document for document in yaml.safe_load_all(_FILE.read_text(encoding="utf-8")) if document]
    for document in found:
        kind, meta = document["kind"], document["metadata"]
        if kind == "Namespace":
            meta["name"] = namespace
        elif "namespace" in meta:
            meta["namespace"] = namespace
        for subject in document.get("subjects", ()):
            subject["namespace"] = namespace
        if kind == "Deployment":
            document["spec"]["replicas"] = replicas
            document["spec"]["template"]["spec"]["containers"][0]["image"] = image
    return found


def main(argv: list[str]) -> int:
    """Print the manifests as YAML."""
    parser = Parser(
        prog=_PROG,
        description="Print the controller's manifests; pipe them into `kubectl apply -f -`.",
    )
    parser.add_argument(
        "--namespace", type=words.name, default=NAMESPACE, help="where the controller runs (default: %(default)s)"
    )
    parser.add_argument(
        "--image",
        type=words.image,
        help=f"the controller's: one that has resilience-sdk[kubernetes] in it (default: {IMAGE}, which you would have to make)",
    )
    parser.add_argument("--replicas", type=words.count, default=2, help="of which one acts (default: %(default)s)")
    parser.add_argument(
        "--arg", action="append", default=[], metavar="ARGUMENT", help="one more argument of the controller"
    )
    parser.add_argument(
        "--only", choices=["rbac"], help="the roles and their bindings: safe to apply where the controller runs already"
    )
    asked = parser.parse_args(argv)
    given = controller.parser().parse_args(asked.arg)  # says it, and ends, where the controller would
    controller.named_parts(given.parts)
    documents = manifests(asked.namespace, asked.image or IMAGE, asked.replicas)
    if asked.image is None and not asked.only:
        sys.stderr.write(
            f"{_PROG}: note: no image was named: the Deployment has {IMAGE}, which is in no registry. Give --image=YOURS, one that "
            "has resilience-sdk[kubernetes] in it.\n"
        )
    if asked.only:
        documents = [document for document in documents if document["kind"] in RBAC]
    for document in documents:
        if document["kind"] == "Deployment":
            document["spec"]["template"]["spec"]["containers"][0]["args"] += asked.arg
    yaml.safe_dump_all(documents, sys.stdout, sort_keys=False)
    return 0
