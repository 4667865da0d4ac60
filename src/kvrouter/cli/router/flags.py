"""``kvrouter router``: its options."""

import sys
from dataclasses import dataclass
from typing import Literal

import click

from kvrouter.cli.options import takes
from kvrouter.cli.process_settings import MODEL_PATH_HELP, FileOptions, router_settings
from kvrouter.cli.setting_flags import SettingsCommand, setting_options
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneOptions:
    """The options of a standalone router besides a router's settings, and the requests that it decides: all
    of a request, or the leg of one kind of worker.
    """

    component: Literal["all", "prefill", "backend"] = option(
        "prefill: the prefill leg alone, each prefill worker a target of its own. backend: workers that "
        "decode, or serve whole requests. all: whole requests, pairs where prefill workers are.",
        default="all",
    )
    lease_ttl_s: float = option(
        "A booking of which nobody says anything for this long ends. Every call about it renews it.",
        default=300.0,
        metavar="SECONDS",
        above=0,
    )
    bookings_max: int = option(
        "How many requests may be booked at a time; then 503.", default=65_536, metavar="INT", at_least=1
    )
    prefills_max: int = option(
        "How many prefill legs may run at a time; then 503. With --component prefill.",
        default=4096,
        metavar="INT",
        at_least=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFileOptions(FileOptions):
    """The files of a standalone router."""

    model_paths: tuple[str, ...] = option(
        f"{MODEL_PATH_HELP} Who sends token ids needs none.",
        default=(),
        flag="--model-path",
        metavar="MODEL=FOLDER",
    )


@click.command(cls=SettingsCommand, short_help="Decide for engines that something else fronts.")
@takes(StandaloneOptions, RouterFileOptions)
def router(options: StandaloneOptions, files: RouterFileOptions, **flags: object) -> None:
    """Serve decisions over HTTP, for engines that something else fronts.

    POST /v1/route says which worker a request should go to, and books it there until its owner frees it.
    With --component prefill, POST /v1/prefill also sends the prefill leg, and answers with where the KV
    waits and what decode must obey. Requests themselves go elsewhere.

    It finds workers as a frontend does: they share --namespace, --discovery and --request-plane.
    """
    read = router_settings(files, flags)
    from kvrouter.cli.router.run import serve_standalone  # noqa: PLC0415

    sys.exit(serve_standalone(read.settings, options, read.sources, read.links))


router.params.extend(setting_options("router", "frontend", "planes", "log"))
