"""The wheel holds what it should, and works in an environment that has nothing of this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, with the build tools that are installed: no network."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("resilience", "integrations"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(out), str(copy)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_the_type_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"resilience/{path.relative_to(ROOT / 'resilience')}" for path in (ROOT / "resilience").rglob("*.py")}
    adapters = {
        f"resilience/integrations/{path.relative_to(ROOT / 'integrations')}"
        for path in (ROOT / "integrations").rglob("*.py")
    }
    manifests = "resilience/integrations/kubernetes/manifests/controller.yaml"
    assert modules | adapters | {"resilience/py.typed", manifests} <= names
    assert not [name for name in names if name.split("/")[0] not in ("resilience",) and ".dist-info" not in name]


def test_the_wheel_names_the_commands_of_adapters(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith("entry_points.txt")]
        told = content.read(name).decode()
    assert "[resilience.commands]\nkubernetes = resilience.integrations.kubernetes.cli:main" in told
    assert "\nslurm = resilience.integrations.slurm.cli:main" in told
    assert "\nslurm = resilience.integrations.slurm.drain:SlurmErrorMonitor" in told


def test_the_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """torch and the rest are lent from this environment by a path file; the package itself comes from the wheel."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    python = env / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    lent = tmp_path / "lent"
    lent.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "resilience" not in entry.name and not entry.name.endswith(".pth"):
            (lent / entry.name).symlink_to(entry)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RESILIENCE"))}
    code = (
        "import resilience, resilience.integrations as i, pathlib; "
        "print(pathlib.Path(resilience.__file__).parent, pathlib.Path(i.__file__).parent)"
    )
    shown = subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path, env=clean
    )
    assert shown.stdout.split()[0].startswith(str(env))
    assert shown.stdout.split()[1].endswith("resilience/integrations")
    script = tmp_path / "script.py"
    script.write_text("import resilience\nfor step in range(3): resilience.heartbeat(step)\nprint('finished')\n")
    run = [
        str(env / "bin" / "resilience"),
        "run",
        "--nproc-per-node=2",
        f"--ft-run-dir={tmp_path / 'run'}",
        str(script),
    ]
    done = subprocess.run(
        run,
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(lent)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2


def test_the_editable_install_has_the_adapters_too() -> None:
    code = "import resilience.integrations, sys; print('integrations' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    assert shown.stdout.strip() == "False"
