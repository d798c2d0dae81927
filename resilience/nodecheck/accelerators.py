"""The processors that a node check knows: a registry of small classes.

An accelerator says how many devices there are, how to use one, and which backend its collectives have. The tasks are the same for
all (:mod:`tasks`). A class is found, in this order, by its name here, as ``module::Class``, or in the entry points of the group
``resilience.accelerators``; ``auto`` takes what torch finds.

1) (check process) makes the object: what the class imports is imported there, never in the launcher
2) (check process) ``count()``, once
3) (check process) ``use(index)``, once, then the tasks on the device that it returns, with ``synchronize()`` around what is timed

Hazard: with ``auto`` a node whose devices are gone looks like one that never had any. On several nodes the check sees that the
others have some; for one node name the accelerator.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, TypeVar

from resilience.errors import ConfigError, double_colon, imported, nearest, nearest_class

GROUP = "resilience.accelerators"
AUTO = "auto"


class Accelerator:
    """A kind of processor. Derive from it, set ``type`` and ``backend``, and register it; what is below works with every device
    that torch knows by its type, and may be overridden."""

    name = ""  # what it was registered as
    type = ""  # torch's: torch.device(type)
    backend = ""  # torch.distributed's
    size = 4096  # of the square matrices of the GEMM
    # Products in a row that are timed as one: a device needs less for one than a clock and a scheduler can tell.
    burst = 20
    dtype = "float16"  # of the GEMM; small whole numbers are exact in it, so the product is either right or wrong
    gather_mib = 16  # what each device sends in the all-gather

    def count(self) -> int:
        """Return how many devices this node has."""
        return int(self._module().device_count())

    def use(self, index: int) -> Any:
        """Make a device the current one; return it."""
        import torch  # noqa: PLC0415

        self._module().set_device(index)
        return torch.device(self.type, index)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        self._module().synchronize()

    def describe(self, index: int) -> str:
        """Return what people call the device."""
        naming = getattr(self._module(), "get_device_name", None)
        return str(naming(index)) if naming is not None else f"{self.type}:{index}"

    def multiply(self, left: Any, right: Any) -> Any:
        """Return the product of two matrices on the device. This is what is timed, and verified."""
        return left @ right

    def _module(self) -> Any:
        import torch  # noqa: PLC0415

        return torch.get_device_module(self.type)


Kind = TypeVar("Kind", bound=type[Accelerator])
_REGISTERED: dict[str, type[Accelerator]] = {}
_ALIASES = {  # DLRover's words, Kubernetes' resources, and torch's device types
    "nvidia.com/gpu": "nvidia",
    "nvidia-gpu": "nvidia",
    "gpu": "nvidia",
    "cuda": "nvidia",
    "ascend-npu": "ascend",
    "huawei.com/ascend910": "ascend",
    "npu": "ascend",
}


def register(name: str) -> Callable[[Kind], Kind]:
    """Register a class under a name for ``--accelerator``. The module must be imported by then: name it as ``module::Class``,
    or give it an entry point."""

    def keep(kind: Kind) -> Kind:
        kind.name = name
        _REGISTERED[name] = kind
        return kind

    return keep


@register("cpu")
class Cpu(Accelerator):
    """The host's own processors, as one device."""

    type = "cpu"
    backend = "gloo"
    size = 512
    burst = 1
    dtype = "float32"
    gather_mib = 1

    def count(self) -> int:
        """See base class."""
        return 1

    def use(self, index: int) -> Any:
        """See base class."""
        import torch  # noqa: PLC0415

        return torch.device("cpu")

    def synchronize(self) -> None:
        """See base class."""

    def describe(self, index: int) -> str:
        """See base class."""
        return "cpu"


@register("nvidia")
class Nvidia(Accelerator):
    """NVIDIA's, and whatever else torch calls ``cuda``. NOT RUN ON A GPU."""

    type = "cuda"
    backend = "nccl"


@register("ascend")
class Ascend(Accelerator):
    """Huawei's NPUs, through ``torch_npu``. NOT RUN ON THE HARDWARE: written from its documentation."""

    type = "npu"
    backend = "hccl"

    def __init__(self) -> None:
        importlib.import_module("torch_npu")  # makes torch.npu


def names() -> list[str]:
    """Return every name that ``--accelerator`` takes, besides ``module::Class``."""
    plugged = [point.name for point in importlib.metadata.entry_points(group=GROUP)]
    return [AUTO, *_REGISTERED, *_ALIASES, *(name for name in plugged if name not in _REGISTERED)]


def check_name(text: str) -> None:
    """Raise :class:`ConfigError` for a name that can't be meant. Imports nothing."""
    word = text.strip()
    module, separator, name = word.partition("::")
    if separator and module and name:
        return
    known = names()
    if separator or _plain(word) not in known:
        meant = double_colon(word) or nearest(_plain(word), known)
        raise ConfigError(
            f"accelerator={text!r} is not known.{meant} Known are {', '.join(known)}, and module::Class for one of your own. "
            "Nothing was started."
        )


def load(text: str) -> Accelerator:
    """Find the class and make the object; raise :class:`ConfigError` where there is none. What it imports may raise anything."""
    check_name(text)
    made = _find(text.strip())
    for what in ("size", "burst", "gather_mib"):
        number = getattr(made, what)
        if not isinstance(number, int) or number < 1:
            raise ConfigError(
                f"accelerator={text!r}: its {what} is {number!r}; a whole number from 1 up is needed. Nothing was started."
            )
    return made


def _find(word: str) -> Accelerator:
    if "::" in word:
        return _from_module(word)
    plain = _plain(word)
    plain = _ALIASES.get(plain, plain)
    if plain == AUTO:
        return _found_by_torch()
    if plain in _REGISTERED:
        return _REGISTERED[plain]()
    (point, *_) = importlib.metadata.entry_points(group=GROUP, name=plain)
    return _made(point.load(), plain)


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")


def _from_module(word: str) -> Accelerator:
    module_name, _, name = word.partition("::")
    try:
        module = imported(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"accelerator={word!r}: {error}. Nothing was started.") from error
    if not hasattr(module, name):
        close = nearest_class(name, module)
        raise ConfigError(f"accelerator={word!r}: module {module_name!r} has no {name!r}.{close} Nothing was started.")
    return _made(getattr(module, name), word)


def _made(found: Any, where: str) -> Accelerator:
    if not isinstance(found, type) or not issubclass(found, Accelerator):
        raise ConfigError(
            f"{where} is no subclass of resilience.nodecheck.accelerators.Accelerator. Nothing was started."
        )
    made = found()
    if not made.type or not made.backend:
        raise ConfigError(
            f"{where} needs a type (torch.device) and a backend (torch.distributed). Nothing was started."
        )
    made.name = vars(found).get("name") or where.rpartition("::")[2]  # not what it inherits from another one
    return made


def _found_by_torch() -> Accelerator:
    """Return the accelerator that torch finds on this node, else the processors of the host."""
    import torch  # noqa: PLC0415

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return Cpu()
    for point in importlib.metadata.entry_points(group=GROUP):
        _REGISTERED.setdefault(point.name, point.load())
    for kind in _REGISTERED.values():
        if kind.type == found.type:
            return kind()
    raise ConfigError(
        f"torch finds devices of the type {found.type!r}, which no accelerator is registered for. Nothing was started. Add one: "
        "docs/new-accelerator.md; or check the host's processors only, with --accelerator=cpu."
    )
