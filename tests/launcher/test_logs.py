from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="resilience.launcher.logs is torch's LogsSpecs: left out without torch")

from resilience.launcher.logs import Console, _Followed, tail_of


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "stdout.log"


@pytest.fixture
def console() -> Iterator[Console]:
    shown = Console()
    yield shown
    shown.close()


@pytest.fixture
def followed(log: Path) -> Iterator[_Followed]:
    item = _Followed(log, 1, b"> ")
    yield item
    item.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_every_line_has_its_prefix(log: Path, followed: _Followed) -> None:
    append(log, b"one\ntwo\n\nfour\n")
    assert followed.lines(last=False) == b"> one\n> two\n> \n> four\n"
    assert followed.lines(last=False) == b""


def test_file_that_does_not_exist_yet_is_waited_for(log: Path, followed: _Followed) -> None:
    assert followed.lines(last=False) == b""
    append(log, b"late\n")
    assert followed.lines(last=False) == b"> late\n"


def test_half_a_line_is_held_back_until_it_is_whole(log: Path, followed: _Followed) -> None:
    append(log, b"one\ntw")
    assert followed.lines(last=False) == b"> one\n"
    append(log, b"o\nthr")
    assert followed.lines(last=False) == b"> two\n"
    assert followed.lines(last=True) == b"> thr\n"
    assert followed.lines(last=True) == b""


def test_character_cut_in_two_by_a_read_arrives_whole(log: Path, followed: _Followed) -> None:
    append(log, "ü".encode()[:1])
    assert followed.lines(last=False) == b""
    append(log, "ü".encode()[1:] + b"\n")
    assert followed.lines(last=False) == "> ü\n".encode()


def test_of_a_progress_bar_only_the_newest_state_is_a_line(log: Path, followed: _Followed) -> None:
    append(log, b"\r 10%\r 50%\r100%\nnext\r\n")
    assert followed.lines(last=False) == b"> 100%\n> next\n"


def test_progress_bar_without_a_newline_does_not_grow_in_memory(log: Path, followed: _Followed) -> None:
    for step in range(1000):
        append(log, b"\rstep %6d " % step + b"#" * 80)
        followed.lines(last=False)
    assert len(followed.rest) < 10_000
    assert followed.lines(last=True) == b"> step    999 " + b"#" * 80 + b"\n"


def test_output_goes_to_the_stream_it_came_from(
    log: Path, tmp_path: Path, console: Console, capfd: pytest.CaptureFixture[str]
) -> None:
    append(log, b"said\n")
    append(tmp_path / "stderr.log", b"warned\n")
    console.follow(log, 1, b"[c0 n0 r0] ")
    console.follow(tmp_path / "stderr.log", 2, b"[c0 n0 r0] ")
    console.close()
    captured = capfd.readouterr()
    assert captured.out == "[c0 n0 r0] said\n"
    assert captured.err == "[c0 n0 r0] warned\n"


def shown_until(console: Console, capfd: pytest.CaptureFixture[str], end: str) -> str:
    """Return what is shown, once it ends with ``end``."""
    shown = ""
    for _ in range(200):
        shown += capfd.readouterr().out
        if shown.endswith(end):
            break
        console._stop.wait(0.05)
    return shown


def test_cycle_that_is_over_is_shown_to_its_unfinished_end_and_forgotten(
    log: Path, tmp_path: Path, console: Console, capfd: pytest.CaptureFixture[str]
) -> None:
    append(log, b"whole\nunfinished")
    console.follow(log, 1, b"> ")
    assert shown_until(console, capfd, "whole\n") == "> whole\n"
    console.forget()
    assert shown_until(console, capfd, "unfinished\n") == "> unfinished\n"
    append(log, b"\nof a cycle that is over\n")
    append(tmp_path / "next.log", b"of the next\n")
    console.follow(tmp_path / "next.log", 1, b"> ")
    assert shown_until(console, capfd, "next\n") == "> of the next\n"


def test_launchers_own_words_come_after_the_lines_that_were_there_before(
    log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    console = Console()
    append(log, b"a worker's\n")
    console.follow(log, 2, b"> ")
    console.say("the report\n")
    console.close()
    assert capfd.readouterr().err == "> a worker's\nthe report\n"


def test_everything_is_shown_even_if_it_is_much(log: Path, console: Console, capfd: pytest.CaptureFixture[str]) -> None:
    append(log, b"".join(b"%07d\n" % number for number in range(500_000)))
    console.follow(log, 1, b"")
    console.close()
    lines = capfd.readouterr().out.splitlines()
    assert (len(lines), lines[-1]) == (500_000, "0499999")


def test_last_words_after_a_burst_without_newlines_are_shown(
    log: Path, console: Console, capfd: pytest.CaptureFixture[str]
) -> None:
    append(log, b"\rstep" * 800_000 + b"\nValueError: the cause\n")
    console.follow(log, 1, b"")
    console.close()
    assert capfd.readouterr().out.endswith("ValueError: the cause\n")


def test_close_shows_what_is_left_and_ends_the_thread(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.follow(log, 1, b"> ")
    append(log, b"the last")
    console.close()
    assert capfd.readouterr().out == "> the last\n"
    assert not console._thread.is_alive()


def test_tail_is_the_end_of_the_file_and_nothing_where_there_is_none(log: Path) -> None:
    assert tail_of(log) == ""
    append(log, b"x" * 100_000 + b"\xff the end")
    assert tail_of(log).endswith("\ufffd the end")
    assert len(tail_of(log)) == 64 * 1024
