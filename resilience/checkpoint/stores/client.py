"""What is asked of an object store, through fsspec: small things, each with a deadline, again for a while where that may help.

Rule: a call that fails for good raises what it is in Python's words (``FileExistsError``, ``PermissionError``, …), at once; one
that may pass (a cut line, a server that is down or busy) is tried again with growing pauses as long as the patience lasts.

Hazard: a request may have been carried out though its answer was lost. Whatever is tried again is the same when done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from resilience.checkpoint.stores import Url
from resilience.errors import CheckpointError

_LOG = logging.getLogger("resilience.checkpoint")
T = TypeVar("T")
PATIENCE_S = 120.0  # without a single success
HASTY_S = 12.0  # where somebody waits for the answer
_CALL_S = 15.0
_SLOWEST = 1 << 20  # bytes per second, below which a line counts as cut
_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_S3 = ("s3", "s3a")
_PASSING = {"HTTPClientError", "ConnectionError", "ResponseParserError", "ClientPayloadError", "TimeoutError"}
_FOR_GOOD = {
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.EACCES,
    errno.ENAMETOOLONG,
    errno.EMSGSIZE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EREMCHG,
    errno.EROFS,
}
_REFUSED = {"PreconditionFailed", "412", "ConditionalRequestConflict"}
_known: dict[tuple[int, str], Any] = {}  # file systems, by process and what stands in front of the path
_making = threading.Lock()
_said: dict[str, float] = {}  # by place: when it was said last that it can't be reached
_SAY_EVERY_S = 30.0


class Patience:
    """For how long something is tried again: so many seconds from the last success on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Something succeeded."""
        self._until = time.monotonic() + self._seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._until - time.monotonic()


class Client:
    """One place in an object store. ``patience``: seconds, see :class:`Patience`. Threads may share one."""

    def __init__(self, url: Url, patience: float = PATIENCE_S) -> None:
        self.url = url
        self._patience = patience
        self._fs = _file_system(url)
        self.root: str = str(self._fs._strip_protocol(str(url))).rstrip("/")
        self.is_s3 = url.protocol in _S3

    def hasty(self) -> Client:
        """Return one for where somebody waits."""
        return Client(self.url, min(self._patience, HASTY_S))

    def patience(self) -> Patience:
        """Return a new patience, for several calls that belong together."""
        return Patience(self._patience)

    # -- calls ------------------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, nbytes: int = 0, patience: Patience | None = None, **kwargs: Any) -> Any:
        """Call a method of the file system; again, as long as the patience lasts, if what went wrong may pass."""
        timeout = _CALL_S + nbytes / _SLOWEST
        return self.again(lambda: self._once(name, args, kwargs, timeout), patience or self.patience())

    def again(self, act: Callable[[], T], patience: Patience) -> T:
        """Do something, and do it again as long as the patience lasts, if what went wrong may pass."""
        pause = _PAUSE_S
        while True:
            try:
                found = act()
                patience.renew()
                return found
            except Exception as error:
                if not may_pass(error) or patience.left() < pause:
                    told = as_python_has_it(error)
                    if told is error:
                        raise
                    raise told from error
                self._say(error)
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _MAX_PAUSE_S)

    def _say(self, error: Exception) -> None:
        """Say that something is tried again, but not too often: several threads may be at it, again and again."""
        now = time.monotonic()
        if now - _said.get(str(self.url), -_SAY_EVERY_S) >= _SAY_EVERY_S:
            _said[str(self.url)] = now
            _LOG.info("%s: %s; trying again for a while.", self.url, in_words(error))

    def _once(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float) -> Any:
        if not self._fs.async_impl:
            return getattr(self._fs, name)(*args, **kwargs)

        async def bounded() -> Any:
            return await asyncio.wait_for(getattr(self._fs, f"_{name}")(*args, **kwargs), timeout)

        return asyncio.run_coroutine_threadsafe(bounded(), self._fs.loop).result()

    # -- objects ----------------------------------------------------------------------------------------------------

    def at(self, name: str) -> str:
        """Return where something is, as the file system wants to hear it."""
        return f"{self.root}/{name}"

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object, or some bytes of it. Raises ``FileNotFoundError``."""
        if start is not None and start == end:
            return b""
        nbytes = (end or 0) - (start or 0)
        found: bytes = self.call("cat_file", self.at(name), start=start, end=end, nbytes=max(0, nbytes))
        return found

    def put(self, name: str, data: bytes) -> str:
        """Write an object, whatever was there; return its edition, where the store tells."""
        return _edition(self.call("pipe_file", self.at(name), data, nbytes=len(data)))

    def create(self, name: str, data: bytes) -> None:
        """Write an object that is not there yet. Raises ``FileExistsError``, but not for one with these very bytes: it is ours."""
        try:
            self.call("pipe_file", self.at(name), data, mode="create", nbytes=len(data))
        except Exception as error:
            if not is_refused(error):
                raise
            with contextlib.suppress(FileNotFoundError):
                if self.read(name) == data:
                    return
            raise FileExistsError(errno.EEXIST, "it is there already", str(self.url / name)) from error

    def replace(self, name: str, data: bytes, edition: str) -> str:
        """Write an object in the place of one that was looked at; return its edition. Raises ``FileExistsError`` if that has
        changed meanwhile, ``FileNotFoundError`` if it is gone. Where there are no editions, it is overwritten."""
        if not self.is_s3 or not edition:
            return self.put(name, data)
        try:
            return _edition(self.call("pipe_file", self.at(name), data, IfMatch=edition))
        except OSError as error:
            if error.errno == errno.ENOSYS:
                return self.put(name, data)
            if not is_refused(error):
                raise
            raise FileExistsError(errno.EEXIST, "it has changed meanwhile", str(self.url / name)) from error

    def opened_for_writing(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Open an object to be written as a stream."""
        opened: contextlib.AbstractContextManager[Any] = self._fs.open(self.at(name), "wb")
        return opened

    def edition(self, name: str) -> str:
        """Return what changes with the object, where the store has such a thing."""
        return _edition(self.call("info", self.at(name)))

    def size(self, name: str) -> int:
        """Return the size of an object. Raises ``FileNotFoundError``."""
        return int(self.call("info", self.at(name))["size"])

    def exists(self, name: str) -> bool:
        """Whether an object is there."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def listed(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """Return what is in a folder, by name; nothing if that is not there."""
        place = self.at(folder) if folder else self.root
        try:
            found = self.call("ls", place, detail=True)
        except FileNotFoundError:
            return {}
        own = place.strip("/")
        rows = {row["name"].rstrip("/").rpartition("/")[2]: row for row in found if row["name"].strip("/") != own}
        return {name: row for name, row in rows.items() if name}

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.call("rm_file", self.at(name))

    def make_folder(self, folder: str = "") -> None:
        """Make a folder, where the store has such things."""
        if not self.is_s3:
            self.call("makedirs", self.at(folder) if folder else self.root, exist_ok=True)

    def look_for_bucket(self) -> None:
        """Raise ``FileNotFoundError`` if there is none: some stores would make one, and in none that is there is anything."""
        if self.is_s3:
            self.call("call_s3", "head_bucket", Bucket=self.root.partition("/")[0])

    def remove_folder(self, folder: str) -> None:
        """Remove everything in a folder: what is there, and what was being uploaded."""
        self.abort_uploads(f"{folder}/")
        for name in self.listed(folder):
            self.remove(f"{folder}/{name}")
        if not self.is_s3:
            with contextlib.suppress(OSError, NotImplementedError):
                self.call("rmdir", self.at(folder))

    def s3(self, method: str, name: str, patience: Patience | None = None, **kwargs: Any) -> Any:
        """Call a method of the S3 interface for an object."""
        bucket, _, key = self.at(name).partition("/")
        nbytes = len(kwargs.get("Body", b""))
        return self.call("call_s3", method, Bucket=bucket, Key=key, nbytes=nbytes, patience=patience, **kwargs)

    def abort_uploads(self, prefix: str) -> None:
        """Have the store forget parts of what was never finished. Others would be paid for."""
        if not self.is_s3:
            return
        bucket, _, key = self.at(prefix).partition("/")
        found = self.call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key)
        for upload in found.get("Uploads") or []:
            if str(upload["Key"]).startswith(key):
                with contextlib.suppress(FileNotFoundError):
                    kwargs = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self.call("call_s3", "abort_multipart_upload", **kwargs)


def _edition(answer: Any) -> str:
    return str(answer.get("ETag") or "") if isinstance(answer, dict) else ""


def _file_system(url: Url) -> Any:
    """Return fsspec's file system of a URL, one per process and host."""
    key = os.getpid(), url.text.rpartition("://")[0] + "://" + url.text.partition("://")[2].partition("/")[0]
    with _making:
        if key not in _known:
            try:
                _known[key] = _connect(url)
            except (ImportError, ValueError) as error:
                extra = "resilience-sdk[s3]" if url.protocol in _S3 else "resilience-sdk[fsspec]"
                raise CheckpointError(
                    f"{url} can't be opened: {error}. Nothing was written. Checkpoints in object stores need fsspec and what it "
                    f"knows this kind of store by: pip install '{extra}'."
                ) from error
    return _known[key]


def _connect(url: Url) -> Any:
    import fsspec  # noqa: PLC0415 - only where a URL is given; no typing is to be had of it

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if url.protocol in _S3:
        given = fsspec.config.conf.get(url.protocol, {}).get("config_kwargs", {})
        ours = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 1}}
        options["config_kwargs"] = {**ours, **given}
    made, _ = fsspec.core.url_to_fs(str(url), **options)
    if url.protocol in _S3:
        made.retries = 1  # we count them ourselves
    return made


def may_pass(error: BaseException) -> bool:
    """Whether it may help to try again. Pure."""
    if isinstance(error, (FileExistsError, FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)):
        return False
    if isinstance(error, OSError):
        return error.errno not in _FOR_GOOD
    # By name: those of botocore and aiohttp, which need not be there.
    return any(kind.__name__ in _PASSING for kind in type(error).__mro__)


def is_refused(error: BaseException) -> bool:
    """Whether a store would not write because its condition did not hold. Pure."""
    if isinstance(error, FileExistsError):
        return True
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return isinstance(response, dict) and str(response.get("Error", {}).get("Code")) in _REFUSED


def as_python_has_it(error: Exception) -> Exception:
    """Return an error of a library that need not be there as an ``OSError`` of the kind that it is. Pure."""
    if isinstance(error, (OSError, CheckpointError)):
        return error
    if "Credentials" in type(error).__name__:
        return PermissionError(errno.EACCES, in_words(error))
    if may_pass(error):
        return ConnectionError(errno.EIO, in_words(error))
    return OSError(errno.EINVAL, f"{type(error).__name__}: {in_words(error)}")


def in_words(error: BaseException) -> str:
    """Return what went wrong, for people."""
    text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return f"{text.rstrip('.') or type(error).__name__}"


def refused(url: Url, error: Exception) -> CheckpointError:
    """Return what is said before step 0 where a place can't be used."""
    if isinstance(error, PermissionError):
        advice = (
            "Look at the key and its rights. Environment and configuration files that fsspec reads (for S3: AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_ENDPOINT_URL) have to be there where the job is started."
        )
    elif isinstance(error, FileNotFoundError):
        advice = "Make it first (a bucket is never made by us), or give another one."
    elif may_pass(error):
        advice = "Look whether the server is up, and at the address (for S3: AWS_ENDPOINT_URL)."
    else:
        advice = "Give a place that can be written to."
    return CheckpointError(
        f"{url} can't be used for checkpoints: {in_words(error)} ({socket.gethostname()}). Nothing was written. {advice}"
    )
