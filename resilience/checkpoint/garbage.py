"""Python's garbage collector, kept out of saving and restoring: it would look at every object of the process, again and again.

Both make very many small objects, which all go in the end. Each thousand of them sets the collector off, and a full round takes as
long as to copy a gigabyte.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Have no garbage collected meanwhile. Also a decorator."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
