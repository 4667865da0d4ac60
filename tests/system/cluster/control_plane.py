"""A real Kubernetes control plane on this machine: etcd, API server, scheduler, controllers, KWOK's nodes.

Every server listens on loopback, writes its log to the plane's folder and trusts the tests' own authority.
RBAC is on and service accounts have tokens, as in any cluster. No container ever runs.
"""

import json
import os
import shutil
import ssl
import subprocess
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import yaml

from tests.system.cluster.certificates import LOOPBACK, Authority, signing_key_pem
from tests.system.cluster.install import server
from tests.system.cluster.together import Together
from tests.testing.processes import free_ports

READY_WITHIN_S = 240.0
"""Far above what a busy machine needs: alone, the plane is ready in seconds."""

APISERVER_STARTS = 3
"""It gives up when its own admission is not ready within ten seconds, which a busy machine may need."""

API_SERVER = "kube-apiserver"
LOOK_EVERY_S = 0.05
LOG_TAIL_CHARS = 2000
KUBECTL_WITHIN_S = 300.0
APPEARS_WITHIN_S = 120.0
WAITING = ("wait", "rollout")
NOT_YET = ("(NotFound)", "no matching resources found", "accessor error")
"""What these say of an object that is not there yet, and of one that nobody has written a condition into."""

MODIFIED = "the object has been modified"
"""What ``replace`` says when another wrote the object between its reading and its writing."""

ADMINISTRATORS = "system:masters"
_POLICIES = "admissionregistration.k8s.io/v1/mutatingadmissionpolicies=false"
_NO_POLICIES = f"--runtime-config={_POLICIES},{_POLICIES.replace('policies', 'policybindings')}"
AS_1_35 = ("--feature-gates=MutatingAdmissionPolicy=false", _NO_POLICIES)
"""Flags of an API server that copies labels of bindings, and has no policies to write them there."""

AS_BEFORE_1_35 = (
    "--feature-gates=PodTopologyLabelsAdmission=false,MutatingAdmissionPolicy=false",
    _NO_POLICIES,
)
"""Flags of an API server that has neither of :class:`Features`, as older ones."""

KWOK_NODE = "kvrouter.test/kwok"
"""The annotation of nodes that KWOK plays."""


class KubectlError(Exception):
    """kubectl ended with an error; its text is what a user would read."""

    def __init__(self, arguments: tuple[str, ...], said: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: {said}")
        self.said = said


@dataclass(frozen=True)
class Features:
    """What this plane has, that not every cluster in use has."""

    mutating_admission_policy: bool
    """``MutatingAdmissionPolicy`` is served in ``admissionregistration.k8s.io/v1``."""

    copies_binding_labels: bool
    """A binding's labels come to its pod, and those of the node's zone and region with them."""


class ControlPlane:
    """One control plane. Its folder holds its keys, its store, its logs and the clients' kubeconfigs.

    ``flags`` go to the API server, next to its others.
    """

    def __init__(self, folder: Path, *, flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self._flags = flags
        self.authority = Authority()
        self._together = Together()
        self._port = free_ports(4)
        self._etcd_url = f"http://{LOOPBACK}:{self._port + 1}"
        self._ports = {"kube-scheduler": self._port + 2, "kube-controller-manager": self._port + 3}
        self._pids: dict[str, int] = {}

    @property
    def url(self) -> str:
        """Where the API server is."""
        return f"https://{LOOPBACK}:{self._port}"

    @property
    def admin(self) -> Path:
        """The kubeconfig of one who may do everything."""
        return self.kubeconfig("admin", groups=[ADMINISTRATORS])

    def start(self) -> None:
        """Start etcd and the API server; returns once they serve.

        Raises ChildProcessError when one ends meanwhile and TimeoutError when one is not ready in time, each
        with the end of that server's log; none of them is left then.
        """
        with self._all_or_none():
            self._start_store()

    @property
    def is_complete(self) -> bool:
        """Whether there is more than etcd and the API server: pods are scheduled, and nodes run them."""
        return "kwok" in self._pids

    def complete(self) -> None:
        """Start the scheduler, the controllers and KWOK; returns once they are ready. Raises as above."""
        with self._all_or_none():
            for name in self._ports:
                self._start(name, *self._client_flags(name), *self._flags_of(name))
            self._start("kwok", *self._kwok_flags())
            for name, port in self._ports.items():
                self._until_ready(name, f"https://{LOOPBACK}:{port}/healthz")

    def kill(self) -> None:
        """End every server at once; idempotent."""
        self._together.kill()

    def kill_api_server(self) -> None:
        """Take the API server away, as by ``kill -9``; all that it stored stays."""
        self._together.kill_one(API_SERVER)

    def bring_back_api_server(self) -> None:
        """Start it again, on its port and with its store; returns once it is ready."""
        self._start_apiserver()

    def rss_bytes(self) -> dict[str, int]:
        """The memory that each server holds now; of those that run."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        running = {name: pid for name, pid in self._pids.items() if name not in self._together.ended()}
        statm = {name: Path(f"/proc/{pid}/statm").read_text() for name, pid in running.items()}
        return {name: int(text.split()[1]) * page_bytes for name, text in statm.items()}

    def kubeconfig(self, user: str, *, groups: Iterable[str] = ()) -> Path:
        """The kubeconfig of a user who has a certificate; RBAC says what it may do. Users differ by name."""
        path = self.folder / "users" / f"{user}.yaml"
        if not path.exists():
            certificate, key = self.authority.for_user(user, groups).write(path.parent, user)
            self._write_kubeconfig(path, {"client-certificate": str(certificate), "client-key": str(key)})
        return path

    def account_kubeconfig(self, namespace: str, name: str) -> Path:
        """The kubeconfig of a service account that exists, with a token as its pods would get one."""
        path = self.folder / "users" / f"{namespace}.{name}.yaml"
        token = self.kubectl("create", "token", name, "--namespace", namespace)
        self._write_kubeconfig(path, {"token": token.strip()})
        return path

    def kubectl(self, *arguments: str, stdin: str = "", kubeconfig: Path | None = None) -> str:
        """What kubectl wrote; with the administrator's rights unless stated otherwise.

        ``wait`` and ``rollout status`` wait for what is not there yet, too, which kubectl alone does not. But
        a set, as ``pods --all``, is what is there with the first of it: who needs a Deployment's pods waits
        for its rollout. ``replace`` is said again when another wrote the object between kubectl's own reading
        and writing, as an operator does that is at work on it. Raises KubectlError when it ends with an
        error.
        """
        deadline = time.monotonic() + APPEARS_WITHIN_S
        while True:
            try:
                return self._kubectl(*arguments, stdin=stdin, kubeconfig=kubeconfig).stdout
            except KubectlError as error:
                is_to_come = arguments[0] in WAITING and any(words in error.said for words in NOT_YET)
                came_between = arguments[0] == "replace" and MODIFIED in error.said
                if not (is_to_come or came_between) or time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_EVERY_S)

    def until_granted(self, user: str, verb: str, what: str, namespace: str) -> None:
        """Return once RBAC lets a user do this: a binding is in force a moment after it was written."""
        self._until_done("auth", "can-i", verb, what, "--as", user, "--namespace", namespace)

    def until_served(self, *kinds: str) -> None:
        """Return once these kinds can be listed: an established definition is served a moment later."""
        self._until_done("get", ",".join(kinds), "--namespace", "default", "--output", "name")

    def _until_done(self, *arguments: str) -> None:
        """Run kubectl until it ends well; raise KubectlError when it has not for APPEARS_WITHIN_S."""
        deadline = time.monotonic() + APPEARS_WITHIN_S
        while True:
            try:
                self._kubectl(*arguments)
            except KubectlError:
                if time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(LOOK_EVERY_S)

    def apply(self, *manifests: Mapping[str, object]) -> list[str]:
        """Create these objects, or change them: server-side, as the field manager ``kubectl``.

        Answers with the warnings that it printed, those of several lines as one each.
        """
        stored = yaml.safe_dump_all(manifests)
        done = self._kubectl("apply", "--server-side", "--filename", "-", stdin=stored)
        printed = done.stderr.replace("\nWarning: … ", " ")
        return [line for line in printed.splitlines() if line.startswith("Warning: ")]

    def read(self, *arguments: str) -> dict[str, Any]:
        """What ``kubectl get ARGUMENTS`` answers, as JSON: an object, or a list of them in ``items``."""
        answer: dict[str, Any] = json.loads(self.kubectl("get", "--output", "json", *arguments))
        return answer

    @contextmanager
    def deleting(self, *arguments: str) -> Iterator[None]:
        """Run ``kubectl delete ARGUMENTS`` at the end.

        What fails before is what is reported, whatever becomes of this.
        """
        try:
            yield
        except BaseException:
            with suppress(KubectlError, subprocess.TimeoutExpired):
                self.kubectl("delete", *arguments)
            raise
        self.kubectl("delete", *arguments)

    def add_node(self, name: str, labels: Mapping[str, str]) -> None:
        """Add a node that KWOK plays: ready, with 64 CPUs, 8 GPUs and room for 110 pods."""
        metadata = {"name": name, "labels": dict(labels), "annotations": {KWOK_NODE: "yes"}}
        self.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata})

    def lead_service(self, namespace: str, name: str) -> None:
        """Make a Service that leads the API server's own calls, such as those of webhooks, to loopback.

        They keep the port that they name, and expect the certificate of ``NAME.NAMESPACE.svc``.
        """
        spec = {"type": "ExternalName", "externalName": "localhost"}
        metadata = {"namespace": namespace, "name": name}
        self.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})

    def features(self) -> Features:
        """Which of the features in :class:`Features` are on."""
        served = self.kubectl("get", "--raw", "/apis/admissionregistration.k8s.io/v1")
        gates = self.kubectl("get", "--raw", "/metrics").splitlines()

        def is_on(gate: str) -> bool:
            reported = f'kubernetes_feature_enabled{{name="{gate}",'
            return any(line.startswith(reported) and line.endswith(" 1") for line in gates)

        return Features(
            mutating_admission_policy='"mutatingadmissionpolicies"' in served
            and is_on("MutatingAdmissionPolicy"),
            copies_binding_labels=is_on("PodTopologyLabelsAdmission"),
        )

    def logs(self) -> list[Path]:
        """One file for each server."""
        return sorted((self.folder / "logs").glob("*.log"))

    def keep_only_logs(self) -> None:
        """Remove the rest of the folder; only once the servers have ended."""
        for path in self.folder.iterdir():
            if path.name != "logs":
                shutil.rmtree(path)

    def _kubectl(
        self, *arguments: str, stdin: str = "", kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        environ = {
            "HOME": str(self.folder),
            "KUBECACHEDIR": str(self.folder / "kubectl"),
            "KUBECONFIG": str(kubeconfig or self.admin),
        }
        program = Path(sysconfig.get_path("scripts")) / "kubectl"
        done = subprocess.run(
            [program, *arguments],
            check=False,
            input=stdin,
            env=environ,
            capture_output=True,
            text=True,
            timeout=KUBECTL_WITHIN_S,
        )
        if done.returncode:
            raise KubectlError(arguments, done.stderr.strip())
        return done

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def _start_store(self) -> None:
        for name in ("keys", "logs", "users", "etcd"):
            (self.folder / name).mkdir()
        keys = self.folder / "keys"
        self.authority.for_server().write(keys, "server")
        (keys / "ca.crt").write_bytes(self.authority.certificate_pem)
        (keys / "accounts.key").write_bytes(signing_key_pem())
        self._start("etcd", *self._etcd_flags())
        self._start_apiserver()

    def _start(self, name: str, *flags: str) -> None:
        log = self.folder / "logs" / f"{name}.log"
        environ = {"HOME": str(self.folder), "PATH": os.environ["PATH"]}
        self._pids[name] = self._together.start([server(name), *flags], log=log, environ=environ)

    def _start_apiserver(self) -> None:
        for starts_left in reversed(range(APISERVER_STARTS)):
            self._start(API_SERVER, *self._apiserver_flags())
            try:
                self._until_ready(API_SERVER, f"{self.url}/readyz")
            except ChildProcessError:
                if not starts_left:
                    raise
            else:
                return

    def _until_ready(self, name: str, url: str) -> None:
        trust = ssl.create_default_context(cafile=self.folder / "keys" / "ca.crt")
        deadline = time.monotonic() + READY_WITHIN_S
        while not _answers(url, trust):
            for ended, status in self._together.ended().items():
                raise ChildProcessError(f"{ended} ended with {status}: {self._log_tail(ended)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is not ready in {READY_WITHIN_S} s: {self._log_tail(name)}")
            time.sleep(LOOK_EVERY_S)

    def _log_tail(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")[-LOG_TAIL_CHARS:]

    def _write_kubeconfig(self, path: Path, user: Mapping[str, str]) -> None:
        authority = str(self.folder / "keys" / "ca.crt")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {"name": "test", "cluster": {"server": self.url, "certificate-authority": authority}}
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": dict(user)}],
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config))

    def _key_flags(self) -> list[str]:
        keys = self.folder / "keys"
        return [f"--tls-cert-file={keys / 'server.crt'}", f"--tls-private-key-file={keys / 'server.key'}"]

    def _etcd_flags(self) -> list[str]:
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls=http://{LOOPBACK}:0",
            "--unsafe-no-fsync",
        ]

    def _apiserver_flags(self) -> list[str]:
        keys = self.folder / "keys"
        return [
            f"--etcd-servers={self._etcd_url}",
            f"--bind-address={LOOPBACK}",
            f"--secure-port={self._port}",
            *self._key_flags(),
            f"--client-ca-file={keys / 'ca.crt'}",
            # The scheduler and the controllers look for this setting, though no proxy is here.
            f"--requestheader-client-ca-file={keys / 'ca.crt'}",
            "--requestheader-allowed-names=no-such-proxy",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={keys / 'accounts.key'}",
            f"--service-account-key-file={keys / 'accounts.key'}",
            "--service-cluster-ip-range=10.0.0.0/16",
            # A loopback address may be nobody's endpoint.
            "--endpoint-reconciler-type=none",
            *self._flags,
        ]

    def _client_flags(self, name: str) -> list[str]:
        config = self.kubeconfig(f"system:{name}", groups=[ADMINISTRATORS])
        return [
            *(f"--{flag}={config}" for flag in _KUBECONFIG_FLAGS),
            f"--bind-address={LOOPBACK}",
            f"--secure-port={self._ports[name]}",
            *self._key_flags(),
            "--leader-elect=false",
        ]

    def _flags_of(self, name: str) -> list[str]:
        if name != "kube-controller-manager":
            return []
        keys = self.folder / "keys"
        return [
            f"--service-account-private-key-file={keys / 'accounts.key'}",
            f"--root-ca-file={keys / 'ca.crt'}",
            # Nodes stay ready without a heartbeat, however slow this machine is.
            "--node-monitor-grace-period=24h",
            "--horizontal-pod-autoscaler-sync-period=1s",
        ]

    def _kwok_flags(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig('kwok', groups=[ADMINISTRATORS])}",
            f"--config={Path(__file__).parent / 'kwok.yaml'}",
            f"--manage-nodes-with-annotation-selector={KWOK_NODE}=yes",
            "--cidr=10.1.0.0/16",
            "--node-ip=10.2.0.1",
        ]


_KUBECONFIG_FLAGS = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")


def _answers(url: str, trust: ssl.SSLContext) -> bool:
    try:
        with urlopen(url, context=trust, timeout=5.0) as response:
            return bool(response.status == 200)
    except (URLError, HTTPException, OSError):
        return False
