"""``kvrouter worker pods``: the workers beside the engines of labelled pods, for front doors elsewhere."""

import os
import sys

import click

from kvrouter.cli.flags import SettingsCommand, given_flags, setting_options
from kvrouter.cli.processes import begin
from kvrouter.config.setting import SettingValue
from kvrouter.config.sources import load_settings


@click.command("pods", cls=SettingsCommand, short_help="Beside the engines of labelled pods of Kubernetes.")
@click.option(
    "--selector", default="", metavar="LABELS", help="Only pods with these labels too, as team=a,tier!=test."
)
@click.option("--engine-namespace", metavar="NAME", help="Another namespace than this pod's own.")
@click.option(
    "--drain-limit-s", type=float, default=30.0, show_default=True, help="Time for running legs at the end."
)
def worker_pods(
    selector: str, engine_namespace: str | None, drain_limit_s: float, **flags: SettingValue | None
) -> None:
    """Make every pod with the label kvrouter.dev/engine part of a fleet; its image and command stay as they
    are. What the engine cannot be asked is said in the pod's annotations.

    Of several such processes one serves each engine, and another takes over when that one ends.
    """
    loaded = load_settings(flags=given_flags(flags), environ=os.environ, document=None)
    begin(loaded)
    from kvrouter.assembly.engine_pods import serve_pod_workers  # noqa: PLC0415
    from kvrouter.assembly.pods_followed import EnginePods  # noqa: PLC0415

    pods = EnginePods(selector=selector, namespace=engine_namespace)
    sys.exit(serve_pod_workers(loaded.settings, pods, os.environ, drain_limit_s=drain_limit_s))


worker_pods.params.extend(setting_options("planes", "log"))
