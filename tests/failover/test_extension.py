"""A user's extension in a process of its own: whatever it does, the launcher goes on and nothing is left of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.errors import ConfigError
from resilience.failover import extension as extensions
from resilience.failover.extension import Extension
from resilience.failover.strategy import AgentFailureInfo, FailoverStrategy
from tests.conftest import children
from tests.jobs import alive, wait_for

pytestmark = pytest.mark.spawns

LONG_S, SHORT_S = 60.0, 0.3
NORMAL, NODE, GLOBAL = FailoverStrategy.NORMAL, FailoverStrategy.NODE, FailoverStrategy.GLOBAL
FAILED = AgentFailureInfo(node_rank=1, kind="exception", message="ValueError: x")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in the folder that a user starts his job from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return tmp_path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the errors that the launcher logs."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                lines.append(record.getMessage())

    logger = logging.getLogger("resilience.launcher")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, Ear()])
    return lines


def write(home: Path, text: str, name: str = "mine") -> None:
    head = "import os, signal, subprocess, sys, time\nimport resilience.failover as f\nfrom pathlib import Path\n"
    (home / f"{name}.py").write_text(head + textwrap.dedent(text))


def write_class(home: Path, answer: str, *, top: str = "", init: str = "pass", once: str = "") -> None:
    """Write ``mine::Mine``: NORMAL at the rehearsal, then ``once`` at the first failure only, and ``answer`` at every one."""
    parts = {"top": top, "init": init, "once": once or "pass", "answer": answer}
    body = {name: textwrap.indent(textwrap.dedent(part).strip(), " " * 12) for name, part in parts.items()}
    write(
        home,
        f"""
if True:
{body["top"] or " " * 12 + "pass"}

class Mine(f.DynamicAgentFailoverExtension):
    def __init__(self):
        if True:
{body["init"]}

    def get_user_failover_strategy(self, failure_info):
        if failure_info.rehearsal:
            return f.FailoverStrategy.NORMAL
        if not os.path.exists("once"):
            Path("once").touch()
{body["once"]}
        if True:
{body["answer"]}
""",
    )


@contextlib.contextmanager
def started(path: str = "mine::Mine") -> Iterator[Extension]:
    """Start an extension, and see that its end leaves no process."""
    before = children()
    extension = Extension(path, LONG_S)
    try:
        yield extension
    finally:
        extension.close()
        assert children().keys() <= before.keys(), "its process was left behind"


def refused(path: str = "mine::Mine", timeout: float = LONG_S) -> str:
    """Return why an extension is refused at start-up; nothing may be left of it then."""
    before = children()
    with pytest.raises(ConfigError) as refusal:
        Extension(path, timeout).close()
    assert children().keys() <= before.keys(), "its process was left behind"
    text = str(refusal.value)
    assert path in text
    assert "Nothing was started" in text
    return text


def pid_of(extension: Extension) -> int:
    assert extension._process is not None
    return extension._process.pid


def done_in_time(act: Callable[[], FailoverStrategy], extension: Extension) -> FailoverStrategy | None:
    """Return what ``act`` returns; None when it does not come back, and then it is freed by ending the extension."""
    found: list[FailoverStrategy] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join(20)
    answer = found[0] if found else None
    while thread.is_alive():
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(pid_of(extension), signal.SIGKILL)
        thread.join(0.5)
    return answer


# -- good ones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", list(FailoverStrategy))
def test_what_the_extension_returns_is_what_the_launcher_hears(home: Path, asked: FailoverStrategy) -> None:
    write_class(home, f"return f.FailoverStrategy.{asked.name}")
    with started() as extension:
        assert [extension.ask(FAILED), extension.ask(FAILED)] == [asked, asked]


def test_short_names_mean_the_same(home: Path) -> None:
    write_class(home, "return f.FailoverStrategy.ABORTION")
    with started() as extension:
        assert extension.ask(FAILED) is FailoverStrategy.ABORTION_FAILOVER


def test_extension_remembers_on_itself_what_it_saw(home: Path) -> None:
    write_class(
        home,
        """
        self.seen.append(failure_info.message)
        return f.FailoverStrategy.NODE if self.seen.count(failure_info.message) > 1 else f.FailoverStrategy.GLOBAL
        """,
        init="self.seen = []",
    )
    with started() as extension:
        told = [dataclasses.replace(FAILED, message=message) for message in ("a", "b", "a", "b", "c")]
        assert [extension.ask(each) for each in told] == [GLOBAL, GLOBAL, NODE, NODE, GLOBAL]


def test_rehearsal_shows_as_such_and_failures_do_not(home: Path) -> None:
    write(
        home,
        """
        class Mine(f.DynamicAgentFailoverExtension):
            def get_user_failover_strategy(self, failure_info):
                with open("calls", "a") as calls:
                    calls.write(f"{failure_info.rehearsal} {failure_info.extra_info.get('rehearsal')}\\n")
                return f.FailoverStrategy.NORMAL
        """,
    )
    with started() as extension:
        assert (home / "calls").read_text().splitlines() == ["True True"]
        extension.ask(FAILED)
    assert (home / "calls").read_text().splitlines() == ["True True", "False None"]


def test_everything_that_is_known_about_a_failure_arrives(home: Path) -> None:
    write_class(
        home,
        """
        import dataclasses, json
        assert isinstance(failure_info, f.AgentFailureInfo)
        Path("told").write_text(json.dumps(dataclasses.asdict(failure_info)))
        return f.FailoverStrategy.NODE
        """,
    )
    info = AgentFailureInfo(
        node_rank=3,
        timestamp=1.5e9,
        log_content="line 1\nline 2 – ünïcode \ud83d\ude00",
        extra_info={"stack": "File …", "deep": {"a": [1, 2.5, None]}},
        host="gpu-07",
        rank=25,
        kind="exception",
        message="ValueError: x",
        exit_code=-9,
        error_code=201,
        cycle=4,
        step=1 << 40,
        restart_count=4,
        max_restarts=9,
        failures=[{"rank": 25}, {"rank": 26}],
        history=[{"cycle": 3, "kind": "hang"}],
        report={"culprit": {"rank": 25}},
    )
    blank = AgentFailureInfo()
    same = [it.name for it in dataclasses.fields(info) if getattr(info, it.name) == getattr(blank, it.name)]
    assert same == ["rehearsal"], "a field that has its default value shows nothing"
    with started() as extension:
        assert extension.ask(info) is NODE
    assert json.loads((home / "told").read_text()) == json.loads(json.dumps(info.as_json()))


def test_report_that_no_socket_buffer_holds_arrives_whole(home: Path) -> None:
    write_class(home, "return f.FailoverStrategy.NODE if len(failure_info.log_content) == 5_000_000 else 'short'")
    with started() as extension:
        assert extension.ask(dataclasses.replace(FAILED, log_content="x" * 5_000_000)) is NODE


def test_value_that_is_no_json_arrives_as_its_words(home: Path) -> None:
    write_class(home, "return f.FailoverStrategy.NODE if failure_info.extra_info['where'] == '/a/b' else 'other'")
    with started() as extension:
        assert extension.ask(dataclasses.replace(FAILED, extra_info={"where": Path("/a/b")})) is NODE


def test_extension_of_the_common_base_class_is_taken(home: Path) -> None:
    write(
        home,
        """
        class Mine(f.DynamicFailoverExtension):
            def get_user_failover_strategy(self, failure_info):
                return f.FailoverStrategy.GLOBAL
        """,
    )
    with started() as extension:
        assert extension.ask(FAILED) is GLOBAL


def test_module_is_found_in_a_package_and_on_the_path_of_the_launcher(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = home / "elsewhere" / "ours" / "failover"
    package.mkdir(parents=True)
    write_class(package, "return f.FailoverStrategy.NODE")
    monkeypatch.setenv("PYTHONPATH", str(home / "elsewhere"))
    with started("ours.failover.mine::Mine") as extension:
        assert extension.ask(FAILED) is NODE


def test_print_does_not_disturb_the_answer(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_class(
        home,
        """
        print('{"strategy": "ABORTION_FAILOVER"}')
        os.write(1, b'\\xff\\xfe garbage {"error": 1}\\n' * 1000)
        sys.stderr.write("warning\\n")
        return f.FailoverStrategy.NODE
        """,
        top="print('hello')",
    )
    with started() as extension:
        assert [extension.ask(FAILED), extension.ask(FAILED)] == [NODE, NODE]
    assert "garbage" in capfd.readouterr().out, "what it prints is shown"


def test_interrupt_from_the_launchers_terminal_does_not_reach_it(home: Path) -> None:
    write_class(home, "return f.FailoverStrategy.NODE")
    with started() as extension:
        assert os.getsid(pid_of(extension)) != os.getsid(0)


# -- refused at start-up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["mine", "mine:Mine", "mine.Mine", "::Mine", "mine::", "::", ""])
def test_path_of_another_form_is_refused_with_the_form_and_no_process(
    home: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    write_class(home, "return f.FailoverStrategy.NODE")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # whatever is started now would fail in other words
    assert "module::Class" in refused(path)


def test_missing_module_is_refused_by_name(home: Path) -> None:
    assert "No module named 'mine'" in refused()


@pytest.mark.parametrize(
    ("top", "word"),
    [
        ("raise OSError('no licence server')", "OSError: no licence server"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import not_installed", "No module named 'not_installed'"),
        ("os._exit(7)", "ended with 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11"),
    ],
)
def test_module_that_fails_on_import_is_refused_with_its_own_words(home: Path, top: str, word: str) -> None:
    write_class(home, "return f.FailoverStrategy.NODE", top=top)
    assert word in refused()


def test_module_with_a_syntax_error_is_refused(home: Path) -> None:
    write(home, "class Mine(:\n")
    assert "SyntaxError" in refused()


def test_module_that_never_ends_its_import_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_IMPORT_S", SHORT_S)
    write_class(home, "return f.FailoverStrategy.NODE", top="time.sleep(1000)")
    assert f"did not import within {SHORT_S:g} s" in refused(timeout=SHORT_S)


@pytest.mark.parametrize("top", ["", "Mine = 5", "def Mine(): pass", "class Mines: pass"])
def test_missing_class_is_refused_by_name(home: Path, top: str) -> None:
    write(home, top)
    said = refused()
    assert "has no class 'Mine'." in said
    assert ("Did you mean 'Mines'? Nothing was started" in said) == ("Mines" in top)


@pytest.mark.parametrize("base", ["", "(dict)", "(f.FailoverStrategy.__class__)"])
def test_class_of_another_base_is_refused_with_the_right_one(home: Path, base: str) -> None:
    write(home, f"class Mine{base}:\n    def get_user_failover_strategy(self, info): return f.FailoverStrategy.NODE\n")
    assert "resilience.failover.DynamicAgentFailoverExtension" in refused()


def test_class_without_the_method_is_refused_with_its_name(home: Path) -> None:
    write(home, "class Mine(f.DynamicAgentFailoverExtension):\n    pass\n")
    assert "does not define get_user_failover_strategy" in refused()


@pytest.mark.parametrize(
    ("init", "word"),
    [("raise ValueError('no token')", "ValueError: no token"), ("sys.exit()", "SystemExit"), ("os._exit(9)", "with 9")],
)
def test_class_that_can_not_be_made_is_refused_with_its_own_words(home: Path, init: str, word: str) -> None:
    write_class(home, "return f.FailoverStrategy.NODE", init=init)
    assert word in refused()


def test_class_that_wants_arguments_is_refused(home: Path) -> None:
    write(
        home,
        """
        class Mine(f.DynamicAgentFailoverExtension):
            def __init__(self, url): pass
            def get_user_failover_strategy(self, failure_info): return f.FailoverStrategy.NORMAL
        """,
    )
    assert "url" in refused()


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ("return 'NODE_FAILOVER'", "returned 'NODE_FAILOVER'"),
        ("return None", "returned None"),
        ("pass", "returned None"),
        ("return 1", "returned 1"),
        ("return f.FailoverStrategy", "returned <enum 'FailoverStrategy'>"),
        ("raise RuntimeError('not yet')", "RuntimeError: not yet"),
        ("sys.exit(4)", "SystemExit: 4"),
        ("os._exit(7)", "ended with 7"),
    ],
)
def test_wrong_answer_at_the_rehearsal_is_refused_with_what_it_was(home: Path, answer: str, word: str) -> None:
    write(
        home,
        f"""
        class Mine(f.DynamicAgentFailoverExtension):
            def get_user_failover_strategy(self, failure_info):
                {answer}
        """,
    )
    assert word in refused()


def test_extension_that_hangs_at_the_rehearsal_is_refused(home: Path) -> None:
    write(
        home,
        """
        class Mine(f.DynamicAgentFailoverExtension):
            def get_user_failover_strategy(self, failure_info):
                time.sleep(1000)
        """,
    )
    assert f"did not answer within {SHORT_S:g} s" in refused(timeout=SHORT_S)


def test_python_that_can_not_be_started_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "could not be started" in refused()


# -- at a failure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("raise RuntimeError('service is down')", "RuntimeError: service is down"),
        ("sys.exit(5)", "SystemExit: 5"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("os._exit(7)", "ended with 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended with -9"),
        ("return 'ABORTION_FAILOVER'", "returned 'ABORTION_FAILOVER'"),
        ("return None", "returned None"),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "ended with 1"),
        ("return type('Odd', (), {'__repr__': lambda self: 1 / 0})()", "ended with 1"),
    ],
)
def test_extension_that_fails_leaves_it_to_the_rules_and_is_asked_afresh_next_time(
    home: Path, said: list[str], fault: str, word: str
) -> None:
    write_class(home, "return f.FailoverStrategy.NODE", once=fault)
    with started() as extension:
        first = pid_of(extension)
        assert extension.ask(FAILED) is NORMAL
        assert not alive(first)
        (line,) = said
        assert "mine::Mine" in line
        assert word in line
        assert [extension.ask(FAILED), extension.ask(FAILED)] == [NODE, NODE]
        assert pid_of(extension) != first
    assert len(said) == 1, "the later answers were good"


def test_extension_that_hangs_leaves_it_to_the_rules_and_its_late_answer_is_never_heard(
    home: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class(home, "return f.FailoverStrategy.NODE", once="time.sleep(1000)\nreturn f.FailoverStrategy.ABORTION")
    with started() as extension:
        first = pid_of(extension)
        with monkeypatch.context() as impatient:
            impatient.setattr(extension, "_timeout", SHORT_S)
            assert extension.ask(FAILED) is NORMAL
        assert not alive(first)
        assert f"did not answer within {SHORT_S:g} s" in said[0]
        assert extension.ask(FAILED) is NODE


def test_extension_that_was_killed_between_two_failures_is_asked_afresh(home: Path, said: list[str]) -> None:
    write_class(home, "return f.FailoverStrategy.NODE")
    with started() as extension:
        assert extension.ask(FAILED) is NODE
        os.kill(pid_of(extension), signal.SIGKILL)
        wait_for(lambda: not alive(pid_of(extension)), "the end of the extension")
        assert extension.ask(FAILED) is NORMAL
        assert "gone" in said[0] or "ended with -9" in said[0]
        assert extension.ask(FAILED) is NODE


def test_extension_that_is_stopped_leaves_it_to_the_rules(
    home: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class(home, "return f.FailoverStrategy.NODE")
    with started() as extension:
        os.kill(pid_of(extension), signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr(extension, "_timeout", SHORT_S)
            # More than the socket holds: sending has to give up too.
            assert extension.ask(dataclasses.replace(FAILED, log_content="x" * 5_000_000)) is NORMAL
        assert len(said) == 1
        assert extension.ask(FAILED) is NODE


def test_module_that_went_away_meanwhile_leaves_it_to_the_rules(home: Path, said: list[str]) -> None:
    write_class(home, "return f.FailoverStrategy.NODE", once="os._exit(7)")
    with started() as extension:
        assert extension.ask(FAILED) is NORMAL
        text = (home / "mine.py").read_text()
        (home / "mine.py").unlink()
        assert extension.ask(FAILED) is NORMAL
        assert "No module named 'mine'" in said[1]
        (home / "mine.py").write_text(text)
        assert extension.ask(FAILED) is NODE


@pytest.mark.parametrize("words", ["garbage", "7", "[]", "{}", '{"strategy": "MAYBE"}', '{"strategy": null}', "\\xff"])
def test_anything_else_that_comes_out_of_its_socket_leaves_it_to_the_rules(
    home: Path, said: list[str], words: str
) -> None:
    # Its descriptor is open to whatever code runs there: a fork that returns, a library that writes to every descriptor.
    write_class(
        home, "return f.FailoverStrategy.NODE", once=f"os.write(int(sys.argv[2]), b'{words}\\n')\ntime.sleep(1000)"
    )
    with started() as extension:
        assert extension.ask(FAILED) is NORMAL
        assert "mine::Mine" in said[0]
        assert extension.ask(FAILED) is NODE


def test_extension_that_closes_its_socket_and_lives_on_does_not_hold_the_launcher_up(
    home: Path, said: list[str]
) -> None:
    write_class(home, "return f.FailoverStrategy.NODE", once="os.closerange(3, 1000)\ntime.sleep(1000)")
    with started() as extension:
        assert done_in_time(lambda: extension.ask(FAILED), extension) is NORMAL, "the launcher waited for its end"
        assert len(said) == 1
        assert extension.ask(FAILED) is NODE


def test_extension_that_hangs_in_its_second_import_is_not_waited_for_longer_than_for_an_answer(
    home: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class(
        home,
        "return f.FailoverStrategy.NODE",
        top="if os.path.exists('once'):\n    time.sleep(1000)",
        once="os._exit(7)",
    )
    with started() as extension:
        assert extension.ask(FAILED) is NORMAL
        monkeypatch.setattr(extension, "_timeout", SHORT_S)
        assert done_in_time(lambda: extension.ask(FAILED), extension) is NORMAL, (
            "a failed job waited for an import that has no end"
        )
        assert len(said) == 2


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "init",
    [
        "pass",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "import atexit; atexit.register(time.sleep, 1000)",
        "import threading; threading.Thread(target=time.sleep, args=(1000,)).start()",
    ],
)
def test_close_leaves_no_process_however_the_extension_clings_to_life(home: Path, init: str) -> None:
    write_class(home, "return f.FailoverStrategy.NODE", init=init)
    with started() as extension:
        pid = pid_of(extension)
        extension.close()
        assert not alive(pid)
        extension.close()


def test_close_leaves_no_process_when_the_extension_is_stopped(home: Path) -> None:
    write_class(home, "return f.FailoverStrategy.NODE")
    with started() as extension:
        pid = pid_of(extension)
        os.kill(pid, signal.SIGSTOP)
        extension.close()
        assert not alive(pid)


@pytest.mark.parametrize("hangs", [False, True])
def test_command_that_an_extension_started_does_not_outlive_it(
    home: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class(
        home,
        "return f.FailoverStrategy.NODE",
        init="self.helper = subprocess.Popen(['sleep', '1000'])\nPath('helper').write_text(str(self.helper.pid))",
        once="self.helper.wait()",
    )
    if not hangs:
        (home / "once").touch()
    with started() as extension:
        helper = int((home / "helper").read_text())
        assert alive(helper)
        if hangs:
            monkeypatch.setattr(extension, "_timeout", SHORT_S)
            assert extension.ask(FAILED) is NORMAL
        else:
            extension.close()
        try:
            wait_for(lambda: not alive(helper), "the end of the command that the extension had started", 5.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(helper, signal.SIGKILL)


_LAUNCHER = """
import sys
from resilience.failover.extension import Extension
from resilience.failover.strategy import AgentFailureInfo
extension = Extension("mine::Mine", 1000.0)
print(extension._process.pid, flush=True)
if sys.argv[1] == "asks":
    extension.ask(AgentFailureInfo())
sys.stdin.read()
"""


@pytest.mark.parametrize("launcher", ["waits", "asks", "starts"])
def test_extension_dies_with_a_launcher_that_is_killed(home: Path, launcher: str) -> None:
    note_and_hang = "Path('pid.new').write_text(str(os.getpid())); os.rename('pid.new', 'pid'); time.sleep(1000)"
    write_class(
        home,
        "return f.FailoverStrategy.NODE",
        top=note_and_hang if launcher == "starts" else "pass",
        once=note_and_hang if launcher == "asks" else "pass",
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        try:
            if launcher == "waits":
                assert parent.stdout is not None
                pid = int(parent.stdout.readline())
            else:
                wait_for((home / "pid").exists, "the extension to hang")
                pid = int((home / "pid").read_text())
            assert alive(pid)
        finally:
            parent.kill()
            parent.wait()
        wait_for(lambda: not alive(pid), "the end of the extension", 20.0)


def test_extension_that_thinks_is_not_waited_for_when_the_launcher_is_to_end(home: Path, said: list[str]) -> None:
    write_class(home, "Path('asked').touch(); time.sleep(1000)")
    with started() as extension:
        to_end = Path("asked").exists
        assert extension.ask(FAILED, to_end) is NORMAL
        assert "does not wait for it" in said[-1]
