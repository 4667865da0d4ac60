"""The tutorial and the pages on looking: on a control plane every command runs, and writes what is shown."""

from contextlib import suppress
from pathlib import Path

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.nodes import ZONE, ZONES
from tests.system.cluster.shell import ROOT, Shell
from tests.testing.console_examples import Step, absent, steps_of
from tests.testing.processes import eventually

DOCS = ROOT / "docs"
BROKEN = "A zone loses its decode workers"
"""The tutorial's heading before which all is well."""

LOOKS = ("kubectl get ", "kubectl events ")
"""Commands that people give again when something is about to change."""


async def test_the_tutorials_and_operate_pages_commands_print_as_shown(
    own_plane: ControlPlane, tmp_path: Path
) -> None:
    own_plane.kubectl("delete", "nodes", "--selector", f"{ZONE}={ZONES[2]}")  # the tutorial has two zones
    tutorial = steps_of(DOCS / "kubernetes-tutorial.md")
    page = DOCS / "kubernetes-operate.md"
    verify = page.read_text("utf-8").splitlines().index("## Verify the deployment")
    looking = [step for step in steps_of(page) if step.line > verify]
    well = next(at for at, step in enumerate(tutorial) if step.section == BROKEN)
    async with Shell(own_plane, tmp_path) as shell:
        for step in (*tutorial[:well], *looking, *tutorial[well:]):
            await play(shell, step)


async def play(shell: Shell, step: Step) -> None:
    written = await shell.run(step)

    async def is_shown() -> bool:
        nonlocal written
        written = await shell.run(step)
        return not absent(step.shown, written)

    if absent(step.shown, written) and step.command.startswith(LOOKS):
        with suppress(AssertionError):  # what it wrote last is reported below
            await eventually(is_shown)
    assert absent(step.shown, written) == [], f"{step.command}\nwrote:\n{written}"
