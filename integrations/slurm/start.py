"""One start of a job: what its batch script says, and the ``srun`` that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resilience.integrations import flags
from resilience.integrations.slurm import chain
from resilience.integrations.slurm.node import ourselves

from resilience.config import FailoverConfig


@dataclass(frozen=True)
class Options:
    """What a batch script says. ``needed``: nodes without which the job can't go on; ``nodes``: those of the allocation."""

    job: str
    restart: int
    folder: Path
    nodes: int
    needed: int
    host: str
    arguments: tuple[str, ...]
    srun_args: tuple[str, ...] = ()
    fault_dir: str = ""
    finished_file: str = ""
    drains: bool = True
    cluster: str = ""
    names: tuple[str, ...] = ()  # of the nodes, where they are known
    max_requeues: int = chain.MAX_REQUEUES

    @property
    def home(self) -> Path:
        """Return where the job keeps what it remembers."""
        return self.folder / self.job

    @property
    def grace(self) -> float:
        """Return how long launchers may take to stop."""
        try:
            return float(_given(self.arguments, "ft-stop-grace"))
        except ValueError:
            return FailoverConfig().stop_grace

    @property
    def most(self) -> int:
        """Return how many nodes train at once; the others of the job are spares."""
        last = _given(self.arguments, "nnodes").rpartition(":")[2]
        return int(last) if last.isdecimal() else self.nodes

    @property
    def run_dir(self) -> Path:
        """Return the directory of this start."""
        return self.home / str(self.restart)


def srun_command(options: Options, endpoint: str) -> list[str]:
    """Return the command that starts one launcher on each node. Pure.

    Slurm's own habits are switched off: ending the step when a task fails, or some time after the first task has ended.
    """
    srun = ["srun", f"--nodes={options.nodes}", f"--ntasks={options.nodes}", "--ntasks-per-node=1"]
    srun += ["--kill-on-bad-exit=0", "--wait=0", "--export=ALL"]  # sbatch --export=NONE would have srun hand nothing on
    if options.needed < options.nodes:
        srun.append("--no-kill")  # a lost node is not the end of the step
    node = [*ourselves(), "slurm", "node", f"--run-dir={options.run_dir}"]
    node += [f"--endpoint={endpoint}"] * bool(endpoint) + [f"--fault-dir={options.fault_dir}"] * bool(options.fault_dir)
    return [*srun, *options.srun_args, *node, "--", *options.arguments]


_SWITCHES = (*flags.SWITCHES, "no-python", "run-path", "standalone")


def _given(arguments: Sequence[str], flag: str) -> str:
    """Return what a flag of the launcher says, in one word or two, the last one if there are several; empty where none does.

    The script's own flags, behind it, say nothing.
    """
    said, before = "", ""
    for word in arguments:
        name, equals, text = word.partition("=")
        name = name[2:].replace("_", "-").replace("ft-param-", "ft-") if word.startswith("--") else ""
        if word.endswith(".py") or word in ("-m", "--") or name == "module" or not (word.startswith("-") or before):
            break
        if not word.startswith("-"):
            said = word if before == flag else said
            before = ""
        elif equals or name in _SWITCHES:
            said = text if name == flag else said
            before = ""
        else:
            before = name or word
    return said
