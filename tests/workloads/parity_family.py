"""Use classes of ``__main__`` in processes made with ``multiprocessing``; torch-free."""

import multiprocessing
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Pickled to the child by its place in ``__main__``."""

    value: int


def double(work: Work) -> Work:
    """Run in the child."""
    return Work(work.value * 2)


if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [Work(21)]), flush=True)
    print(sorted(name for name in os.environ if name.startswith("PARITY_")), flush=True)
