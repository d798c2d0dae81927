"""Words that no command knows, at each of our commands: refused with 2, and the nearest one named."""

from __future__ import annotations

import shlex

import pytest

from resilience.__main__ import main


def said(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """Run a command that is refused; return its last words."""
    try:
        code: object = main(shlex.split(words))
    except SystemExit as error:
        code = error.code
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("run --ft-rank-heartbeat-timeot=3 x.py", "--ft-rank-heartbeat-timeout"),
        ("config --ft-safty-factor=3", "--ft-safety-factor"),
        ("report --hlp .", "--help"),
        ("store --prt=1", "--port"),
        ("nodecheck --acelerator=cpu", "--accelerator"),
        ("checkpoint list --hlp .", "--help"),
        ("checkpoint export a b --formt=dcp", "--format"),
        ("kubernetes job render --node=2", "--nodes"),
        ("kubernetes controller --group-treshold=1", "--group-threshold"),
        ("kubernetes manifests --imge=x", "--image"),
        ("kubernetes podgroup render --min-membr=2", "--min-member"),
        ("kubernetes uncordon a --contxt=x", "--context"),
        ("slurm render --node=2", "--nodes"),
        ("slurm values --hlp", "--help"),
        ("slurm follow --dir=x --max-requeus=3 -- x.py", "--max-requeues"),
        ("slurm epilog --fault-dir=x --patence=3", "--patience"),
        ("slurm node --run-dir=x --endpont=3", "--endpoint"),
    ],
)
def test_misspelt_flag_is_refused_and_the_nearest_named(
    capsys: pytest.CaptureFixture[str], words: str, meant: str
) -> None:
    assert f"Did you mean '{meant}'?" in said(capsys, words)


@pytest.mark.parametrize("words", ["config --ft-nosuch=1", "config --ft-networkcheck=1", "run --nproc_pr_node=1 x.py"])
def test_flag_is_suggested_with_dashes(capsys: pytest.CaptureFixture[str], words: str) -> None:
    hint = said(capsys, words).splitlines()[-1].partition("Did you mean ")[2]
    assert hint
    assert "_" not in hint


@pytest.mark.parametrize(
    "words", ["kubernetes job render --name=a train.py --lr 0.1", "slurm render train.py --lr 0.1"]
)
def test_flags_of_the_script_are_told_where_they_stand(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert "stand behind --, as in `-- train.py --lr 0.1`" in said(capsys, words)


def test_command_without_a_script_says_nothing_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.py" not in said(capsys, "store --prt=1")


@pytest.mark.parametrize(
    "words",
    [
        "run --network-check --accelerator=my.chips:Chip train.py",
        "run --ft-error-monitor=my.chips:Chip train.py",
        "run --dynamic_failover_extension=my.chips:Chip train.py",
    ],
)
def test_class_with_one_colon_is_told_with_two(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert "Did you mean 'my.chips::Chip'?" in said(capsys, words)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("confg", "config"),
        ("checkpoint lst .", "list"),
        ("kubernetes uncordn a", "uncordon"),
        ("kubernetes podgroup rendr", "render"),
        ("kubernetes controller --log-level=INF", "INFO"),
        ("slurm rendr", "render"),
    ],
)
def test_misspelt_word_is_refused_and_the_nearest_named(
    capsys: pytest.CaptureFixture[str], words: str, meant: str
) -> None:
    assert f"Did you mean '{meant}'?" in said(capsys, words)


@pytest.mark.parametrize("words", ["checkpoint prune .", "slurm epilog"])
def test_flag_that_is_missing_is_named_and_no_other_one_guessed(capsys: pytest.CaptureFixture[str], words: str) -> None:
    text = said(capsys, words)
    assert "are required: --" in text
    assert "Did you mean" not in text


@pytest.mark.parametrize("words", ["checkpoint prune . --kee=3", "kubernetes uncordon a --cont=x", "store --por=1"])
def test_beginning_of_a_flag_is_not_taken_for_it(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert "--" in said(capsys, words)
