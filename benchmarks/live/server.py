"""``python -m benchmarks.live.server``: all of ``kvrouter up``, and it notes decisions and engines' stamps.

It serves until SIGTERM, and then writes what it noted to a file.
"""

from pathlib import Path

import click
import msgspec
import uvloop

from benchmarks.live.observe import Observed, Observer
from kvrouter.app.lifetime import stop_on_signals
from kvrouter.cli.up.run import embedded, serve_until
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import read_document
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.tree import FrontendSettings, Settings


async def serve(fleet: FleetFile, *, port: int, record: Path) -> Observed:
    """Serve ``fleet`` on ``port`` and record its traffic; return what was noted until the end."""
    settings = Settings(
        router=fleet.router,
        frontend=FrontendSettings(http_host="127.0.0.1", http_port=port),
        recording=RecordingSettings(folder=str(record)),
    )
    observer = Observer()
    with stop_on_signals() as stopping:
        async with embedded(settings, fleet) as system:
            system.fleet.cluster.watch_legs(observer.leg_ended)
            for model in system.service.models():
                observer.watch(model.placer)
            await serve_until(stopping, system, drain_limit_s=settings.frontend.drain_limit_s)
            observer.observed.slipped_s = system.fleet.cluster.slipped_s
    return observer.observed


@click.command(help=__doc__)
@click.option("--fleet", "fleet_path", type=click.Path(path_type=Path), required=True)
@click.option("--port", type=int, required=True)
@click.option("--record", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(*, fleet_path: Path, port: int, record: Path, out: Path) -> None:
    """Serve, and write."""
    fleet = load_fleet(read_document(fleet_path)).fleet
    observed = uvloop.run(serve(fleet, port=port, record=record))
    out.write_bytes(msgspec.json.encode(observed))


if __name__ == "__main__":
    main()
