"""Words that go into a cluster, as argparse types: what Kubernetes would refuse later is refused where it was written.

Rule: a word that passes here may still name nothing. Whether it does is for the API server to say.
"""

from __future__ import annotations

import argparse
import re

_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_KEY = rf"({_NAME}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_REQUIREMENT = re.compile(
    rf"!?\s*{_KEY}|{_KEY}\s*(=|==|!=)\s*{_VALUE}|{_KEY}\s+(in|notin)\s+\(\s*{_VALUE}(\s*,\s*{_VALUE})*\s*\)"
)
_LONGEST_NAME, _LONGEST_LABEL = 253, 63
_SHORTEST_LEASE_S = 1.0


def name(text: str) -> str:
    """Return the name of a thing in a cluster."""
    if not re.fullmatch(_NAME, text) or len(text) > _LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"{text!r} can't be a name: small letters, digits, - and . inside")
    return text


def namespace(text: str) -> str:
    """Return the name of a namespace, or nothing for all of them."""
    if text and ("." in text or len(text) > _LONGEST_LABEL or not re.fullmatch(_NAME, text)):
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be a namespace: small letters, digits and - inside, at most 63"
        )
    return text


def image(text: str) -> str:
    """Return the name of a container image."""
    if not text or any(letter.isspace() for letter in text):
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be an image: write it without spaces, as in registry/image:tag"
        )
    return text


def label_key(text: str) -> str:
    """Return the key of a label."""
    if not re.fullmatch(_KEY, text) or len(text.rpartition("/")[2]) > _LONGEST_LABEL:
        raise argparse.ArgumentTypeError(f"{text!r} can't be the key of a label, such as example.com/job")
    return text


def label_value(text: str) -> str:
    """Return the value of a label; it may be empty."""
    if not re.fullmatch(_VALUE, text) or len(text) > _LONGEST_LABEL:
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be the value of a label: letters, digits, and -, _ and . inside, at most 63"
        )
    return text


def variable(text: str) -> str:
    """Return the name of an environment variable of a container."""
    if not re.fullmatch(r"[-._A-Za-z][-._A-Za-z0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} can't name a variable: letters, digits, _, - and ., no digit first")
    return text


def selector(text: str) -> str:
    """Return a label selector that selects something less than everything."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty, which would be every pod of the cluster; name a label")
    for part in re.split(r",(?![^(]*\))", text):
        if not _REQUIREMENT.fullmatch(part.strip()):
            raise argparse.ArgumentTypeError(f"{part.strip()!r} can't be meant; write key, key=value or key in (a, b)")
    return text


def count(text: str) -> int:
    """Return a whole number from 0 up."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def seconds(text: str) -> float:
    """Return a number of seconds above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def lease(text: str) -> float:
    """Return how long a lease lasts: long enough that it can be renewed in time."""
    if seconds(text) < _SHORTEST_LEASE_S:
        raise argparse.ArgumentTypeError(
            f"{text} s is too short to be renewed in time; give at least {_SHORTEST_LEASE_S:g}"
        )
    return float(text)
