"""The shape of the code: who may import whom, what an import costs, and what is not to be found anywhere."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import resilience
from resilience.monitor import proc
from resilience.pulse import channel

ROOT = Path(resilience.__file__).parent
REPO = ROOT.parent

PUBLIC = [
    "FlashCheckpoint",
    "Guard",
    "RankMonitorClient",
    "ResilienceError",
    "WorkloadAction",
    "WorkloadControlRequest",
    "__version__",
    "annotate",
    "done",
    "end_all_sections",
    "expect_heartbeats",
    "heartbeat",
    "record",
    "section",
    "stop_requested",
]

# Which rooms a room may import, besides itself. Nothing imports what stands above it.
BASE = {"config", "errors", "kin"}
ADAPTERS_MAY_IMPORT = {
    "checkpoint",
    "command",
    "failover",
    "groups",
    "integrations",
    "pulse",
    "recording",
    *BASE,
}  # what a rank may
MAY_IMPORT = {
    "errors": set[str](),
    "cgroups": set[str](),
    "kin": set[str](),
    "command": {"errors"},
    "config": {"errors", "values"},
    "values": {"errors"},
    "pulse": BASE,
    "recording": {"pulse", *BASE},
    "monitor": {"pulse", *BASE},
    "failover": {"pulse", *BASE},
    "groups": BASE,
    "observe": {"failover", "pulse", *BASE},
    "checkpoint": {"cgroups", "command", "pulse", *BASE},
    "nodecheck": {"cgroups", *BASE},
    "launcher": {
        "checkpoint",
        "command",
        "failover",
        "groups",
        "monitor",
        "nodecheck",
        "observe",
        "pulse",
        "values",
        *BASE,
    },
    "_worker": {"pulse", "recording", *BASE},
    "__init__": {"checkpoint", "pulse", "recording", "errors"},
    "__main__": {"checkpoint", "command", "launcher", "observe", "errors", "kin", "__init__"},
    "run": {"__main__"},
}


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module of the package, by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["resilience", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path, top_level_only: bool = False) -> tuple[str, ...]:
    """Return the dotted name of everything a file imports (of ``from a import b`` both ``a`` and ``a.b``)."""
    tree = tree_of(path)
    found: list[str] = []
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            found += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def adapters() -> dict[str, Path]:
    """Return every module of the integrations, by the name that it is installed under."""
    found = {}
    for path in sorted((REPO / "integrations").rglob("*.py")):
        parts = ["resilience", "integrations", *path.relative_to(REPO / "integrations").with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def closure(start: str, top_level_only: bool = False) -> set[str]:
    """Return every module that importing ``start`` can come to import, ours followed, others named."""
    known = modules()
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        if name in known:
            waiting += imports(known[name], top_level_only)
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return reached


def top_names(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


# -- the public surface -----------------------------------------------------------------------------------------------


def test_public_names_are_exactly_these() -> None:
    assert resilience.__all__ == PUBLIC == sorted(PUBLIC)
    assert dir(resilience) == PUBLIC
    for name in PUBLIC:
        assert getattr(resilience, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'hartbeat'"):
        _ = resilience.hartbeat


def test_package_is_typed_and_its_version_is_the_one_installed() -> None:
    assert (ROOT / "py.typed").exists()
    try:
        installed = importlib.metadata.version("resilience-sdk")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed here: left out is that the version in the code is that of the package")
    assert resilience.__version__ == installed


def test_every_folder_of_the_package_is_packaged() -> None:
    listed = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    for folder in {path.parent for path in ROOT.rglob("*.py")}:
        dotted = ".".join(["resilience", *folder.relative_to(ROOT).parts])
        assert f'"{dotted}"' in listed, f"{dotted} would be missing from a wheel"


# -- rooms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", sorted(modules()))
def test_dependencies_point_one_way(module: str) -> None:
    room = room_of(module)
    allowed = MAY_IMPORT[room] | {room}
    for name in imports(modules()[module]):
        if name == "resilience" or not name.startswith("resilience."):
            continue
        target = room_of(name)
        if target in MAY_IMPORT:  # otherwise a name out of resilience/__init__.py
            assert target in allowed, f"{module} imports {name}"


def test_every_room_is_in_the_table() -> None:
    assert {room_of(module) for module in modules()} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    "start", ["resilience", "resilience._worker.__main__", *[name for name in modules() if ".pulse" in name]]
)
def test_what_a_rank_imports_never_imports_a_launcher_or_a_monitor(start: str) -> None:
    reached = closure(start)
    assert not [name for name in reached if name.startswith(("resilience.launcher", "resilience.monitor"))]


def test_nothing_imports_the_integrations() -> None:
    for module, path in modules().items():
        bad = [name for name in imports(path) if "integrations" in name.split(".")]
        assert not bad, f"{module} imports {bad}"


@pytest.mark.parametrize("module", sorted(adapters()))
def test_adapters_stand_on_what_a_rank_may_import_and_on_their_own_framework(module: str) -> None:
    own = {"lightning": {"lightning", "pytorch_lightning"}, "pytorch_lightning": {"pytorch_lightning"}}
    own["huggingface"] = {"transformers"}
    own["kubernetes"] = {"kubernetes", "urllib3", "yaml"}
    own["ray"] = {"omegaconf", "ray"}
    own["values"] = {"yaml"}
    parts = module.split(".")
    frameworks = own.get(parts[2], set()) if len(parts) > 2 else set()
    more = {"nodecheck"} if parts[2:] == ["flags"] else set()  # no rank: it knows what launchers are told
    for name in imports(adapters()[module]):
        if name.startswith("resilience."):
            target = room_of(name)
            assert target in ADAPTERS_MAY_IMPORT | more or target not in MAY_IMPORT, f"{module} imports {name}"
        else:
            top = name.partition(".")[0]
            assert top in sys.stdlib_module_names | {"torch", "resilience"} | frameworks, f"{module} imports {name}"


def test_every_adapter_is_packaged() -> None:
    listed = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    for folder in {path.parent for path in adapters().values()}:
        dotted = ".".join(["resilience", "integrations", *folder.relative_to(REPO / "integrations").parts])
        assert f'"{dotted}"' in listed, f"{dotted} would be missing from a wheel"


def test_nobody_writes_import_integrations() -> None:
    for folder in ("resilience", "integrations", "tests", "benchmarks", "examples"):
        for path in (REPO / folder).rglob("*.py"):
            bad = [name for name in imports(path) if name.partition(".")[0] == "integrations"]
            assert not bad, f"{path} imports {bad}: it would be loaded twice; write resilience.integrations"


def test_monitor_imports_neither_torch_nor_anything_installed() -> None:
    reached = closure("resilience.monitor.__main__", top_level_only=True)
    assert "resilience.monitor.verdict" in reached
    for module in [name for name in modules() if name in reached and room_of(name) in ("monitor", "pulse")]:
        reached |= set(imports(modules()[module]))  # those inside functions too
    assert top_names(reached) - {"resilience"} <= sys.stdlib_module_names


def test_rank_imports_nothing_installed_but_what_it_asks_for_itself() -> None:
    for start in ("resilience", "resilience.pulse.client", "resilience.pulse.lifeline", "resilience.config"):
        reached = top_names(closure(start, top_level_only=True))
        assert reached - {"resilience"} <= sys.stdlib_module_names, start


# -- things that are nowhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", sorted(modules() | adapters()))
def test_only_config_touches_the_environment(module: str) -> None:
    if module == "resilience.config":
        return
    for node in ast.walk(tree_of((modules() | adapters())[module])):
        names = {getattr(node, "attr", ""), getattr(node, "id", "")} | {
            alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)
        }
        assert not names & {"environ", "environb", "getenv", "putenv", "unsetenv"}, f"line {node.lineno}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", sorted(modules() | adapters()))
def test_nothing_is_unpickled_or_evaluated(module: str) -> None:
    tree = tree_of((modules() | adapters())[module])
    forbidden = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml.load", "torch.load"}
    if module == "resilience._worker.__main__":
        forbidden.remove("marshal")  # a script may be a .pyc: the user's own code, which is run anyway
    unsafe = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "os.system", "os.popen"}
    if module == "resilience.checkpoint.foreign":
        # It reads pickles of others, with unpicklers that build only what they know.
        forbidden.remove("pickle")
        unsafe.remove("torch.load")
        loads = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "load" in ast.unparse(node.func)]
        assert not any(ast.unparse(node.func).startswith("pickle.") for node in loads)
        torchs = [node for node in loads if ast.unparse(node.func) == "torch.load"]
        assert torchs
        assert all("weights_only=True" in ast.unparse(node) for node in torchs)
    assert not forbidden & set(imports((modules() | adapters())[module]))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    allowed = {"exec", "compile"} if module == "resilience._worker.__main__" else set()
    assert called & {"eval", "exec", "compile", "__import__"} <= allowed
    attributes = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not attributes & unsafe


@pytest.mark.parametrize("module", sorted(modules() | adapters()))
def test_every_module_says_what_it_is_for_and_is_not_too_long(module: str) -> None:
    text = (modules() | adapters())[module].read_text(encoding="utf-8")
    assert ast.get_docstring(tree_of((modules() | adapters())[module])), "no docstring"
    assert len(text.splitlines()) <= 400, "a file over 400 lines wants a reason"


# -- what an import costs ---------------------------------------------------------------------------------------------


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


@pytest.mark.spawns
def test_importing_and_calling_us_imports_no_torch() -> None:
    code = (
        "import sys, resilience\n"
        "resilience.heartbeat(1)\n"
        "with resilience.section('step'), resilience.expect_heartbeats(): pass\n"
        "resilience.RankMonitorClient(); resilience.end_all_sections(); resilience.done()\n"
        "print(sorted(name for name in ('torch', 'numpy', 'yaml') if name in sys.modules))"
    )
    assert run(code).strip() == "[]"


@pytest.mark.spawns
def test_rank_really_loads_no_launcher_and_no_monitor() -> None:
    code = (
        "import sys, pkgutil, resilience.pulse, resilience._worker.__main__\n"
        "for item in pkgutil.iter_modules(resilience.pulse.__path__):\n"
        "    __import__('resilience.pulse.' + item.name)\n"
        "print([n for n in sys.modules if n.startswith(('resilience.launcher', 'resilience.monitor', 'torch'))])"
    )
    assert run(code).strip() == "[]"


@pytest.mark.spawns
def test_import_costs_less_than_the_start_of_python_itself() -> None:
    """That starts in some 20 ms where nothing else runs: far below the 50 ms that the import may take."""

    def cost(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    run("import resilience")  # compiled once, as an installed package is
    with_us, without = [], []
    for _ in range(15):  # processor time, interleaved, and the best of each: a neighbour's load only ever adds
        with_us.append(cost("import resilience"))
        without.append(cost("pass"))
    assert min(with_us) - min(without) < min(without)


@pytest.mark.spawns
def test_real_monitor_maps_no_torch_and_ends_when_its_launcher_lets_go(tmp_path: Path) -> None:
    ours, theirs = channel.pair()
    pidfd = os.pidfd_open(os.getpid())
    boot = Path(proc.__file__).with_name("__main__.py")
    command = [sys.executable, "-I", "-S", str(boot), str(theirs.fileno()), str(pidfd), str(tmp_path)]
    monitor = subprocess.Popen(command, pass_fds=(theirs.fileno(), pidfd), stdin=subprocess.DEVNULL)
    theirs.close()
    ours.settimeout(20)
    try:
        assert channel.receive(ours) == ({"op": "status"}, [])
        maps = Path(f"/proc/{monitor.pid}/maps").read_text()
        assert "libpython" in maps or "python" in maps
        assert "torch" not in maps
        assert "numpy" not in maps
    finally:
        ours.close()
        os.close(pidfd)
        try:
            assert monitor.wait(20) == 0
        finally:
            monitor.kill()
            monitor.wait()
