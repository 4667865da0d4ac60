"""The four ways in which an engine that runs already gets its worker, as one test sees them."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from kvrouter.cli.up.run import embedded
from kvrouter.cli.worker.engine_worker import engine_worker
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.engines.attach import AttachSpec
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.library import Runtime
from kvrouter.settings.planes import DiscoveryBackend, PlaneSettings
from kvrouter.settings.problems import parse_document
from kvrouter.settings.tree import FrontendSettings, Settings
from kvrouter.transports.records.port import Gone
from tests.testing.pod_fleet import ENGINE, pod_of_engine, running_pod_fleet
from tests.testing.scripted_engine import ScriptedEngine

CurrentCard = Callable[[], WorkerCard | None]
"""The card of the engine's worker; None while it has none."""

AttachPath = Callable[[str, ScriptedEngine, Path], AbstractAsyncContextManager[CurrentCard]]
"""Attaches an engine of a kind, of which nothing is said but where it is."""


@asynccontextmanager
async def by_command(kind: str, engine: ScriptedEngine, folder: Path) -> AsyncIterator[CurrentCard]:
    """``kvrouter worker KIND``."""
    planes = PlaneSettings(discovery=DiscoveryBackend.FILE, discovery_dir=str(folder))
    spec = AttachSpec(kind=kind, url=engine.url, worker_id=WorkerId(7), publishes_kv_events=False)
    async with engine_worker(Settings(planes=planes), spec, {}) as running:
        yield lambda: None if running.worker is None else running.worker.card


@asynccontextmanager
async def by_file(kind: str, engine: ScriptedEngine, _folder: Path) -> AsyncIterator[CurrentCard]:
    """A line of a fleet file."""
    text = (
        "version: 1\n"
        "models: [{name: tiny, tokenizer: mock}]\n"
        f"workers: [{{name: w, engine: {{kind: {kind}, url: '{engine.url}', kv_events: false}}}}]\n"
    )
    fleet = load_fleet(parse_document(text, "fleet.yaml")).fleet
    settings = Settings(frontend=FrontendSettings(http_port=0))
    async with embedded(settings, fleet, environ={}) as system:
        attached = system.attached
        assert attached is not None

        def card() -> WorkerCard | None:
            worker = attached.workers.get(WorkerId(1))
            return None if worker is None else worker.card

        yield card


@asynccontextmanager
async def by_pod(kind: str, engine: ScriptedEngine, _folder: Path) -> AsyncIterator[CurrentCard]:
    """A labelled pod."""
    async with running_pod_fleet() as made:
        given = pod_of_engine(engine, labels={ENGINE: kind})
        made.fleet.on_pod(given)
        yield lambda: made.card(given)


@asynccontextmanager
async def by_program(kind: str, engine: ScriptedEngine, _folder: Path) -> AsyncIterator[CurrentCard]:
    """``Runtime.attach`` of a program."""
    cards: dict[WorkerId, WorkerCard] = {}

    def on_gone(worker_id: WorkerId, _: Epoch, __: Gone) -> None:
        del cards[worker_id]

    async with Runtime.in_process(Settings()) as runtime:
        await runtime.discovery.watch(lambda card: cards.update({card.worker_id: card}), on_gone)
        worker_id = (await runtime.attach(kind, engine.url, kv_events=False)).worker_id
        yield lambda: cards.get(worker_id)


ATTACH_PATHS: dict[str, AttachPath] = {
    "command": by_command,
    "file": by_file,
    "pod": by_pod,
    "program": by_program,
}
