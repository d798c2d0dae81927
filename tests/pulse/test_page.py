from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns

import pytest

from resilience.pulse import page as layout
from resilience.pulse.page import MAX_ROWS, PAGE_BYTES, Page, Seen
from resilience.pulse.writer import Pulse
from tests.fakes import FakeClock, S, at


@pytest.fixture
def page() -> Iterator[Page]:
    fresh = Page.create(3)
    yield fresh
    os.close(fresh.fd)


def test_fresh_page_says_that_nothing_has_happened(page: Page) -> None:
    view = page.read()
    assert (view.incarnation, view.step, view.beat_timeout, view.rows) == (3, None, None, ())
    assert not view.attached
    assert not view.adopted
    assert view.first_sign == view.beat_at == view.expected_since == view.done_since == view.finishing_since == 0
    assert page.words[layout.W_MAGIC].to_bytes(8, "little") == b"RSLPAGE1"


def test_words_of_the_header_do_not_overlap_the_ring_or_the_table() -> None:
    header = {name: getattr(layout, name) for name in dir(layout) if name.startswith("W_")}
    assert len(header) > 15
    assert len(set(header.values())) == len(header)
    assert header.pop("W_TABLE") == layout.W_RING + layout.RING
    assert header.pop("W_RING") > max(header.values())
    columns = [getattr(layout, name) for name in dir(layout) if name.startswith("R_")]
    assert len(columns) == len(set(columns))
    assert max(columns) == layout.R_NAME


def test_page_holds_the_whole_table_and_a_row_holds_the_longest_name(page: Page) -> None:
    assert (layout.W_TABLE + MAX_ROWS * layout.ROW_WORDS) * 8 <= PAGE_BYTES == os.fstat(page.fd).st_size
    assert (layout.ROW_WORDS - layout.R_NAME) * 8 == layout.NAME_BYTES
    page.set_name(0, b"x" * layout.NAME_BYTES)
    page.set_name(1, "größe".encode())
    assert page.name_of(0) == "x" * layout.NAME_BYTES
    assert page.name_of(1) == "größe"
    assert page.name_of(2) == ""


def test_two_mappings_of_one_page_see_each_other(page: Page) -> None:
    other = Page(os.dup(page.fd))
    page.words[layout.W_STEP] = 11
    page.floats[layout.W_BEAT_TIMEOUT] = 2.5
    assert other.read().step == 11
    assert other.read().beat_timeout == 2.5
    other.close()


def test_infinite_timeout_is_given_and_nan_is_not(page: Page) -> None:
    page.floats[layout.W_BEAT_TIMEOUT] = math.inf
    assert page.read().beat_timeout == math.inf
    page.floats[layout.W_BEAT_TIMEOUT] = math.nan
    assert page.read().beat_timeout is None


def test_reading_survives_a_row_count_that_is_nonsense(page: Page) -> None:
    page.words[layout.W_ROWS] = 1 << 60
    assert len(page.read().rows) == MAX_ROWS
    assert page.last_events() == []


def test_open_rows_are_ordered_outermost_first(page: Page, clock: FakeClock) -> None:
    pulse = Pulse(page)
    inner, outer = pulse.borrow("inner"), pulse.borrow("outer")
    outer.enter()
    clock.wait(1)
    inner.enter()
    assert [row.name for row in page.read().open_rows()] == ["outer", "inner"]


def test_ring_keeps_the_last_events_in_order_when_it_wraps(page: Page, clock: FakeClock) -> None:
    page.words[layout.W_ATTACHED] = clock.now
    pulse = Pulse(page)
    section = pulse.borrow("step")
    for _ in range(100):
        section.enter()
        clock.wait(0.25)
        section.leave()
    pulse.finish()
    events = page.last_events()
    assert len(events) == layout.RING
    assert [time for time, _, _ in events] == sorted(time for time, _, _ in events)
    assert {(what, name) for _, what, name in events[:-1]} == {("leave", "step")}
    assert events[-1][0] == pytest.approx(25.0, abs=1e-4)
    assert events[-1][1:] == ("script returned", "")


def test_row_shows_what_a_section_taught_with_warm_up_kept_apart(page: Page, clock: FakeClock) -> None:
    section = Pulse(page).borrow("step")
    for seconds in (100.0, 50.0, 20.0, 1.0, 3.0, 2.0):
        section.enter()
        clock.wait(seconds)
        section.leave()
    (row,) = page.read().rows
    assert row.seen == Seen(samples=3, largest=3 * S, warmup=100 * S)
    assert (row.entries, row.open_since, row.closed_at) == (6, 0, at(176))


_WRITER = """
import sys
from time import monotonic_ns
from resilience.pulse.page import W_FINISHING, Page
from resilience.pulse.writer import Pulse

page = Page(int(sys.argv[1]))
pulse = Pulse(page)
names = [chr(ord("a") + i % 26) * (64 - i) for i in range(60)]
rows, step = [], 0
start = monotonic_ns()
while not page.words[W_FINISHING]:
    if len(rows) < 60 and monotonic_ns() > start + len(rows) * int(1e7):
        rows.append(pulse.borrow(names[len(rows)]))
        rows[-1].limit(2.0 ** len(rows))
    for row in rows[-4:]:
        row.enter()
        # both halves of the step are equal in every value that is ever written
        pulse.beat(step << 32 | step)
        step += 1
        row.leave()
"""


@pytest.mark.spawns
def test_reader_never_sees_a_torn_word_or_half_a_name(page: Page) -> None:
    start = monotonic_ns()
    child = subprocess.Popen([sys.executable, "-c", _WRITER, str(page.fd)], pass_fds=[page.fd])
    names = {chr(ord("a") + i % 26) * (64 - i) for i in range(60)}
    reads = changes = 0
    beats = beat_at = step = rows = 0
    while child.poll() is None:
        if (monotonic_ns() - start > S and changes > 500 and rows > 30) or monotonic_ns() - start > 60 * S:
            page.words[layout.W_FINISHING] = 1  # the writer looks at it
        view = page.read()
        now = monotonic_ns()
        reads += 1
        changes += view.beats != beats
        assert view.beats >= beats
        assert beat_at <= view.beat_at <= now
        assert view.beat_at == 0 or view.beat_at >= start
        seen = view.step or 0
        assert seen >> 32 == seen & 0xFFFFFFFF
        assert seen >= step
        assert view.gaps.largest <= now - start
        assert len(view.rows) >= rows
        for number, row in enumerate(view.rows):
            assert row.name in names
            assert row.timeout is None or row.timeout == 2.0 ** (number + 1)
            assert row.open_since == 0 or start <= row.open_since <= now
            assert row.closed_at == 0 or start <= row.closed_at <= now
            assert row.last <= now - start
        beats, beat_at, step, rows = view.beats, view.beat_at, seen, len(view.rows)
    assert child.wait() == 0
    assert page.read().beats > 10_000
    assert len(page.read().rows) > 30
    assert changes > 500, f"the reader looked {reads} times and saw hardly any write: the test says nothing"


_WITHOUT_SHM = """
import errno
from resilience.pulse.page import Page
from resilience.pulse.writer import Pulse

try:
    open("/dev/shm/probe", "wb").write(bytes(1 << 20))
except OSError as error:
    assert error.errno in (errno.EROFS, errno.ENOSPC), error
else:
    raise SystemExit("/dev/shm took a mebibyte: the test says nothing")
page = Page.create(1)
Pulse(page).beat(5)
assert page.read().step == 5
print("beat")
"""


@pytest.mark.spawns
@pytest.mark.root
@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_page_needs_no_dev_shm(options: str) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs root and mount namespaces: left out is that a read-only or tiny /dev/shm does not matter")
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    command = ["unshare", "-m", "sh", "-c", mount + ' && exec "$0" -c "$1"', sys.executable, _WITHOUT_SHM]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "beat"), done.stderr


def test_page_is_gone_with_its_last_holder() -> None:
    fresh = Page.create(0)
    assert not str(Path(f"/proc/self/fd/{fresh.fd}").readlink()).startswith("/dev/shm")
    fd = fresh.fd
    fresh.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
