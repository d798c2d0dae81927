from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from resilience.failover.failure import (
    HARDWARE_CODES,
    RankFailure,
    examine,
    is_echo,
    is_out_of_memory,
    last_crash,
    last_exception,
    last_traceback,
    signal_name,
    without_numbers,
)

TRACE = """Traceback (most recent call last):
  File "/job/train.py", line 30, in main
    step(batch)
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 2300, in embedding
    return torch.embedding(weight, input)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
IndexError: index 7 is out of range
"""


def from_torch(said: str, trace: str = TRACE) -> dict[str, Any]:
    """Return an error file as torch's own decorator writes it."""
    return {"message": {"message": said, "extraInfo": {"py_callstack": trace, "timestamp": "1700000000"}}}


def from_us(kind: str, message: str, **parts: Any) -> dict[str, Any]:
    """Return an error file as ours writes it."""
    said = f"{kind.rpartition('.')[2]}: {message}"
    frames = [{"file": "/job/train.py", "line": 30, "function": "main", "user": True}]
    ours = {"type": kind, "message": message, "mono_ns": 77, "frames": frames, **parts}
    return {**from_torch(said), "resilience": ours}


NO_FILE = {"type": "FileNotFoundError", "message": "no file 'trian.py'"}
AT_ITS_START = [
    {"file": "/venv/lib/python3.11/site-packages/resilience/_worker/__main__.py", "function": "main", "user": False},
    {"file": "<frozen runpy>", "function": "_run_module_as_main", "user": False},
]
IN_ARGPARSE = [
    *AT_ITS_START[:1],
    {"file": "/job/train.py", "function": "<module>", "user": True},
    {"file": "/usr/lib/python3.11/argparse.py", "function": "exit", "user": False},
]


def signature(kind: str, message: str, **parts: Any) -> str:
    return examine(0, 1, 5, error=from_us(kind, message, **parts)).signature


# -- kinds and sentences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error", "kind", "message"),
    [
        (1, from_us("ValueError", "bad batch"), "exception", "ValueError: bad batch"),
        (1, from_us("my.pkg.BadBatch", "x"), "exception", "BadBatch: x"),
        (1, from_us("__main__.main.<locals>.BadBatch", "x"), "exception", "BadBatch: x"),
        (1, from_us("AssertionError", ""), "exception", "AssertionError"),
        (1, from_torch("ValueError: bad: batch"), "exception", "ValueError: bad: batch"),
        (1, from_torch("AssertionError: "), "exception", "AssertionError"),
        (3, from_us("SystemExit", "3"), "exit", "ended with exit code 3 (sys.exit)"),
        (1, from_us("SystemExit", "no data"), "exit", "ended with exit code 1 (sys.exit: no data)"),
        (255, from_us("SystemExit", "-1"), "exit", "ended with exit code 255 (sys.exit: -1)"),
        (201, from_us("SystemExit", "201"), "exit", "ended with exit code 201, driver error (sys.exit)"),
        (
            2,
            from_us("SystemExit", "2", frames=AT_ITS_START, chain=[{"type": "SystemExit", "message": "2"}, NO_FILE]),
            "exit",
            "the script ended with exit code 2 at its start: it can't be run: FileNotFoundError: no file 'trian.py'",
        ),
        (
            1,
            from_us("SystemExit", "python: No module named x", frames=AT_ITS_START),
            "exit",
            "the script ended with exit code 1 at its start: it can't be run: python: No module named x",
        ),
        (
            2,
            from_us("SystemExit", "2", frames=IN_ARGPARSE),
            "exit",
            "the script ended with exit code 2 at its start: it refused its arguments",
        ),
        (1, None, "exit", "ended with exit code 1"),
        (17, None, "exit", "ended with exit code 17"),
        (-9, None, "signal", "ended by signal 9 (SIGKILL)"),
        (-11, None, "signal", "ended by signal 11 (SIGSEGV)"),
        (-2, from_us("KeyboardInterrupt", ""), "signal", "ended by signal 2 (SIGINT)"),
        (-100, None, "signal", "ended by signal 100 (signal 100)"),
        (1, from_us("MemoryError", ""), "oom", "out of memory: MemoryError"),
        (
            1,
            from_us("torch.OutOfMemoryError", "CUDA out of memory."),
            "oom",
            "out of memory: OutOfMemoryError: CUDA out of memory.",
        ),
    ],
)
def test_end_of_a_rank_has_a_kind_and_a_sentence(
    code: int, error: dict[str, Any] | None, kind: str, message: str
) -> None:
    failure = examine(3, code, 500, error=error)
    assert (failure.rank, failure.exit_code) == (3, code)
    assert (failure.kind, failure.message) == (kind, message)


@pytest.mark.parametrize(("code", "name"), HARDWARE_CODES.items())
def test_hardware_code_is_named(code: int, name: str) -> None:
    assert examine(0, code, 5).message == f"ended with exit code {code}, {name}"


def test_kernels_word_on_memory_explains_a_kill_and_nothing_else() -> None:
    words = "out of memory: ended by the kernel's OOM killer"
    assert (examine(0, -9, 5, oom=words).kind, examine(0, -9, 5, oom=words).message) == ("oom", words)
    assert examine(0, 1, 5, oom=words).kind == "exit"
    assert examine(0, 1, 5, oom=words, error=from_us("ValueError", "x")).kind == "exception"


@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (0, "signal 0"), (-1, "signal -1"), (999, "signal 999")]
)
def test_signal_without_a_name_is_told_by_its_number(number: int, name: str) -> None:
    assert signal_name(number) == name


def test_moment_of_the_exception_comes_before_that_of_the_end() -> None:
    assert examine(0, 1, 500, error=from_us("ValueError", "x", mono_ns=77)).at_ns == 77
    assert examine(0, 1, 500, error=from_torch("ValueError: x")).at_ns == 500
    assert examine(0, 1, 500).at_ns == 500


def test_what_the_rank_noted_is_in_its_failure() -> None:
    chain = [{"type": "ValueError", "message": "x"}, {"type": "KeyError", "message": "y"}]
    error = from_us(
        "ValueError",
        "x",
        step=41,
        error_code=17,
        sections=[{"name": "epoch", "age_s": 9.0}, {"name": "load", "age_s": 1.0}],
        context={"batch": "shard-7"},
        versions={"python": "3.11.7"},
        chain=chain,
    )
    failure = examine(0, 1, 500, error=error, sections=[{"name": "from its page", "age_s": 3.0}])
    assert (failure.step, failure.error_code) == (41, 17)
    assert [item["name"] for item in failure.sections] == ["epoch", "load"]
    assert (failure.context, failure.versions) == ({"batch": "shard-7"}, {"python": "3.11.7"})
    assert list(failure.chain) == chain
    assert failure.traceback == TRACE


def test_rank_that_left_no_words_has_the_sections_of_its_page() -> None:
    failure = examine(0, -9, 500, sections=[{"name": "load", "age_s": 3.0}])
    assert [item["name"] for item in failure.sections] == ["load"]
    assert failure.signature == "signal -9|load"


def test_end_of_the_log_is_kept_and_no_more() -> None:
    failure = examine(0, -9, 5, log="".join(f"line {number}\n" for number in range(100)), log_path="/run/stderr.log")
    assert failure.log == tuple(f"line {number}" for number in range(88, 100))
    assert failure.log_path == "/run/stderr.log"


def test_plain_text_in_the_error_file_as_torch_allows_is_not_lost() -> None:
    failure = examine(0, 1, 5, error={"message": "the driver is too old", "timestamp": 1700000000})
    assert "the driver is too old" in failure.message


# -- signatures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("index 7 is out of range", "index 12345 is out of range"),
        ("loss is 1.25 at step 3", "loss is 17.5 at step 40"),
        ("<Batch object at 0x7f12AB34cd>", "<Batch object at 0x55de01>"),
        ("could not read shard-0007.bin", "could not read shard-1234.bin"),
        ("bad batch\nshapes differ", "bad batch\nsomething else below"),
        ("  bad batch", "bad batch  \n"),
        ("host 10.0.0.1:29500", "host 192.168.17.4:3721"),
    ],
)
def test_signatures_are_equal_for_messages_that_differ_in_numbers_only(one: str, other: str) -> None:
    assert without_numbers(one) == without_numbers(other)
    assert signature("ValueError", one) == signature("ValueError", other)


def test_signatures_are_equal_when_edits_above_have_moved_the_line() -> None:
    frame = {"file": "/job/train.py", "function": "main", "user": True}
    moved = [signature("ValueError", "x", frames=[{**frame, "line": line}]) for line in (30, 31)]
    assert moved[0] == moved[1] == "ValueError|x|/job/train.py:main"
    traces = [TRACE, TRACE.replace("line 30", "line 31").replace("line 2300", "line 9")]
    files = [examine(0, 1, 5, error=from_torch("IndexError: x", trace)).signature for trace in traces]
    assert files[0] == files[1] == "IndexError|x|/job/train.py:main"


@pytest.mark.parametrize(
    ("kind", "message", "frame"),
    [
        ("KeyError", "bad batch", {}),
        ("ValueError", "bad loss", {}),
        ("ValueError", "bad batch", {"function": "evaluate"}),
        ("ValueError", "bad batch", {"file": "/job/evaluate.py"}),
    ],
)
def test_signatures_differ_for_another_type_message_function_or_file(
    kind: str, message: str, frame: dict[str, Any]
) -> None:
    usual = {"file": "/job/train.py", "line": 30, "function": "main", "user": True}
    assert signature(kind, message, frames=[{**usual, **frame}]) != signature("ValueError", "bad batch", frames=[usual])


@pytest.mark.parametrize(
    ("one", "other"),
    [((-9, "load"), (-11, "load")), ((3, "load"), (4, "load")), ((-9, "load"), (-9, "step")), ((9, "x"), (-9, "x"))],
)
def test_ends_without_words_differ_by_code_and_innermost_section(one: tuple[int, str], other: tuple[int, str]) -> None:
    def sign(code: int, section: str) -> str:
        return examine(0, code, 5, sections=[{"name": "epoch"}, {"name": section}]).signature

    assert sign(*one) == sign(*one)
    assert sign(*one) != sign(*other)


def test_message_without_end_has_a_signature_that_is_short() -> None:
    assert len(signature("ValueError", "x" * 1_000_000)) < 1000


def test_innermost_frame_of_the_user_signs_and_not_the_library_below_it() -> None:
    frames = [
        {"file": "/job/train.py", "line": 1, "function": "main", "user": True},
        {"file": "/job/data.py", "line": 1, "function": "read", "user": True},
        {"file": "/venv/lib/python3.11/site-packages/numpy/io.py", "line": 1, "function": "load", "user": False},
    ]
    assert signature("ValueError", "x", frames=frames) == "ValueError|x|/job/data.py:read"


@pytest.mark.parametrize(
    ("frames", "frame"),
    [
        (['"/job/train.py", line 30, in main', '"/usr/lib/python3.11/json/decoder.py", line 2, in decode'], "main"),
        (['"/job/train.py", line 3, in <module>', '"<frozen runpy>", line 198, in _run'], "<module>"),
        (['"/venv/site-packages/a.py", line 3, in f', '"/usr/dist-packages/b.py", line 4, in g'], "g"),
    ],
)
def test_frame_of_the_user_is_found_in_a_traceback_too(frames: list[str], frame: str) -> None:
    trace = "Traceback (most recent call last):\n" + "".join(f"  File {line}\n    pass\n" for line in frames)
    assert examine(0, 1, 5, error=from_torch("ValueError: x", trace)).signature.endswith(f":{frame}")


def test_signature_without_any_frame_is_of_type_and_message() -> None:
    assert examine(0, 1, 5, error=from_torch("ValueError: x", "")).signature == "ValueError|x|"


# -- fallen over another rank -----------------------------------------------------------------------------------------

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "
ECHOES = [
    ("RuntimeError", GLOO + "Connection closed by peer [127.0.0.1]:3721"),
    ("RuntimeError", GLOO + "Read error [127.0.0.1]:24456: Connection reset by peer"),
    ("RuntimeError", GLOO + "writev [10.0.0.1]:3721: Broken pipe"),
    ("RuntimeError", GLOO + "Application timeout caused pair closure"),
    ("RuntimeError", "[/x/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
    ("RuntimeError", "[/x/unbound_buffer.cc:133] Timed out waiting 1800000ms for send operation to complete"),
    ("RuntimeError", "Gloo connectFullMesh failed with [/x/pair.cc:144] no error"),
    ("RuntimeError", "NCCL communicator was aborted on rank 1."),
    ("RuntimeError", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"),
    ("RuntimeError", NCCL + "unhandled system error, NCCL version 2.21.5\nncclSystemError: System call failed."),
    ("torch.distributed.DistBackendError", NCCL + "remote process exited or there was a network error"),
    ("torch.distributed.DistBackendError", "ncclRemoteError: A call failed possibly due to a network error"),
    ("torch.distributed.DistNetworkError", "failed to recv, got 0 bytes. Connection was likely closed."),
    ("torch.distributed.DistNetworkError", "sendBytes failed on SocketImpl(fd=3): Broken pipe"),
    ("torch.distributed.DistNetworkError", "The client socket has timed out after 600000ms while trying to connect"),
    ("torch.distributed.DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//cuda//0"),
    ("torch.distributed.DistStoreError", "Socket Timeout"),
    ("resilience.errors.CheckpointError", "rank 1 ended while the ranks were restoring"),
    ("resilience.errors.CheckpointError", "the saver of the node with rank 2 was lost while the ranks were restoring"),
]


@pytest.mark.parametrize(("kind", "message"), ECHOES)
def test_collective_that_broke_because_a_peer_is_gone_is_an_echo(kind: str, message: str) -> None:
    assert is_echo(kind, message)
    assert examine(0, 1, 5, error=from_us(kind, message)).echo
    short = kind.rpartition(".")[2]
    assert examine(0, 1, 5, error=from_torch(f"{short}: {message}")).echo
    first = message.splitlines()[0]
    log = (
        f'[rank0]: Traceback (most recent call last):\n[rank0]:   File "t.py", line 1, in f\n[rank0]: {kind}: {first}\n'
    )
    assert examine(0, 1, 5, log=log).echo


@pytest.mark.parametrize("kind", ["ValueError", "ConnectionResetError", "OSError", "my.RuntimeErrorOfMine"])
@pytest.mark.parametrize("message", [message for _, message in ECHOES])
def test_exception_of_the_users_own_with_such_words_is_no_echo(kind: str, message: str) -> None:
    assert not is_echo(kind, message)
    assert not examine(0, 1, 5, error=from_us(kind, message)).echo


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (4x5 and 6x7)"),
        ("RuntimeError", "CUDA error: device-side assert triggered"),
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered"),
        ("RuntimeError", ""),
        ("", "Connection reset by peer"),
    ],
)
def test_failure_of_its_own_is_no_echo(kind: str, message: str) -> None:
    assert not is_echo(kind, message)


@pytest.mark.parametrize(
    "cause", ["out of memory", "uncorrectable ECC error encountered", "device-side assert triggered"]
)
def test_nccl_that_broke_over_its_own_device_is_no_echo(cause: str) -> None:
    message = (
        f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
        f"ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure '{cause}'"
    )
    assert not examine(0, 1, 5, error=from_us("torch.distributed.DistBackendError", message)).echo


WATCHDOG = (
    "[rank1]:[E1105 12:00:00 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog "
    "thread terminated with exception: {}\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)


def test_abort_by_the_watchdog_of_a_collective_is_an_echo() -> None:
    log = WATCHDOG.format("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)")
    assert examine(1, -signal.SIGABRT, 5, log=log).echo
    assert not examine(1, -signal.SIGSEGV, 5, log=log).echo
    assert not examine(1, -signal.SIGABRT, 5, log="free(): invalid pointer\n").echo


@pytest.mark.parametrize("cause", ["uncorrectable ECC error encountered", "device-side assert triggered"])
def test_abort_by_the_watchdog_over_its_own_device_is_no_echo(cause: str) -> None:
    log = WATCHDOG.format(
        f"CUDA error: {cause}\nCUDA kernel errors might be asynchronously reported at some other call"
    )
    assert not examine(1, -signal.SIGABRT, 5, log=log).echo


# -- out of memory ----------------------------------------------------------------------------------------------------

NO_MEMORY = [
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"),
    ("torch.cuda.OutOfMemoryError", "HIP out of memory. Tried to allocate 2.00 GiB"),
    ("torch.AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    ("RuntimeError", "CUDA error: out of memory"),
    ("RuntimeError", "MPS backend out of memory (MPS allocated: 18.00 GB, other allocations: 1.00 MB)"),
    (
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    ),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried"),
    ("RuntimeError", "unable to mmap 1024 bytes from file </torch_1_2_3>: Cannot allocate memory (12)"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("RuntimeError", "std::bad_alloc"),
    ("MemoryError", "std::bad_alloc"),
    ("MemoryError", ""),
    ("OSError", "[Errno 12] Cannot allocate memory"),
    (
        "numpy._core._exceptions._ArrayMemoryError",
        "Unable to allocate 8.00 PiB for an array with shape (1125899906842624,)",
    ),
    ("torch.distributed.DistBackendError", NCCL + "unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
]


@pytest.mark.parametrize(("kind", "message"), NO_MEMORY)
def test_memory_that_ran_out_is_known_by_its_many_words(kind: str, message: str) -> None:
    failure = examine(0, 1, 5, error=from_us(kind, message))
    assert failure.kind == "oom"
    assert failure.message == f"out of memory: {kind.rpartition('.')[2]}" + (f": {message}" if message else "")
    assert is_out_of_memory(kind, message)


@pytest.mark.parametrize("kind", ["ValueError", "my.Error", "KeyError", ""])
def test_exception_of_the_users_own_that_speaks_of_memory_is_none(kind: str) -> None:
    assert not is_out_of_memory(kind, "CUDA out of memory")
    assert examine(0, 1, 5, error=from_us(kind or "Exception", "CUDA out of memory")).kind == "exception"


@pytest.mark.parametrize("message", ["No space left on device", "CUDA error: invalid device ordinal", ""])
def test_other_errors_of_the_system_are_not_about_memory(message: str) -> None:
    assert not is_out_of_memory("RuntimeError", message)
    assert not is_out_of_memory("OSError", message)


def test_real_allocations_that_fail_are_out_of_memory() -> None:
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    kinds = []
    for allocate in (lambda: torch.zeros(1 << 50), lambda: numpy.zeros(1 << 50), lambda: bytearray(1 << 60)):
        try:
            allocate()
        except (RuntimeError, MemoryError) as error:
            name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
            bases = [base.__name__ for base in type(error).__mro__[1:-1]]
            kinds.append(examine(0, 1, 5, error=from_us(name, str(error), bases=bases)).kind)
    assert kinds == ["oom", "oom", "oom"]


# -- what a log tells -------------------------------------------------------------------------------------------------

LOG = f"""epoch 1
Traceback (most recent call last):
  File "old.py", line 1, in f
OSError: handled and logged
epoch 2
{TRACE}
"""


def test_last_traceback_of_the_log_is_the_one() -> None:
    assert last_traceback(LOG) == TRACE.rstrip()
    assert last_exception(LOG) == "IndexError: index 7 is out of range"


def test_lines_after_the_traceback_are_no_part_of_it() -> None:
    log = LOG + "[W1105 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed\nbye\n"
    assert last_traceback(log) == TRACE.rstrip()
    assert last_exception(log) == "IndexError: index 7 is out of range"


def test_prefix_that_torch_puts_before_every_line_is_taken_away() -> None:
    log = "".join(f"[rank12]: {line}\n" for line in TRACE.splitlines())
    assert last_traceback(log) == TRACE.rstrip()


@pytest.mark.parametrize(
    ("tail", "exception"),
    [
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("my.pkg.Error: a: b\n", "my.pkg.Error: a: b"),
        ("__main__.main.<locals>.Bad: x\n", "__main__.main.<locals>.Bad: x"),
        ("ValueError: two\nlines\n", "ValueError: two"),
        ("", ""),
        ("and then the disk was full\n", ""),
    ],
)
def test_line_that_names_the_exception_is_found_or_nothing(tail: str, exception: str) -> None:
    assert last_exception('Traceback (most recent call last):\n  File "a.py", line 1, in f\n' + tail) == exception


@pytest.mark.parametrize("log", ["", "\n", "Traceback", "fine", "Traceback (most recent call last):"])
def test_log_without_a_traceback_has_no_exception(log: str) -> None:
    assert last_exception(log) == ""
    assert (examine(0, 1, 5, log=log).kind, examine(0, 1, 5, log=log).signature) == ("exit", "exit 1|")


def test_log_speaks_for_a_rank_that_left_no_file() -> None:
    failure = examine(0, 1, 5, log=LOG)
    assert (failure.kind, failure.message) == ("exception", "IndexError: index 7 is out of range")
    assert failure.signature == "IndexError|index # is out of range|/job/train.py:main"
    assert failure.traceback == TRACE.rstrip()


@pytest.mark.parametrize("code", [2, 3, 201, -9, -15])
def test_traceback_that_was_only_logged_is_not_the_end_of_a_rank_that_ended_otherwise(code: int) -> None:
    failure = examine(0, code, 5, log=LOG)
    assert failure.kind == ("signal" if code < 0 else "exit")
    assert failure.traceback == ""


def test_error_file_speaks_before_the_log() -> None:
    assert examine(0, 1, 5, error=from_us("ValueError", "bad batch"), log=LOG).message == "ValueError: bad batch"


CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f2 (most recent call first):
  File "/job/train.py", line 30 in main
"""


def test_stacks_of_a_crash_are_kept() -> None:
    failure = examine(0, -11, 5, log=f"epoch 1\n{CRASH}\n")
    assert (failure.kind, failure.message) == ("signal", "ended by signal 11 (SIGSEGV)")
    assert failure.traceback == CRASH.rstrip()


def test_last_crash_of_the_log_is_the_one_and_without_one_there_is_nothing() -> None:
    assert last_crash(CRASH.replace("Segmentation fault", "Aborted") + CRASH) == CRASH.rstrip()
    assert last_crash("Segmentation fault (core dumped)\n") == ""
    assert examine(0, 1, 5, log=CRASH).traceback == "", "it was another process of the rank that crashed"


@pytest.mark.spawns
@pytest.mark.parametrize(("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGABRT, "SIGABRT")])
def test_real_crash_leaves_its_stack(number: signal.Signals, name: str) -> None:
    code = f"import os\ndef dies(): os.kill(os.getpid(), {int(number)})\ndies()"
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], check=False, capture_output=True, text=True
    )
    failure = examine(0, ended.returncode, 5, log=ended.stderr)
    assert failure.message == f"ended by signal {int(number)} ({name})"
    assert failure.traceback.startswith("Fatal Python error: ")
    assert "in dies" in failure.traceback


@pytest.mark.spawns
def test_real_traceback_is_understood_from_the_log_alone() -> None:
    code = "def fails():\n    try: 1 / 0\n    except ZeroDivisionError as e: raise ValueError('bad batch 7') from e\nfails()"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    failure = examine(0, ended.returncode, 5, log=ended.stderr)
    assert (failure.kind, failure.message) == ("exception", "ValueError: bad batch 7")
    assert failure.signature == "ValueError|bad batch #|<string>:fails"


# -- it crosses nodes as JSON -----------------------------------------------------------------------------------------

FULL = RankFailure(
    rank=3,
    exit_code=-9,
    at_ns=(1 << 63) - 1,
    kind="oom",
    message="zwölf \udcff",
    traceback=TRACE,
    signature="a|b|c",
    echo=True,
    began=False,
    error_code=17,
    step=41,
    sections=({"name": "load", "age_s": 1.5},),
    context={"paths": ["a", "b"], "nested": {"lr": 0.1}},
    versions={"python": "3.11.7"},
    chain=({"type": "ValueError", "message": "x"},),
    log=("one", "two"),
    log_path="/run/stderr.log",
)


@pytest.mark.parametrize(
    "failure", [FULL, RankFailure(0, 1, 5), examine(0, 1, 5, error=from_us("ValueError", "x"), log=LOG)]
)
def test_failure_that_crossed_as_json_is_the_same(failure: RankFailure) -> None:
    assert RankFailure.from_json(json.loads(json.dumps(failure.as_json()))) == failure


def test_test_of_json_leaves_no_field_at_its_default() -> None:
    blank = RankFailure(0, 1, 5)
    assert [
        item.name for item in dataclasses.fields(FULL) if getattr(FULL, item.name) == getattr(blank, item.name)
    ] == []


def test_what_a_newer_version_added_is_left_out_and_what_an_older_one_lacks_is_blank() -> None:
    assert RankFailure.from_json({**FULL.as_json(), "gpu": "H100", "more": [1]}) == FULL
    assert RankFailure.from_json({"rank": 3, "exit_code": 1, "at_ns": 5}) == RankFailure(3, 1, 5)


# -- error files that are garbage -------------------------------------------------------------------------------------

GARBAGE: list[Any] = [
    None,
    0,
    5,
    -5,
    True,
    1.5,
    math.inf,
    math.nan,
    "",
    "text",
    [],
    [5],
    [None],
    ["text"],
    [[]],
    [{}],
    [{"name": None}],
    [{"user": True}],
    {},
    {"a": 1},
    {"a": [None]},
]


def broken_by(make: Callable[[Any], dict[str, Any]]) -> list[str]:
    """Return the garbage over which ``examine`` falls, or after which its answer is not what it says it is."""
    found = []
    for value in GARBAGE:
        for code in (1, -9):
            error_file = make(value)
            try:
                failure = examine(3, code, 500, error=error_file, log=LOG, sections=[{"name": "load", "age_s": 1.0}])
            except Exception as error:  # noqa: BLE001 - each of them is the finding
                found.append(f"{value!r}: {type(error).__name__}: {error}")
                continue
            found.extend(f"{value!r}: {name} is {part!r}" for name, part in wrong_parts(failure))
    return found


def wrong_parts(failure: RankFailure) -> list[tuple[str, Any]]:
    """Return the parts of a failure that are not of the type they are declared to be."""
    good = {
        "at_ns": type(failure.at_ns) is int,
        "kind": failure.kind in ("exception", "oom", "signal", "exit"),
        "message": isinstance(failure.message, str),
        "traceback": isinstance(failure.traceback, str),
        "signature": isinstance(failure.signature, str),
        "echo": isinstance(failure.echo, bool),
        "error_code": failure.error_code is None or isinstance(failure.error_code, int),
        "step": failure.step is None or isinstance(failure.step, int),
        "sections": all(isinstance(item, Mapping) for item in failure.sections),
        "context": isinstance(failure.context, Mapping),
        "versions": isinstance(failure.versions, Mapping),
        "chain": all(isinstance(item, Mapping) for item in failure.chain),
    }
    return [(name, getattr(failure, name)) for name, right in good.items() if not right]


def test_check_for_garbage_sees_what_is_wrong() -> None:
    assert wrong_parts(FULL) == []
    wrong = RankFailure.from_json({**FULL.as_json(), "step": "x", "chain": [5]})
    assert wrong_parts(wrong) == [("step", "x"), ("chain", (5,))]


@pytest.mark.parametrize(
    "part",
    [
        "type",
        "message",
        "mono_ns",
        "step",
        "error_code",
        "sections",
        "context",
        "versions",
        "chain",
        "frames",
    ],
)
def test_part_of_ours_that_is_garbage_does_not_cost_the_rest(part: str) -> None:
    def make(value: Any) -> dict[str, Any]:
        file = from_us("ValueError", "bad batch")
        file["resilience"][part] = value
        return file

    assert broken_by(make) == []


@pytest.mark.parametrize("part", ["message", "resilience"])
def test_half_of_the_file_that_is_garbage_does_not_cost_the_rest(part: str) -> None:
    assert broken_by(lambda value: {**from_us("ValueError", "bad batch"), part: value}) == []


@pytest.mark.parametrize("part", ["message", "extraInfo"])
def test_part_of_torchs_that_is_garbage_does_not_cost_the_rest(part: str) -> None:
    def make(value: Any) -> dict[str, Any]:
        file = from_us("ValueError", "bad batch")
        file["message"][part] = value
        return file

    assert broken_by(make) == []


def test_traceback_that_is_garbage_does_not_cost_the_rest() -> None:
    assert broken_by(lambda value: {"message": {"message": "x", "extraInfo": {"py_callstack": value}}}) == []


@pytest.mark.parametrize("missing", ["type", "message", "mono_ns", "frames"])
def test_part_of_ours_that_is_missing_is_made_up_for(missing: str) -> None:
    error = from_us("ValueError", "bad batch")
    del error["resilience"][missing]
    failure = examine(0, 1, 500, error=error)
    assert (failure.kind, failure.message) == ("exception", "ValueError: bad batch")
    assert failure.signature.startswith("ValueError|bad batch|/job/train.py:main")


@pytest.mark.parametrize("text", ["[1, 2]", '"text"', "5", "null", "{", "", "{}", '{"message": null}'])
def test_file_that_says_nothing_leaves_the_word_to_the_log(tmp_path: Path, text: str) -> None:
    pytest.importorskip("torch", reason="the launcher is torch's")
    from resilience.launcher.coroner import read_error_file

    path = tmp_path / "error.json"
    path.write_text(text)
    failure = examine(0, 1, 5, error=read_error_file(str(path)), log=LOG)
    assert failure.message == "IndexError: index 7 is out of range"


# -- how far it got -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "began"),
    [
        (from_us("SystemExit", "2", frames=AT_ITS_START), False),
        (from_us("SyntaxError", "invalid syntax (train.py, line 3)", frames=AT_ITS_START[:1]), False),
        (from_us("SystemExit", "2", frames=IN_ARGPARSE), False),
        (from_us("ArgumentError", "argument --lr", frames=IN_ARGPARSE), True),
        (from_us("SystemExit", "2"), True),
        (
            from_us("ValueError", "bad batch", frames=[{"file": "/venv/lib/python3.11/site-packages/mine/train.py"}]),
            True,
        ),
        (from_us("ValueError", "bad batch", frames=[]), True),
        (from_torch("ValueError: bad batch"), True),
        (None, True),
    ],
)
def test_script_of_which_nothing_ran_is_told_from_one_that_may_have_trained(
    error: dict[str, Any] | None, began: bool
) -> None:
    assert examine(0, 1, 5, error=error).began is began
