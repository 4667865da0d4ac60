"""A fleet in a process of its own: awaited, stopped, reported about when it fails; and the fleet file."""

import sys
from collections import Counter
from pathlib import Path

import click
import pytest

from benchmarks.http_replay.fleet import (
    FleetFailed,
    FleetProcess,
    fetch,
    transfer_policy,
    up_command,
    write_fleet_file,
)
from benchmarks.http_replay.synthesis import BLOCK_WORDS, scaled_tokens
from benchmarks.http_replay.trace import TRACE_BLOCK_TOKENS, read_sample
from benchmarks.replay_sample import FLEET, MODES, SAMPLE, parse_modes
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement, Role
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_engines import MockEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_workers import mock_engine
from kvrouter.settings.problems import read_document
from tests.testing.processes import free_ports

READY_SERVER = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(9)
        self.send_response(200); self.end_headers(); self.wfile.write(self.path.encode())
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
def stop(*_):
    print("asked to stop", flush=True)
    STOP
signal.signal(signal.SIGTERM, stop)
server.serve_forever()
"""


def fleet_process(folder: Path, stop: str, *, stop_limit_s: float = 10.0) -> FleetProcess:
    port = free_ports(1)
    program = READY_SERVER.replace("STOP", stop)
    return FleetProcess(
        [sys.executable, "-c", program, str(port)],
        base_url=f"http://127.0.0.1:{port}",
        log_file=folder / "fleet.log",
        stop_limit_s=stop_limit_s,
    )


def test_a_fleet_is_ready_in_its_context_and_stopped_after(tmp_path: Path) -> None:
    with fleet_process(tmp_path, "sys.exit(0)") as fleet:
        assert fetch(f"{fleet.base_url}/metrics") == b"/metrics"
    with pytest.raises(OSError, match="refused"):
        fetch(f"{fleet.base_url}/metrics")


def test_a_fleet_that_ends_with_an_error_is_reported_with_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(FleetFailed, match=r"exited with status 3\n(.|\n)*asked to stop"),
        fleet_process(tmp_path, "sys.exit(3)"),
    ):
        pass


def test_a_fleet_that_does_not_stop_is_killed_and_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(FleetFailed, match=r"did not stop within 0\.3 s"),
        fleet_process(tmp_path, "pass", stop_limit_s=0.3) as fleet,
    ):
        pass
    with pytest.raises(OSError, match="refused"):
        fetch(f"{fleet.base_url}/ready")


def test_a_fleet_dying_in_its_context_is_reported_as_fleet_failed(tmp_path: Path) -> None:
    with (
        pytest.raises(FleetFailed, match="exited with status 9"),
        fleet_process(tmp_path, "sys.exit(0)") as fleet,
    ):
        fetch(f"{fleet.base_url}/die")


def test_an_error_in_the_context_is_not_hidden_by_a_failed_fleet(tmp_path: Path) -> None:
    with pytest.raises(KeyError), fleet_process(tmp_path, "sys.exit(3)"):
        raise KeyError


def test_a_fleet_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    program = "import sys; print('no such model', flush=True); sys.exit(2)"
    process = FleetProcess(
        [sys.executable, "-c", program],
        base_url=f"http://127.0.0.1:{free_ports(1)}",
        log_file=tmp_path / "fleet.log",
    )
    with pytest.raises(FleetFailed, match=r"status 2 before it was ready\nno such model"), process:
        pass


def test_a_fleet_that_is_never_ready_fails_after_the_limit(tmp_path: Path) -> None:
    process = FleetProcess(
        [sys.executable, "-c", "import signal; signal.pause()"],
        base_url=f"http://127.0.0.1:{free_ports(1)}",
        log_file=tmp_path / "fleet.log",
        ready_limit_s=0.3,
    )
    with pytest.raises(FleetFailed, match=r"was not ready within 0\.3 s"), process:
        pass


def test_the_fleet_command_is_kvrouter_up_with_its_options() -> None:
    command = up_command(Path("fleet.yaml"), router_mode=RouterMode.ROUND_ROBIN, port=8123)
    assert command[1:] == [
        *("-m", "kvrouter.cli", "up", "--fleet", "fleet.yaml"),
        *("--router-mode", "round-robin", "--http-port", "8123"),
    ]


@pytest.fixture(scope="module")
def fleet() -> FleetFile:
    return load_fleet(read_document(FLEET)).fleet


def test_the_fleet_has_two_workers_per_role_and_zone_and_requires_zone(fleet: FleetFile) -> None:
    workers = Counter[tuple[Role, str]]()
    for group in fleet.workers:
        workers[group.role, group.domains["zone"]] += group.n_workers
    assert workers == {(role, zone): 2 for role in (Role.PREFILL, Role.DECODE) for zone in ("a", "b")}
    policy = transfer_policy(fleet)
    assert (policy.domain, policy.enforcement) == ("zone", Enforcement.REQUIRED)


def test_scaled_engines_time_prompts_like_the_traces_tokens(fleet: FleetFile) -> None:
    scale = TRACE_BLOCK_TOKENS // BLOCK_WORDS
    usual = MockEngineSpec()
    for engine in map(mock_engine, fleet.workers):
        assert engine.max_num_batched_tokens * scale == usual.max_num_batched_tokens
        assert engine.kv_bytes_per_token == usual.kv_bytes_per_token * scale
        assert engine.timing.prefill_linear == pytest.approx(usual.timing.prefill_linear * scale)
        assert engine.timing.prefill_quadratic == pytest.approx(
            usual.timing.prefill_quadratic * scale**2, rel=1e-5
        )
        for name in ("prefill_base", "decode_quadratic", "decode_linear", "decode_base", "decode_min"):
            assert getattr(engine.timing, name) == getattr(usual.timing, name)


def test_every_row_fits_one_worker_and_the_sample_exceeds_a_role(fleet: FleetFile) -> None:
    rows = read_sample(SAMPLE)
    model = fleet.models[0]
    blocks = mock_engine(fleet.workers[0]).total_kv_blocks
    longest_tokens = max(scaled_tokens(row.input_tokens) + scaled_tokens(row.output_tokens) for row in rows)
    assert longest_tokens < model.mock_context_length
    assert longest_tokens / model.mock_block_size < blocks
    different_tokens = BLOCK_WORDS * len({block for row in rows for block in row.full_block_ids})
    assert different_tokens / model.mock_block_size > 4 * blocks


def test_a_fleet_file_is_read_back_as_written(fleet: FleetFile, tmp_path: Path) -> None:
    faster = fleet.model_copy(update={"speedup": 7.5})
    write_fleet_file(faster, tmp_path / "fleet.yaml")
    assert load_fleet(read_document(tmp_path / "fleet.yaml")).fleet == faster


def test_a_fleet_without_a_transfer_policy_is_refused(fleet: FleetFile) -> None:
    with pytest.raises(ConfigError, match="transfer policy"):
        transfer_policy(fleet.model_copy(update={"kv_transfer": None}))


def parse(text: str) -> tuple[RouterMode, ...]:
    command = click.Command("replay")
    return parse_modes(click.Context(command), click.Option(["--modes"]), text)


def test_modes_are_parsed_as_a_list_and_unknown_ones_named() -> None:
    assert parse("random, kv,kv") == (RouterMode.RANDOM, RouterMode.KV)
    assert parse(MODES) == tuple(RouterMode)
    with pytest.raises(click.BadParameter, match="'fastest'"):
        parse("kv,fastest")
