"""What the callback says over the life of a training, what it records, and the names that it has."""

from __future__ import annotations

import inspect
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from resilience.integrations import lightning as ours
from resilience.integrations import pytorch_lightning as theirs
from resilience.integrations.faults import Faults, SimulatedFaultParams, parse
from resilience.integrations.finished import End, is_complete
from resilience.integrations.lightning import flavour, policy, progress
from resilience.integrations.lightning.snapshots import Due
from torch.utils.data import DataLoader

import resilience
from resilience import WorkloadAction, WorkloadControlRequest
from resilience.errors import ConfigError, ResilienceError
from resilience.failover.strategy import FailoverStrategy
from resilience.pulse import client
from tests.integrations.lightning.training import Crash, Model, Numbers, Rows, loader, trained


def opened() -> set[str]:
    return {name for name, _ in client.open_sections()}


class Told(Model):
    """Notes in which sections it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, set[str]] = {}

    def note(self, what: str) -> None:
        self.told.setdefault(what, opened())

    def setup(self, stage: str) -> None:
        self.note("setup")

    def on_fit_start(self) -> None:
        self.note("on_fit_start")

    def on_train_start(self) -> None:
        self.note("on_train_start")

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.note("forward")
        return super().training_step(batch, index)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.note("backward")
        super().backward(loss, *args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("optimizer")

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.note("sanity" if self.trainer.sanity_checking else "validation")
        super().validation_step(batch, index)

    def on_train_epoch_end(self) -> None:
        self.note("epoch end")

    def on_train_end(self) -> None:
        self.note("end")


class Slow(TorchCheckpointIO):
    """Notes in which sections it writes."""

    def __init__(self, model: Told) -> None:
        self.model = model

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.model.note("checkpointing")
        super().save_checkpoint(*args, **kwargs)


class Watched(Numbers):
    """Notes in which sections it is read."""

    def __init__(self, model: Told) -> None:
        super().__init__()
        self.model = model

    def __getitem__(self, index: int) -> torch.Tensor:
        self.model.note("load")
        return super().__getitem__(index)


@pytest.mark.spawns
def test_the_whole_life_of_a_training_is_in_sections(tmp_path: Path) -> None:
    model = Told()
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        plugins=[Slow(model)],
        callbacks=[ours.ResilienceCallback(tmp_path / "flash"), ModelCheckpoint(tmp_path / "saved")],
    )
    trainer.fit(model, DataLoader(Watched(model), 4), DataLoader(Numbers(), 8))
    assert model.told == {
        "setup": {"setup"},
        "on_fit_start": {"setup"},
        "sanity": {"setup", "sanity check", "validation step"},
        "on_train_start": {"setup"},
        "load": set(),
        "forward": {"step"},
        "backward": {"step"},
        "optimizer": {"step"},
        "validation": {"validation", "validation step"},
        "epoch end": {"epoch end"},
        "checkpointing": {"epoch end", "checkpointing"},
        "end": {"teardown"},
    }
    assert opened() == set()
    assert client.last_step() == 15


@pytest.mark.spawns
def test_snapshots_can_be_switched_off_and_nothing_is_written_then(tmp_path: Path) -> None:
    trained(tmp_path, callback={"snapshots": False, "verify": False}, max_epochs=1)
    assert not (tmp_path / "flash").exists()
    assert client.last_step() == 7


@pytest.mark.spawns
def test_finished_training_is_not_trained_again_and_goes_on_if_it_is_given_more_epochs(tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", max_epochs=3)
    first = trained(tmp_path / "twice", max_epochs=2)
    again = trained(tmp_path / "twice", max_epochs=2, rows=Rows())
    assert (again.rows, again.metrics, again.counts) == ({}, first.metrics, first.counts)
    more = trained(tmp_path / "twice", max_epochs=3)
    assert (more.seen, more.counts) == (straight.seen, straight.counts)
    assert more.digest == straight.digest


@pytest.mark.spawns
def test_pytorch_lightning_has_classes_of_its_own_and_the_other_name_is_refused(tmp_path: Path) -> None:
    def fit(callback: Any, crash_at: int | None = None) -> Any:
        class Small(pytorch_lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(6, 1)

            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                if self.trainer.global_step == crash_at:
                    raise Crash
                return self.layer(batch).square().mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.1)

        pytorch_lightning.seed_everything(3)
        model = Small()
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        }
        trainer = pytorch_lightning.Trainer(accelerator="cpu", max_epochs=2, callbacks=[callback], **quiet)
        trainer.fit(model, loader("plain"))
        return model.layer.weight.detach().clone()

    with pytest.raises(ConfigError, match=r"Import it from resilience\.integrations\.pytorch_lightning"):
        fit(ours.ResilienceCallback(tmp_path / "a"))
    straight = fit(theirs.ResilienceCallback(tmp_path / "a"))
    with pytest.raises(Crash):
        fit(theirs.ResilienceCallback(tmp_path / "b"), crash_at=11)
    assert torch.equal(fit(theirs.ResilienceCallback(tmp_path / "b")), straight)


# -- exceptions -------------------------------------------------------------------------------------------------------


@pytest.mark.spawns
def test_exception_is_recorded_with_step_and_section_and_the_strategy_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    rules = {Exception: FailoverStrategy.GLOBAL, Crash: FailoverStrategy.ABORTION}
    with pytest.raises(Crash):
        trained(tmp_path, crash_at=5, callback={"exc_handling_policy": rules, "snapshots": False, "verify": False})
    told = json.loads((tmp_path / "error.json").read_text())["resilience"]
    assert told["type"].endswith("Crash")
    assert told["step"] == 4
    assert "step" in [item["name"] for item in told["sections"]]
    assert told["context"]["failover"] == "ABORTION_FAILOVER"
    assert (tmp_path / "finished").exists(), "it asked for the end of the job"
    resilience.annotate(failover=None)


@pytest.mark.parametrize(
    ("said", "action"),
    [
        (FailoverStrategy.NODE, WorkloadAction.ExcludeThisNode),
        (FailoverStrategy.ABORTION_FAILOVER, WorkloadAction.ShutdownWorkload),
        (FailoverStrategy.GLOBAL, None),
        (FailoverStrategy.NORMAL, None),
        (WorkloadAction.ExcludeThisNode, WorkloadAction.ExcludeThisNode),
        (None, None),
    ],
)
def test_policy_leads_to_a_request(said: Any, action: WorkloadAction | None) -> None:
    found = policy.request(policy.answer(lambda error: said, Crash("a disk\nand more")), Crash("a disk\nand more"))
    assert (found.action if found else None) == action
    assert found is None or found.description == "Crash: a disk"


def test_of_a_mapping_the_nearest_class_counts_and_requests_are_taken_as_they_are() -> None:
    wanted = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "mine")
    rules: dict[type[BaseException], policy.Answer] = {
        Exception: None,
        OSError: FailoverStrategy.NODE,
        FileNotFoundError: wanted,
    }
    assert policy.answer(rules, FileNotFoundError()) is wanted
    assert policy.answer(rules, PermissionError()) is FailoverStrategy.NODE
    assert policy.answer(rules, KeyError()) is None
    assert policy.request(wanted, KeyError()) is wanted


def test_policy_that_can_not_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a function of the exception"):
        ours.ResilienceCallback(exc_handling_policy={"OSError": None})
    with pytest.raises(ConfigError, match="returned 3"):
        policy.request(3, KeyError())


# -- when it is due, and when it is over ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps", "due"),
    [(3, [1, 2, 3, 4, 5, 6], [3, 6]), (3, [2, 4, 6, 8], [4, 6]), (5, [3, 6, 9, 12], [6, 12]), ("auto", [1, 2], [])],
)
def test_interval_in_steps_holds_however_many_a_batch_makes(every: Any, steps: list[int], due: list[int]) -> None:
    clock, last, found = Due(every), 0, []
    for now in steps:
        found += [now] if clock.since(last, now) else []
        last = now
    assert found == due


@pytest.mark.parametrize(
    ("end", "complete"),
    [
        (End(10, 10, 1, None, False, False), True),
        (End(9, 10, 1, None, False, False), False),
        (End(9, -1, 3, 3, False, False), True),
        (End(9, -1, 2, 3, False, False), False),
        (End(9, -1, 2, -1, False, False), False),
        (End(9, -1, 2, 3, True, False), True),  # stopped early
        (End(9, -1, 2, 3, True, True), False),  # out of time: the next job goes on
    ],
)
def test_training_is_complete_when_nothing_is_left_to_train(end: End, complete: bool) -> None:
    assert is_complete(end) is complete


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("settings", "made"),
    [
        ({"max_epochs": 1}, True),
        ({"max_epochs": 9, "max_time": {"seconds": 0}}, False),
        ({"max_epochs": 9, "callbacks": [EarlyStopping("val", patience=1, stopping_threshold=1e9)]}, True),
    ],
)
def test_file_says_that_training_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], made: bool
) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "deep" / "finished"))
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    callbacks = [ours.FaultToleranceCallback(autoresume=True, calculate_timeouts=False), *settings.pop("callbacks", [])]
    trainer = pl.Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=callbacks, **quiet, **settings)
    trainer.fit(Model(), loader("plain"), DataLoader(Numbers(), 8))
    assert (tmp_path / "deep" / "finished").exists() is made


# -- names of others, and faults that are simulated -------------------------------------------------------------------


def test_callbacks_of_nvrx_take_the_parameters_that_their_users_write() -> None:
    usual = ["autoresume", "calculate_timeouts", "simulated_fault_params", "exp_dir", "logger_name"]
    assert list(inspect.signature(ours.FaultToleranceCallback).parameters) == usual
    assert list(inspect.signature(ours.FaultToleranceSectionsCallback).parameters) == [*usual, "exc_handling_policy"]
    assert set(ours.__all__) == set(theirs.__all__)
    with pytest.raises(ConfigError, match="FAULT_TOL_FINISHED_FLAG_FILE"):
        ours.FaultToleranceCallback(autoresume=True, calculate_timeouts=False)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("RESILIENCE_SIMULATED_FAULT", raising=False)
    yield monkeypatch


def test_faults_are_given_in_code_or_by_the_environment(environment: pytest.MonkeyPatch) -> None:
    assert parse(None) == []
    environment.setenv("RESILIENCE_SIMULATED_FAULT", "kill:rank=1,step=30; slow:rank=any,step=3,seconds=0.5,cycle=2")
    assert parse(None) == [
        SimulatedFaultParams("kill", rank_to_fail=1, step=30),
        SimulatedFaultParams("slow", rank_to_fail=None, step=3, seconds=0.5, cycle=2),
    ]
    fault = SimulatedFaultParams("rank_hung", 60.0, 5.0, 0)
    assert (
        parse(fault)
        == parse({"fault_type": "rank_hung", "base_delay": 60.0, "rand_delay": 5.0, "rank_to_fail": 0})
        == [fault]
    )
    assert parse([fault, fault]) == [fault, fault]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kil:step=1", "Did you mean 'kill'"),
        ("kill:stepp=1", "'step'"),
        ("kill:step=x", "NAME=NUMBER"),
        ("slow:rank=0", "step=N"),
    ],
)
def test_fault_that_can_not_be_meant_is_refused(environment: pytest.MonkeyPatch, text: str, word: str) -> None:
    environment.setenv("RESILIENCE_SIMULATED_FAULT", text)
    with pytest.raises(ConfigError, match=word):
        ours.ResilienceCallback()


def test_ranks_agree_without_a_word_on_who_of_them_fails() -> None:
    fault = SimulatedFaultParams("random", base_delay=1e6)
    for run in map(str, range(20)):
        struck = [bool(Faults([fault], rank, 4, 0, run)) for rank in range(4)]
        assert struck.count(True) == 1
    assert len({tuple(bool(Faults([fault], rank, 4, 0, str(run))) for rank in range(4)) for run in range(40)}) == 4
    assert not Faults([fault], 0, 1, 1, "")  # in its first life only


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("fault", "end"), [("kill:rank=0,step=2", -signal.SIGKILL), ("rank_hung:rank=0,delay=0.1", "T")]
)
def test_rank_is_killed_or_stopped_for_real(tmp_path: Path, fault: str, end: Any) -> None:
    import subprocess
    import sys

    from tests.jobs import wait_for

    code = (
        "import time; from resilience.integrations.faults import Faults, parse\n"
        "faults = Faults(parse(None), 0, 1, 0, '')\n"
        "for step in range(10000): faults.strike(step); time.sleep(0.01)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RESILIENCE_SIMULATED_FAULT": fault})
    try:
        if isinstance(end, str):
            stat = Path(f"/proc/{child.pid}/stat")
            wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == end, "it to be stopped", 60)
        else:
            assert child.wait(60) == end
    finally:
        child.kill()
        child.wait()


def test_unknown_option_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises((ResilienceError, TypeError)):
        trained(tmp_path, callback={"sloots": 3, "verify": False}, max_epochs=1)


def test_weights_that_a_callback_averages_are_kept(tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", also=(EMAWeightAveraging(decay=0.9),))
    rows = Rows()
    with pytest.raises(Crash):
        trained(tmp_path / "broken", crash_at=11, rows=rows, also=(EMAWeightAveraging(decay=0.9),))
    assert trained(tmp_path / "broken", rows=rows, also=(EMAWeightAveraging(decay=0.9),)) == straight
    assert straight.digest != trained(tmp_path / "plain").digest, "else this test can't fail"


def test_trainer_after_one_with_several_ranks_is_known_for_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # Lightning leaves it behind
    several = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    alone = pl.Trainer(accelerator="cpu", devices=1, strategy="auto", logger=False, enable_checkpointing=False)
    flavour.tell_who(several)
    flavour.check_world(several)
    with pytest.raises(ConfigError, match="the job has 2 ranks and this trainer 1"):
        flavour.check_world(alone)
    flavour.tell_who(alone)
    flavour.check_world(alone)
    monkeypatch.setenv("RANK", "1")  # a launcher's word counts more
    flavour.tell_who(alone)
    with pytest.raises(ConfigError, match="the job has 2 ranks and this trainer 1"):
        flavour.check_world(alone)


def test_number_that_a_hook_keeps_is_kept_as_it_is_and_no_other_name_of_one_that_is_there() -> None:
    weights = {"w": torch.ones(1)}
    standard = {"epoch": 1, "state_dict": weights}
    changed = {"epoch": 1, "state_dict": {"average": torch.zeros(1)}, "current": weights, "mine": 1}
    found = progress._added(standard, changed)
    assert found["mine"] == 1
    assert found["resilience.same"] == {"current": "state_dict"}
    assert list(found["state_dict"]) == ["average"]


def test_nothing_that_the_loops_count_with_is_forgotten() -> None:
    fit_loop = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    known = {place for place, _, _ in progress._counted(fit_loop)}
    pending, found = [("", fit_loop)], set()
    while pending:
        prefix, loop = pending.pop()
        for name, value in vars(loop).items():
            if any(kind.__name__ == "_Loop" for kind in type(value).__mro__):
                pending.append((f"{prefix}{name}.", value))
            elif hasattr(value, "state_dict") and hasattr(value, "reset_on_restart"):
                found.add(prefix + name)
    assert found
    assert found <= known


def test_numbers_of_the_loops_are_what_lightning_itself_would_keep() -> None:
    trainer = pl.Trainer(accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False)
    trainer.fit(Model(), DataLoader(Numbers(), 4))
    counted = list(progress._counted(trainer.fit_loop))
    kept = progress.loops_state(counted)
    assert kept["epoch_loop.batch_progress"] == trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    fresh = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    again = list(progress._counted(fresh.fit_loop))
    assert progress.loops_state(again) != kept
    progress.load_loops(again, kept)
    assert progress.loops_state(again) == kept
    assert fresh.global_step == 3
