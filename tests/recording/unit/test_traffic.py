"""What is recorded of the fleet and of requests: workers as their cards describe them, legs and their KV."""

import gzip
from array import array
from pathlib import Path

import msgspec
import pytest

from kvrouter.core.constraints import RouterMode
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import (
    DpRank,
    Epoch,
    LeaseId,
    ModelName,
    RequestId,
    Slot,
    Taint,
    WorkerId,
    WorkerRank,
)
from kvrouter.core.requests import GenerateRequest, Leg, Sampling
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.journey import Shape
from kvrouter.kernel.placement.placement import Draw, Placement
from kvrouter.kernel.request_driver import Attempt
from kvrouter.kernel.routing.interface import Decision, Pick, RouteRequest
from kvrouter.recording.files import RecordingFolder, recording_files
from kvrouter.recording.recorder import Recorder
from kvrouter.recording.salt import Salt
from kvrouter.recording.schema import FleetChange, Worker
from kvrouter.router.traffic import NO_ORIGIN, TrafficRecorder

CARD = WorkerCard(
    worker_id=WorkerId(7),
    incarnation=Epoch(1),
    model=ModelName("m"),
    role=Role.DECODE,
    block_size=16,
    context_length=4096,
    address="tcp://secret-address:1",
    dp_size=2,
    engine="vllm 0.32.0",
    runtime_config=ModelRuntimeConfig(
        topology_domains={"zone": "a", "rack": "r7"},
        topology_levels=("zone", "rack"),
        kv_transfer_domain="zone",
        kv_transfer_enforcement=Enforcement.REQUIRED,
        taints=frozenset({Taint("gpu/h100")}),
        total_kv_blocks=512,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_bytes_per_token=99,
    ),
)


class Bench:
    """A recorder that writes nothing yet, and the workers that it knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = RecordingFolder(
            folder, recording="0000000a", file_bytes=1 << 20, total_bytes=1 << 24, started_s=0.0
        )
        self.recorder = Recorder(
            files,
            Salt.drawn(),
            recording="0000000a",
            version="1",
            began_s=0.0,
            started_s=0.0,
            on_lost=lambda why, error: pytest.fail(f"{why}: {error}"),
            on_stopped=lambda error: pytest.fail(repr(error)),
        )
        self.traffic = TrafficRecorder(self.recorder, clock=lambda: 1.0)

    def after(self, *changes: FleetChange) -> Worker:
        for change in changes:
            self.traffic.worker_changed(change, CARD)
        return self.recorder.workers["7"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_recorded_worker_has_sizes_domains_and_levels_but_no_address(
    bench: Bench,
) -> None:
    worker = bench.after(FleetChange.JOINED)
    assert worker == Worker(
        worker="7",
        model="m",
        role="decode",
        block_size=16,
        context_length=4096,
        dp_size=2,
        kv_blocks=512,
        kv_bytes_per_token=99,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        domains={"zone": "a", "rack": "r7"},
        levels=("zone", "rack"),
        taints=("dynamo.topology/rack=r7", "dynamo.topology/zone=a", "gpu/h100"),
        transfer_domain="zone",
        enforcement="required",
        engine="vllm 0.32.0",
    )
    assert b"secret" not in msgspec.json.encode(worker)


def test_card_update_leaves_the_recorded_liveness_unchanged(bench: Bench) -> None:
    assert not bench.after(FleetChange.JOINED, FleetChange.SILENT).alive
    assert not bench.after(FleetChange.CHANGED).alive
    assert bench.after(FleetChange.ANSWERS).alive
    assert bench.after(FleetChange.CHANGED).alive
    assert bench.after(FleetChange.SILENT, FleetChange.JOINED).alive


RANKS = [WorkerRank(WorkerId(worker), DpRank(0)) for worker in (7, 8)]


def pair() -> Placement:
    """40 tokens in blocks of 16, prefilled by worker 7; worker 8 is expected to have the first block."""
    request_id = RequestId("r")
    decode = Pick(Slot(1), RANKS[1], Leg.DECODE, 1, 0.0, 0.0, 0.0, 1.0, 0.0, 3)
    prefill = Pick(Slot(0), RANKS[0], Leg.PREFILL, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 2)
    prompt = Prompt(array("I", range(40)), block_size=16)
    return Placement(
        route_request=RouteRequest(request_id, 40, 3),
        decision=Decision(request_id, 0, RouterMode.KV, decode, prefill),
        prompt=prompt,
        token_ids=array("I", range(40)),
        block_size=16,
        shape=Shape.SYNCHRONOUS,
        draw=Draw(1, 1, 1),
        decode_address="",
        decode_context_tokens=4096,
        decode_lease=LeaseId(0),
    )


def test_recorded_kv_bytes_are_the_engine_count_or_else_the_estimate(bench: Bench) -> None:
    bench.after(FleetChange.JOINED)
    request = GenerateRequest(RequestId("r"), ModelName("m"), array("I", range(40)), Sampling(max_tokens=9))
    for kv_bytes in (None, 5_000):
        trail = Attempt(pair(), placed_s=1.5, prefill_sent_s=2.0, last_sent_s=3.0, kv_bytes=kv_bytes)
        bench.traffic.request_ended(
            request,
            NO_ORIGIN,
            trail=[trail],
            prompt=trail.placement.prompt,
            error=None,
            finished=True,
            begun_s=0.5,
            first_token_s=None,
            output_tokens=3,
        )
    bench.recorder.start()
    bench.recorder.close()
    (path,) = recording_files(bench.folder)
    lines = list(map(msgspec.json.decode, gzip.decompress(path.read_bytes()).splitlines()))
    expected, reported = (line["attempts"][0] for line in lines if line["kind"] == "request")
    assert expected["kv_bytes"] == (40 - 16) * 99
    assert "kv_bytes_reported" not in expected
    assert (reported["kv_bytes"], reported["kv_bytes_reported"]) == (5_000, True)
    assert (expected["placed_s"], [leg.get("sent_s") for leg in expected["legs"]]) == (1.0, [1.5, 2.5])
    assert "constraints" not in lines[-1]
