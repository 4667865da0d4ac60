"""``kvrouter cordon``, ``uncordon`` and ``drain``: no new requests to a worker, a node or a zone."""

from dataclasses import dataclass

import click

from kvrouter.cli.ask import RouterOptions, router_at
from kvrouter.cli.options import takes
from kvrouter.cli.output import TABLE, Output, echo
from kvrouter.cli.progress import working
from kvrouter.cli.setting_flags import output_option
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonOptions:
    """Why a place is cordoned, and who asks for it."""

    reason: str = option("Why: it is shown with the cordon.", default="", metavar="TEXT")
    by: str | None = option("Who asks for it.  [default: this user at this host]", metavar="WHO")
    force: bool = option("Even if a model has no worker of one of its roles left.", default=False)


@click.command(short_help="Keep new requests away from a worker, a node or a zone.")
@click.argument("level", required=False)
@click.argument("name", required=False)
@takes(CordonOptions, RouterOptions)
@output_option
def cordon(
    options: CordonOptions, router: RouterOptions, level: str | None, name: str | None, output: Output
) -> None:
    """Keep new requests away from the workers of LEVEL NAME, at every router of the fleet. What runs there
    goes on. Workers that join there later are cordoned too, until `kvrouter uncordon LEVEL NAME`. Without
    arguments: list what is cordoned.

    LEVEL is worker (NAME is its id), node (a node of Kubernetes, else a host), or a level of the fleet's
    topology, such as zone.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    from kvrouter.cli.cordon.run import put_cordon, show_change, show_cordons  # noqa: PLC0415

    client = router_at(router.url)
    if level is None:
        if options.reason or options.by or options.force:
            raise click.UsageError("--reason, --by and --force are about LEVEL NAME")
        with working(f"asking {router.url}"):
            answer = client.cordons()
        show_cordons(answer, output)
        return
    if name is None:
        raise click.UsageError("give LEVEL and NAME: worker 7, node gpu-4, zone a")
    with working(f"asking {router.url}"):
        answer = put_cordon(client, level, name, options)
    show_change(answer, "is cordoned", "was cordoned already", output)


@click.command(short_help="Take a cordon back.")
@click.argument("level")
@click.argument("name")
@takes(RouterOptions)
@output_option
def uncordon(router: RouterOptions, level: str, name: str, output: Output) -> None:
    """Let new requests go to the workers of LEVEL NAME again, unless another cordon keeps them away.

    LEVEL is worker (NAME is its id), node (a node of Kubernetes, else a host), or a level of the fleet's
    topology, such as zone.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    from kvrouter.cli.cordon.run import show_change  # noqa: PLC0415

    with working(f"asking {router.url}"):
        answer = router_at(router.url).uncordon(level, name)
    show_change(answer, "is uncordoned", "was not cordoned", output)


@click.command(short_help="Cordon, and wait until nothing runs there any more.")
@click.argument("level")
@click.argument("name")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.0),
    metavar="SECONDS",
    help="How long to wait.  [default: for ever]",
)
@takes(CordonOptions, RouterOptions)
def drain(
    options: CordonOptions, router: RouterOptions, level: str, name: str, *, timeout_s: float | None
) -> None:
    """Cordon LEVEL NAME as `kvrouter cordon` does, and wait until no request runs on its workers. No request
    is cut; how many run where is said whenever it changes.

    Exit code 0: nothing runs there any more. 1: the time ran out, or the router could not be asked. In both
    cases the cordon stays, until `kvrouter uncordon LEVEL NAME`.

    LEVEL is worker (NAME is its id), node (a node of Kubernetes, else a host), or a level of the fleet's
    topology, such as zone.

    Where the router has an admin token, it is read from KVROUTER_ADMIN_TOKEN.
    """
    from kvrouter.api.client import decode_answer  # noqa: PLC0415
    from kvrouter.api.cordon_schema import CordonChange  # noqa: PLC0415
    from kvrouter.cli.cordon.run import put_cordon, show_change, wait_empty  # noqa: PLC0415

    client = router_at(router.url)
    with working(f"asking {router.url}"):
        answer = put_cordon(client, level, name, options)
    show_change(answer, "is cordoned", "was cordoned already", TABLE)
    change = decode_answer(answer, CordonChange)
    wait_empty(client, change, timeout_s=timeout_s)
    echo(f"{change.place}: nothing runs there any more")
