"""The page on a worker's place: its commands print what it says, and its Python runs."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouter.cli.commands import kvrouter
from kvrouter.core.workers import Enforcement
from kvrouter.worker import Worker
from tests.testing.worker_harness import WorkerHarness

PAGE = (Path(__file__).parents[2] / "docs" / "topology.md").read_text("utf-8")


def block(language: str) -> str:
    (only,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(only)


ENVIRON = dict(
    word.split("=", 1)
    for line in block("console").splitlines()
    if line.startswith("$ export ")
    for word in shlex.split(line.removeprefix("$ export "))
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder and the environment that the page makes."""
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "topology").mkdir()
    (tmp_path / "topology" / "zone").write_text("us-east-1a\n")


@pytest.mark.usefixtures("place")
def test_topology_check_prints_the_pages_output() -> None:
    _, shown = block("console").split("$ kvrouter topology check\n")
    result = CliRunner().invoke(kvrouter, ["topology", "check"])
    assert (result.exit_code, result.output) == (0, shown)


@pytest.mark.usefixtures("place")
async def test_the_pages_python_starts_a_worker_in_its_place() -> None:
    harness = WorkerHarness()
    await harness.discovery.watch(harness.cards.put_nowait, lambda *_: harness.cards.put_nowait(None))
    names: dict[str, object] = {
        "engine": harness.engine,
        "card": harness.worker.card,
        "discovery": harness.discovery,
        "events": harness.events,
        "requests": harness.requests,
    }
    code = compile(block("python"), "topology.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, names)
    assert inspect.iscoroutine(running)
    await running
    worker, card = names["worker"], await harness.cards.get()
    assert isinstance(worker, Worker)
    assert card is not None
    assert card.runtime_config.topology_domains == {"zone": "us-east-1a"}
    assert card.runtime_config.kv_transfer_enforcement is Enforcement.REQUIRED
    assert worker.card.draining
