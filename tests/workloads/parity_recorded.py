"""Fail under torch's ``@record``: the error file and the launcher's own error file must say the same."""

from torch.distributed.elastic.multiprocessing.errors import record


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Fail in a frame below."""
    deeper()


def deeper() -> None:
    """Raise."""
    raise RuntimeError("recorded on purpose")


if __name__ == "__main__":
    main()
