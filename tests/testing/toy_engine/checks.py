"""What a kind of engine can do once it is registered; for ``-p tests.testing.toy_engine.registration``."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouter.app.attach import attachment
from kvrouter.cli.commands import kvrouter
from tests.testing.attach_paths import ATTACH_PATHS, CurrentCard
from tests.testing.constants import SetConstants
from tests.testing.scripted_engine import scripted_engine
from tests.testing.waits import until


@pytest.fixture(autouse=True)
def _asked_at_once(set_constants: SetConstants) -> None:
    set_constants(attachment, PROBE_EVERY_S=0.01, RETRY_AFTER_S=0.01)


def block_size_of(card: CurrentCard) -> int | None:
    now = card()
    return None if now is None else now.block_size


@pytest.mark.parametrize("entrance", ATTACH_PATHS)
async def test_it_is_attached_and_attached_again(entrance: str, tmp_path: Path) -> None:
    async with scripted_engine({}) as engine:
        engine.set_page("/toy", json.dumps({"model": "tiny", "block_size": 32, "ranks": 1}))
        async with ATTACH_PATHS[entrance]("toy", engine, tmp_path) as card:
            await until(lambda: block_size_of(card) == 32)
            engine.set_page("/toy", json.dumps({"model": "tiny", "block_size": 64, "ranks": 1}))
            await until(lambda: block_size_of(card) == 64)


def test_it_has_its_command() -> None:
    said = CliRunner().invoke(kvrouter, ["worker", "toy", "--help"])
    assert said.exit_code == 0
    assert "Make a toy part of a fleet." in said.output
