"""A values file that can't be read is told by its name and line, on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from resilience.integrations.values import ValuesError, from_file


def refused(path: Path, text: bytes) -> str:
    """What is said of a file."""
    path.write_bytes(text)
    with pytest.raises(ValuesError) as caught:
        from_file(str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            b"name: x\nscript: [a, b\nnodes: 3\n",
            "on line 3, while parsing a flow sequence that begins on line 2: expected",
        ),
        (b"name: x\nscript: a: b\n", "on line 2: mapping values are not allowed here."),
        (b"name: x\nscript: !mine 3\n", "on line 2: could not determine a constructor for the tag '!mine'."),
        ("name: ü\nscript: \x01\n".encode(), "on line 2: the character '\\x01' can't be in it."),
        (b"name: x\nscript: \xff\n", "on line 2: it is not written as UTF-8."),
        (b'name: x\nscript: "\\UFFFFFFFF"\n', "Python int too large"),
    ],
)
def test_broken_values_file_is_told_by_its_name_and_line(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "values.yaml"
    told = refused(path, text)
    assert told.startswith(f"the values file {path} can't be read: ")
    assert said in told
    assert "\n" not in told
    assert "quote it" not in told, "that is no advice here"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("2024-02-30", "'2024-02-30' is no timestamp"),
        ("0b_", "'0b_' is no int"),
        ("!!int ''", "'' is no int"),
        ("!!bool x", "'x' is no bool"),
        ("!!timestamp x", "'x' is no timestamp"),
    ],
)
def test_word_that_looks_like_a_number_or_a_date_is_to_be_quoted(tmp_path: Path, word: str, said: str) -> None:
    told = refused(tmp_path / "values.yaml", f"name: x\nscript: train.py\nenv: {{A: {word}}}\n".encode())
    assert told.endswith(f"on line 3: {said}. A text that is no date or number: quote it.")
