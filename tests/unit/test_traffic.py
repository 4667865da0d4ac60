"""What is recorded of the fleet: each worker as its card describes it, and whether it answers."""

from pathlib import Path

import msgspec
import pytest

from kvrouter.core.ids import Epoch, ModelName, Taint, WorkerId
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.recording.files import RecordingFolder
from kvrouter.recording.recorder import Recorder
from kvrouter.recording.records import FleetChange, Worker
from kvrouter.recording.salt import Salt
from kvrouter.service.traffic import TrafficRecorder

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
        files = RecordingFolder(folder, recording="a", file_bytes=1 << 20, total_bytes=1 << 24, started_s=0.0)
        self.recorder = Recorder(
            files,
            Salt.drawn(),
            recording="a",
            version="1",
            began_s=0.0,
            started_s=0.0,
            on_dropped=pytest.fail,
            on_stopped=pytest.fail,
        )
        self.traffic = TrafficRecorder(self.recorder, clock=lambda: 1.0)

    def after(self, *changes: FleetChange) -> Worker:
        for change in changes:
            self.traffic.worker_changed(change, CARD)
        return self.recorder.workers["7"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_worker_is_recorded_with_its_sizes_its_place_and_its_levels_and_without_its_address(
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


def test_a_card_that_is_published_again_says_nothing_of_whether_its_worker_answers(bench: Bench) -> None:
    assert not bench.after(FleetChange.JOINED, FleetChange.SILENT).alive
    assert not bench.after(FleetChange.CHANGED).alive
    assert bench.after(FleetChange.ANSWERS).alive
    assert bench.after(FleetChange.CHANGED).alive
    assert bench.after(FleetChange.SILENT, FleetChange.JOINED).alive
