"""``kvrouter frontend``: its options."""

import sys
from dataclasses import dataclass

import click

from kvrouter.cli.options import takes
from kvrouter.cli.process_settings import FileOptions, router_settings
from kvrouter.cli.setting_flags import SettingsCommand, setting_options
from kvrouter.core.errors import ConfigError
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions:
    """Which workers a frontend has without discovery."""

    endpoints: tuple[str, ...] = option(
        "A worker without discovery, started with --static, whose log says what to write here. With any, "
        "nobody else is looked for. Not with --router-mode kv.",
        default=(),
        flag="--static-endpoint",
        metavar="ADDRESS,model=NAME[,…]",
        alone="",
    )


@click.command(cls=SettingsCommand, short_help="Serve workers that run in other processes.")
@takes(FileOptions, StaticOptions)
def frontend(files: FileOptions, static: StaticOptions, **flags: object) -> None:
    """Serve: an OpenAI-compatible endpoint in front of the workers that discovery finds.

    Run as many as you like, on any host: they know nothing of each other, but what --router-replica-sync
    tells. Workers and frontends of one fleet share --namespace, --discovery and --request-plane.
    """
    read = router_settings(files, flags)
    from kvrouter.cli.frontend.run import serve_frontend  # noqa: PLC0415
    from kvrouter.core.constraints import RouterMode  # noqa: PLC0415
    from kvrouter.settings.static_endpoint import static_cards  # noqa: PLC0415

    if static.endpoints and read.settings.router.router_mode is RouterMode.KV:
        raise ConfigError(
            "--static-endpoint: needs --router-mode round-robin or random; KV routing needs workers that "
            "discovery finds",
            param="static_endpoint",
        )
    cards = static_cards(static.endpoints, read.settings.planes.request_plane)
    sys.exit(serve_frontend(read.settings, read.sources, read.links, cards, read.engines))


frontend.params.extend(setting_options("router", "frontend", "planes", "recording", "log"))
