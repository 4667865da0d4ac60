"""``kvrouter router``: the command of a standalone router."""

import os
import sys
from pathlib import Path

import click

from kvrouter.cli.flags import SettingsCommand, given_flags, setting_options
from kvrouter.cli.processes import begin, model_folders
from kvrouter.config.document import read_document
from kvrouter.config.fleet_checks import settings_document
from kvrouter.config.setting import SettingValue
from kvrouter.config.sources import load_settings


@click.command(cls=SettingsCommand, short_help="Decide for engines that something else fronts.")
@click.option(
    "--component",
    type=click.Choice(["all", "prefill", "backend"]),
    default="all",
    show_default=True,
    help="prefill: the prefill leg alone, each prefill worker a target of its own. backend: workers that "
    "decode, or serve whole requests. all: whole requests, pairs where prefill workers are.",
)
@click.option(
    "--lease-ttl-s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A booking of which nobody says anything for this long ends. Every call about it renews it.",
)
@click.option(
    "--bookings-max",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    metavar="INT",
    help="How many requests may be booked at a time; then 503.",
)
@click.option(
    "--prefills-max",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    metavar="INT",
    help="How many prefill legs may run at a time; then 503. With --component prefill.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A fleet file whose router, frontend, planes and log sections, and links, are used.",
)
@click.option(
    "--model-path",
    "model_paths",
    multiple=True,
    metavar="MODEL=FOLDER",
    help="A model's tokenizer: this host's folder, or a Hugging Face repository; without it what its workers "
    "name is read. "
    "Who sends token ids needs none.",
)
def router(
    component: str,
    lease_ttl_s: float,
    bookings_max: int,
    prefills_max: int,
    config: Path | None,
    model_paths: tuple[str, ...],
    **flags: SettingValue | None,
) -> None:
    """Serve decisions over HTTP, for engines that something else fronts.

    POST /v1/route says which worker a request should go to, and books it there until its owner frees it.
    With --component prefill, POST /v1/prefill also sends the prefill leg, and answers with where the KV
    waits and what decode must obey. Requests themselves go elsewhere.

    It finds workers as a frontend does: they share --namespace, --discovery and --request-plane.
    """
    document = None if config is None else settings_document(read_document(config))
    loaded = load_settings(flags=given_flags(flags), environ=os.environ, document=document)
    begin(loaded)
    folders = model_folders(model_paths)
    from kvrouter.assembly.described import links_of  # noqa: PLC0415
    from kvrouter.assembly.standalone import Component, StandaloneSpec, serve_standalone  # noqa: PLC0415

    spec = StandaloneSpec(
        component=Component(component),
        lease_ttl_s=lease_ttl_s,
        bookings_max=bookings_max,
        prefills_max=prefills_max,
    )
    links = None if document is None else links_of(document)
    sys.exit(serve_standalone(loaded.settings, spec, folders, links))


router.params.extend(setting_options("router", "frontend", "planes", "log"))
