"""The tutorial and the pages on looking: on a control plane every command runs, and writes what is shown."""

from pathlib import Path

from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import ZONE, ZONES
from tests.cluster.shell import ROOT, Shell
from tests.support.console import absent, steps_of

DOCS = ROOT / "docs"
BROKEN = "A zone loses its decode workers"
"""The tutorial's heading before which all is well."""


async def test_what_the_pages_show_is_what_happens(own_plane: ControlPlane, tmp_path: Path) -> None:
    own_plane.kubectl("delete", "nodes", "--selector", f"{ZONE}={ZONES[2]}")  # the tutorial has two zones
    tutorial = steps_of(DOCS / "kubernetes-tutorial.md")
    looking = [*steps_of(DOCS / "kubernetes-verify.md"), *steps_of(DOCS / "kubernetes-troubleshooting.md")]
    well = next(at for at, step in enumerate(tutorial) if step.section == BROKEN)
    async with Shell(own_plane, tmp_path) as shell:
        for step in (*tutorial[:well], *looking, *tutorial[well:]):
            written = await shell.run(step)
            assert absent(step.shown, written) == [], f"{step.command}\nwrote:\n{written}"
