"""Places of checkpoints: which words mean which, and those in object stores by the file systems that fsspec has built in.

A real S3 server, with what happens to it: ``tests/real/test_s3.py``.
"""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from resilience.__main__ import main
from resilience.checkpoint import stores
from resilience.checkpoint.flash import FlashCheckpoint
from resilience.checkpoint.manifest import File, Manifest
from resilience.checkpoint.receipt import Level
from resilience.checkpoint.saver import restores
from resilience.checkpoint.stores import Url, lease
from resilience.checkpoint.stores.claims import DirectoryInUse
from resilience.checkpoint.stores.client import (
    Client,
    Patience,
    as_python_has_it,
    in_words,
    is_refused,
    may_pass,
    refused,
)
from resilience.checkpoint.stores.local import Directory
from resilience.checkpoint.stores.objects import Bucket
from resilience.checkpoint.stores.upload import Contents, upload
from resilience.checkpoint.writing import PIECE, Stopwatch
from resilience.errors import CheckpointError, ConfigError


@pytest.fixture
def bucket() -> Bucket:
    return Bucket(Url(f"memory://{uuid.uuid4().hex}"), patience=1.0)


def begun(it: Bucket, step: int, folder: str = "") -> tuple[str, Manifest]:
    """A checkpoint that is written, but for its manifest."""
    folder = folder or f"{step:08d}"
    it.partial(folder)
    file: File = it.write(folder, "rank-00000.values", 0, b"", memoryview(b"values"))
    it.settle(folder)
    return folder, Manifest(step, 1, 0, 1, time.time(), (), (file,))


def names(it: Bucket) -> list[str]:
    client = Client(it.path)
    found = client.call("find", client.root)
    return sorted(name.removeprefix(f"{client.root}/") for name in found)


# -- which place is meant ---------------------------------------------------------------------------------------------


def test_paths_are_directories_and_urls_are_object_stores() -> None:
    assert stores.where("/a/b") == stores.where(Path("/a/b")) == stores.where("file:///a/b") == Path("/a/b")
    assert stores.where("a") == Path.cwd() / "a"
    assert stores.where("s3://bucket/run/") == Url("s3://bucket/run")
    assert stores.where("odd::name") == Path.cwd() / "odd::name"
    assert stores.where("./s3:/bucket/run") == Path.cwd() / "s3:/bucket/run"
    assert isinstance(stores.opened(Path("/a")), Directory)
    assert isinstance(stores.opened(Url("s3://bucket/run")), Bucket)
    assert str(Url("s3://bucket/run") / "x") == "s3://bucket/run/x"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (Path("s3://bucket/run"), 'loses a slash in a Path. Give it as a text, "s3://bucket/run"'),
        ("s3:/bucket/run", r"s3://bucket/run was probably meant. A directory of that name is \./s3:/bucket/run"),
        ("file:/a/b", "file:///a/b was probably meant"),
        ("file://a/b", "file:///a/b"),
        ("filecache::s3://bucket/run", "a cache or an archive between"),
        ("sftp://me:hunter2@host/run", "a password in a URL ends in logs"),
    ],
)
def test_place_that_can_not_be_meant_is_refused_in_words(place: str | Path, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        stores.where(place)
    assert "hunter2" not in str(raised.value)


def test_kind_of_store_that_nobody_knows_names_the_extra() -> None:
    with pytest.raises(CheckpointError, match=r"nosuch://x can't be opened.*pip install 'resilience-sdk\[fsspec\]'"):
        Bucket(Url("nosuch://x")).claim("job")


@pytest.mark.spawns
def test_saver_without_a_url_imports_no_fsspec() -> None:
    code = "import sys, resilience.checkpoint.saver.process, resilience.checkpoint.cli; print('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"


# -- what may pass ----------------------------------------------------------------------------------------------------


class HTTPClientError(Exception):
    """As botocore has one."""


class NoCredentialsError(Exception):
    """As botocore has one."""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError(), True),
        (asyncio.TimeoutError(), True),
        (OSError(errno.EBUSY, "slow down"), True),
        (OSError(errno.EREMOTEIO, "internal error"), True),
        (HTTPClientError("cut"), True),
        (PermissionError("signature"), False),
        (FileNotFoundError("bucket"), False),
        (FileExistsError("there"), False),
        (OSError(errno.EINVAL, "precondition"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (NoCredentialsError("none"), False),
        (ValueError("wrong"), False),
        (CheckpointError("ours"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, passes: bool, bucket: Bucket) -> None:
    assert may_pass(error) is passes
    tries = 0

    def act() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise error
        return "done"

    client = Client(bucket.path, patience=5.0)
    if passes:
        assert client.again(act, client.patience()) == "done"
    else:
        with pytest.raises((OSError, CheckpointError)):
            client.again(act, client.patience())
        assert tries == 1


def test_patience_ends_and_is_renewed_by_every_success() -> None:
    client = Client(Url("memory://x"), patience=0.3)

    def act() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    began = time.monotonic()
    with pytest.raises(ConnectionResetError):
        client.again(act, client.patience())
    assert time.monotonic() - began < 3
    patience = Patience(100.0)
    patience._until = 0.0
    assert client.again(lambda: 1, patience) == 1
    assert patience.left() > 90


def test_errors_of_libraries_become_those_of_python() -> None:
    assert isinstance(as_python_has_it(NoCredentialsError("none")), PermissionError)
    assert isinstance(as_python_has_it(HTTPClientError("cut")), ConnectionError)
    assert as_python_has_it(ValueError("odd")).args == (errno.EINVAL, "ValueError: odd")
    refusal = OSError(errno.EINVAL, "a condition did not hold")
    assert not is_refused(refusal)
    refusal.__cause__ = Exception()
    refusal.__cause__.response = {"Error": {"Code": "PreconditionFailed"}}  # type: ignore[attr-defined]
    assert is_refused(refusal)
    assert in_words(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionError("The key is wrong."), "Look at the key"),
        (FileNotFoundError("no bucket"), "Make it first"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "whether the server is up"),
        (OSError(errno.EINVAL, "odd"), "that can be written to"),
    ],
)
def test_what_is_said_before_step_0_has_what_to_do(error: Exception, advice: str) -> None:
    said = str(refused(Url("s3://bucket/run"), error))
    assert said.startswith("s3://bucket/run can't be used for checkpoints: ")
    assert "Nothing was written." in said
    assert advice in said


# -- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, PIECE, PIECE + 1, 2 * PIECE + 5])
def test_object_has_header_and_data_and_the_digests_of_a_file(bucket: Bucket, tmp_path: Path, nbytes: int) -> None:
    data, head = memoryview(bytes(range(251)) * (nbytes // 251 + 1))[:nbytes], b"h" * 4096
    seen: list[int] = []
    bucket.partial("00000001")
    file = bucket.write("00000001", "rank-00000.safetensors", 3, head, data, progress=seen.append)
    other = Directory(tmp_path)
    other.partial("x")
    assert file == other.write("x", "rank-00000.safetensors", 3, head, data)
    assert sum(seen) == nbytes
    assert bucket.read("step-00000001", "rank-00000.safetensors", 0, file.nbytes) == head + bytes(data)
    contents = Contents(head, data, file.chunk, file.digests[1:])
    assert upload(Client(bucket.path), "again", contents, Stopwatch()) == list(file.digests[1:]), "known ones are taken"


def test_folder_without_a_manifest_is_no_checkpoint_and_is_said_unless_it_is_being_written(bucket: Bucket) -> None:
    said: list[str] = []
    bucket.commit(*begun(bucket, 1))
    begun(bucket, 2)
    assert [item.manifest.step for item in bucket.stored(said.append)] == [1]
    assert said == []
    Client(bucket.path).put("step-00000003/rank-00000.values", b"x")
    Client(bucket.path).put("step-00000001/rank-00000.values", b"short")
    assert bucket.stored(said.append) == []
    assert sorted(text.partition(": ")[2] for text in said) == [
        "rank-00000.values has 5 bytes, not 6. It is left out.",
        "there is no manifest: it was never finished. It is left out.",
    ]


def test_what_was_left_half_done_is_swept_by_the_next_job(bucket: Bucket) -> None:
    bucket.commit(*begun(bucket, 1))
    begun(bucket, 2)
    bucket.mark()
    following = Bucket(bucket.path)
    following.claim("following")
    following.close()
    assert names(bucket) == ["step-00000001/manifest.json", "step-00000001/rank-00000.values"]


def test_intent_that_names_something_else_removes_nothing(bucket: Bucket) -> None:
    client = Client(bucket.path)
    bucket.commit(*begun(bucket, 1))
    client.put("precious/file", b"x")
    for number, name in enumerate([b"precious", b"..", b"", b"\xff", b"step-00000001", b"step-00000001/../precious"]):
        client.put(f".partial-{number}", name)
    bucket.claim("job")
    bucket.close()
    assert names(bucket) == ["precious/file", "step-00000001/manifest.json", "step-00000001/rank-00000.values"]


def test_two_nodes_write_into_one_folder_and_the_second_save_of_a_step_into_another(bucket: Bucket) -> None:
    other = Bucket(bucket.path)
    assert bucket.partial("00000005-7-1") == other.partial("00000005-7-1")
    assert bucket.partial("00000005-7-2").name == "step-00000005.2"
    mark = bucket.mark()
    assert other.sees(mark)
    assert not Bucket(Url(f"{bucket.path}-elsewhere")).sees(mark)


def test_what_another_job_swept_is_not_committed_and_not_left_lying_about(bucket: Bucket) -> None:
    bucket.partial("00000001")
    following = Bucket(bucket.path)
    following.claim("following")
    bucket.write("00000001", "rank-00000.values", 0, b"", memoryview(b"values"))
    with pytest.raises(CheckpointError, match="was removed while it was written"):
        bucket.settle("00000001")
    following.close()
    assert names(bucket) == []


def test_prune_keeps_the_newest_and_every_so_many(bucket: Bucket) -> None:
    for step in range(7):
        bucket.commit(*begun(bucket, step))
    assert [item.manifest.step for item in bucket.prune(keep=2, keep_every=3)] == [4, 3, 1, 0]
    assert [item.manifest.step for item in bucket.stored()] == [6, 5, 2]
    assert not [name for name in names(bucket) if "0000000" in name and not name.startswith("step-")]


def test_set_aside_and_notes_are_kept_in_the_store(bucket: Bucket) -> None:
    bucket.commit(*begun(bucket, 1))
    restores.write(bucket, {(1, 5): 2})
    assert restores.read(bucket) == {(1, 5): 2}
    assert restores.read(Bucket(Url(f"{bucket.path}-elsewhere"))) == {}
    said: list[str] = []
    bucket.set_aside(bucket.stored()[0], "two restarts failed from it")
    assert bucket.stored(said.append) == []
    assert said[0].endswith("it was set aside: two restarts failed from it. It is left out.")


# -- one job at a time ------------------------------------------------------------------------------------------------


def test_second_claim_is_refused_and_names_the_first(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    bucket.claim("first")
    with pytest.raises(DirectoryInUse, match=r"another job writes its checkpoints here \(host .*, pid .*, run first\)"):
        Bucket(bucket.path).claim("second")
    bucket.close()
    assert names(bucket) == []


def test_claim_without_signs_of_life_is_taken_over_and_its_holder_is_told(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "DEAD_S", 0.4)
    monkeypatch.setattr(lease, "RENEW_S", 100.0)
    bucket.claim("first")
    folder, contents = begun(bucket, 1)
    second = Bucket(bucket.path)
    second.claim("second")
    with pytest.raises(DirectoryInUse, match="run second"):
        bucket.commit(folder, contents)
    with pytest.raises(DirectoryInUse, match="run second"):
        bucket.partial("00000002")
    bucket.close()
    assert Client(second.path).exists(".lock"), "the second one's, which the first does not remove"
    second.close()


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 9999, b'{"token": 1}', b"null", bytes(range(256))])
def test_claim_that_nobody_can_read_counts_as_one_until_it_is_seen_to_be_dead(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(lease, "DEAD_S", 0.3)
    Client(bucket.path).put(".lock", text)
    bucket.claim("job")
    bucket.close()
    assert names(bucket) == []


def test_holder_whose_pid_is_none_is_not_looked_for() -> None:
    here = lease.Holder.here("job")
    assert not here.is_gone()
    for pid in (0, -1, "1", None):
        assert not lease.Holder.of(json.dumps({**vars(here), "pid": pid}).encode()).is_gone()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert lease.Holder.of(json.dumps({**vars(here), "pid": ended.pid}).encode()).is_gone()
    assert not lease.Holder.of(json.dumps({**vars(here), "pid": ended.pid, "realm": "elsewhere"}).encode()).is_gone()


def test_store_that_takes_no_notice_of_conditions_is_said_and_the_claim_is_ours_all_the_same(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Client, "create", Client.put)
    with caplog.at_level("WARNING"):
        bucket.claim("job")
    assert "takes no notice of conditions" in caplog.text
    bucket.commit(*begun(bucket, 1))
    bucket.close()
    assert [item.manifest.step for item in bucket.stored()] == [1]


def test_claim_that_somebody_removed_is_made_anew(bucket: Bucket) -> None:
    bucket.claim("first")
    Client(bucket.path).remove(".lock")
    bucket.commit(*begun(bucket, 1))
    assert Client(bucket.path).exists(".lock")
    bucket.close()


# -- the whole way, with a saver in a process of its own --------------------------------------------------------------


@pytest.mark.spawns
def test_checkpoints_go_through_any_file_system_of_fsspec_and_come_back(
    tmp_path: Path, saver_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"local://{tmp_path}/with space/ck"
    wanted = torch.arange(1000.0)
    with FlashCheckpoint(url, disk_every=1, keep=2) as checkpoint:
        for step in range(3):
            checkpoint.save_state(step, {"x": wanted + step, "n": step})
            assert checkpoint.wait().level is Level.DURABLE
    with FlashCheckpoint(url) as checkpoint:
        found = checkpoint.load_state()
        assert found["n"] == 2
        assert torch.equal(found["x"], wanted + 2)
    assert main(["checkpoint", "verify", url]) == 0
    assert main(["checkpoint", "export", url, str(tmp_path / "x.safetensors")]) == 0
    assert "step 2: good" in capsys.readouterr().out
    with FlashCheckpoint(tmp_path / "with space" / "ck") as checkpoint:
        assert checkpoint.load_state()["n"] == 2, "the same files are a directory's"
