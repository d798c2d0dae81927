"""A real Kubernetes API server for the tests: with RBAC and a token, on loopback, in its own folder, and gone with the test.

The programs are built once, by ``build_apiserver.sh``, into a cache folder outside the clone; ``make test-kubernetes`` does it.
There is no kubelet: tests set the phases of pods through the status API. The real scheduler and controllers can run beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import MARK
from tests.jobs import wait_for
from tests.ports import free_ports

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

TOKEN = "the-token-of-the-admin"
START_S = 90.0


def cache() -> Path:
    """Return where the built programs are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = os.environ.get("RESILIENCE_CACHE") or f"{home}/resilience"
    return Path(root) / "kube-apiserver-1.20.2"


def missing() -> str:
    """Return what these tests need and this machine has not; empty where everything is here."""
    try:
        import kubernetes  # noqa: F401
    except ImportError:
        return "the package kubernetes (pip install 'resilience-sdk[kubernetes]')"
    absent = [name for name in ("kube-apiserver", "etcd") if not os.access(cache() / name, os.X_OK)]
    if absent:
        return f"{' and '.join(absent)} in {cache()} (make test-kubernetes builds them)"
    return "" if shutil.which("openssl") else "openssl"


class ApiServer:
    """etcd and an API server. ``stop`` and ``start`` keep what is stored; ``close`` removes everything."""

    def __init__(self, folder: Path | None = None) -> None:
        self._owned = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="kube-"))
        self._port, self._etcd, self._peer = free_ports(3)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[ApiClient] = []
        self.token = TOKEN
        self.url = f"https://127.0.0.1:{self._port}"
        self._prepare()

    def _prepare(self) -> None:
        key, public = self.folder / "sa.key", self.folder / "sa.pub"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        subprocess.run(["openssl", "rsa", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(f'{TOKEN},admin,admin-uid,"system:masters"\n')

    # -- coming and going -------------------------------------------------------------------------------------------

    def start(self) -> ApiServer:
        """Start it, and wait until it is ready."""
        etcd, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd, self._peer))
        if "etcd" not in self._running:
            self._run(
                "etcd",
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls={etcd}",
                f"--advertise-client-urls={etcd}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
            )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self.folder / 'certs'}",
            f"--service-account-key-file={self.folder / 'sa.pub'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            # There is no controller that would make the default account's token, and a pod without one is refused.
            "--disable-admission-plugins=ServiceAccount",
        )
        wait_for(self._ready, f"the API server to be ready (see {self.folder})", START_S)
        return self

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the API server; what it has stored stays in etcd, which goes on."""
        self._end("kube-apiserver", number)

    def restart(self) -> None:
        """End it and start it again at the same place."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End everything, and leave nothing behind."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        for name in reversed(list(self._running)):
            self._end(name, signal.SIGKILL)
        if self._owned:
            shutil.rmtree(self.folder)

    def start_scheduler(self) -> None:
        """Start the real scheduler."""
        self._run("kube-scheduler", f"--kubeconfig={self._admin()}", "--leader-elect=false", *self._without_ports())

    def start_controllers(self, names: str) -> None:
        """Start the real controller manager with some of its controllers, separated by commas."""
        more = [f"--controllers={names}", "--leader-elect=false", "--use-service-account-credentials=false"]
        self._run("kube-controller-manager", f"--kubeconfig={self._admin()}", *more, *self._without_ports())

    def end(self, name: str) -> None:
        """End one of the programs beside the API server."""
        self._end(name, signal.SIGKILL)

    @property
    def pid(self) -> int:
        """The API server's."""
        return self._running["kube-apiserver"].pid

    def _without_ports(self) -> list[str]:
        return ["--port=0", "--secure-port=0", f"--cert-dir={self.folder / 'certs'}"]

    def _admin(self) -> Path:
        return self.kubeconfig(self.folder / "admin.kubeconfig")

    def _run(self, name: str, *options: str) -> None:
        program = cache() / name
        assert os.access(program, os.X_OK), f"there is no {program}: make test-kubernetes builds it"
        # Not as one of the test's own: it may be started anew in one test and be there for the next.
        env = {key: value for key, value in os.environ.items() if key != MARK}
        with open(self.folder / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                [program, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=env
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            process.send_signal(number)
            process.wait(30)

    def _ready(self) -> bool:
        for name, process in self._running.items():
            if process.poll() is not None:
                tail = (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"{name} ended with {process.returncode}:\n{tail}")
        try:
            with self._ask("/readyz") as answer:
                return bool(answer.read() == b"ok")
        except (urllib.error.URLError, OSError):
            return False

    # -- its users --------------------------------------------------------------------------------------------------

    @property
    def authority(self) -> Path:
        """Return the certificates by which it is known; it makes them when it starts for the first time."""
        return self.folder / "certs" / "apiserver.crt"

    def kubeconfig(self, path: Path, token: str = "", url: str = "") -> Path:
        """Write a kubeconfig that leads here, as the admin or with another token, perhaps by way of another address."""
        cluster = {"server": url or self.url, "certificate-authority": str(self.authority)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token or self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(document))
        path.chmod(0o600)
        return path

    def account_token(self, namespace: str, name: str) -> str:
        """Return a token of a service account, as a pod of it would have."""
        body = json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}).encode()
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        with self._ask(path, body) as answer:
            return str(json.loads(answer.read())["status"]["token"])

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", headers=headers, data=body)
        context = ssl.create_default_context(cafile=str(self.authority))
        return urllib.request.urlopen(request, timeout=10, context=context)

    def client(self, user: str | None = None, url: str = "") -> ApiClient:
        """Return a client of the official kind; ``user`` is impersonated (``system:serviceaccount:NAMESPACE:NAME``)."""
        from kubernetes.client import ApiClient, Configuration

        configuration = Configuration()
        configuration.connection_pool_maxsize = 32  # every kind that is watched holds one
        configuration.host = url or self.url
        configuration.ssl_ca_cert = str(self.authority)
        configuration.api_key = {"authorization": f"Bearer {self.token}"}
        made = ApiClient(configuration)
        for name, value in impersonation(user).items():
            made.set_default_header(name, value)
        self._clients.append(made)
        return made


def impersonation(user: str | None) -> dict[str, str]:
    """Return the headers by which an admin acts as somebody else, with the groups that a service account has."""
    if not user:
        return {}
    headers = {"Impersonate-User": user}
    if user.startswith("system:serviceaccount:"):
        headers["Impersonate-Group"] = "system:serviceaccounts"
    return headers
