"""The probe, as the ``__main__`` of a package, a directory or a zip file."""

NAMES = sorted(name for name in globals() if name.startswith("__"))

from parity_probe import write_facts  # type: ignore[import-not-found]  # noqa: E402 - found by its sys.path[0]

if __name__ == "__main__":
    write_facts(globals(), NAMES)
