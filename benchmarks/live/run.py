"""One run of one trace: live, and then replayed."""

import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.frontend.processes import Server
from benchmarks.http_replay.fleet import FleetProcess
from benchmarks.live.client import Planned, plan, send
from benchmarks.live.compare import Choices, Latencies, cached_share, compare_choices, compare_latencies
from benchmarks.live.observe import Observed
from benchmarks.live.replayed import observe_replay, simulation_of
from benchmarks.measure import quantile
from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.recording.files import recording_files
from kvrouter.settings.problems import read_document
from kvrouter.sim.replay.simulation import check_room, size_of
from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.processes import free_ports


class Slice(msgspec.Struct, frozen=True):
    """The first ``rows`` of a trace, whose requests arrive ``speedup`` times as fast as in it, and at least
    ``apart_s`` one after the other.
    """

    name: str
    path: str
    rows: int
    speedup: float
    apart_s: float = 0.0


class Load(msgspec.Struct, frozen=True):
    """What the machine had to do during a run: shares of a core. ``server`` is router and engines in one
    process; ``late_ms`` is how late the client was at its p99.
    """

    server: float
    client: float
    late_ms: float
    slipped_s: float
    load_average: float


class Run(msgspec.Struct, frozen=True):
    """One run of one slice."""

    choices: Choices
    latencies: tuple[Latencies, ...]
    live_cached: float
    replay_cached: float
    load: Load
    lasted_s: float


def apart(rows: Iterable[TraceRequest], least_s: float) -> Iterator[TraceRequest]:
    """Yield the rows, each at least so long after the one before it. A trace does not say in which order
    requests of one time stamp are decided; live, the shortest body is read first.
    """
    earliest_s = 0.0
    for row in rows:
        at_s = max(row.at_s, earliest_s)
        yield row if at_s == row.at_s else replace(row, at_s=at_s)
        earliest_s = at_s + least_s


class Prepared:
    """A slice, ready to be sent: its rows and requests. Raises ConfigError for what cannot be replayed."""

    def __init__(self, of: Slice, fleet_path: Path) -> None:
        self.of = of
        self.fleet_path = fleet_path
        self.fleet: FleetFile = load_fleet(read_document(fleet_path)).fleet
        if self.fleet.speedup != 1.0:
            raise ConfigError("speedup: the engines run on the real clock here", param="speedup")
        rows = open_trace(Path(of.path), rows_max=of.rows)
        self.rows: Sequence[TraceRequest] = [*apart(rows, of.apart_s * of.speedup)]
        check_room(size_of(self.rows).longest, simulation_of(self.rows, self.fleet, speedup=of.speedup).fleet)
        self.requests: Sequence[Planned] = plan(
            self.rows, model=self.fleet.models[0].mock_name, speedup=of.speedup
        )

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(row.input_tokens for row in self.rows)

    def run(self) -> Run:
        """Send the slice through HTTP to a fresh fleet, and replay it. Raises FleetFailed, AnswerFailed."""
        with tempfile.TemporaryDirectory(prefix="kvrouter-live-") as folder:
            live, load, lasted_s = self._live(Path(folder))
        replay = observe_replay(self.rows, self.fleet, speedup=self.of.speedup)
        placer = simulation_of(self.rows, self.fleet, speedup=self.of.speedup).fleet.placer
        return Run(
            choices=compare_choices(live, replay, placer),
            latencies=tuple(compare_latencies(live, replay)),
            live_cached=cached_share(live, self.input_tokens),
            replay_cached=cached_share(replay, self.input_tokens),
            load=load,
            lasted_s=lasted_s,
        )

    def _live(self, folder: Path) -> tuple[Observed, Load, float]:
        port, out, record = free_ports(1), folder / "observed.json", folder / "recording"
        command = [sys.executable, "-m", "benchmarks.live.server"]
        command += ["--fleet", str(self.fleet_path), "--port", str(port)]
        command += ["--record", str(record), "--out", str(out)]
        url = f"http://127.0.0.1:{port}"
        with FleetProcess(command, base_url=url, log_file=folder / "log") as process:
            server = Server("live", process.pid, port)
            gc.collect()
            server_us, client_s, began_s = server.cpu_us(), time.process_time(), time.monotonic()
            late_s = asyncio.run(send(self.requests, port))
            lasted_s = time.monotonic() - began_s
            client_share = (time.process_time() - client_s) / lasted_s
            server_share = (server.cpu_us() - server_us) / 1e6 / lasted_s
        if not recording_files(record):
            raise RuntimeError(f"{record}: nothing was recorded")
        observed = msgspec.json.decode(out.read_bytes(), type=Observed)
        load = Load(
            server=server_share,
            client=client_share,
            late_ms=1e3 * quantile(late_s, 0.99),
            slipped_s=observed.slipped_s,
            load_average=os.getloadavg()[0],
        )
        return observed, load, lasted_s
