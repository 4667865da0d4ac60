"""An engine gets its worker in three ways, and whichever way it was, comes back as what it now is."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.attach import attachment
from tests.support.attach_entrances import ENTRANCES, CardNow
from tests.support.engine_server import ScriptedEngine, scripted_engine
from tests.support.waits import until


@pytest.fixture(autouse=True)
def _asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(attachment, "TRIED_AGAIN_S", 0.01)


def has_other_blocks(engine: ScriptedEngine) -> None:
    engine.replace("/metrics", 'block_size="32"', 'block_size="16"')


def has_two_ranks(engine: ScriptedEngine) -> None:
    page = engine.pages["/metrics"].pieces[0].decode()
    second = [re.sub('engine="0"', 'engine="1"', line) for line in page.splitlines() if 'engine="0"' in line]
    engine.set_page("/metrics", "\n".join([page, *second, ""]))


def serves_another_model(engine: ScriptedEngine) -> None:
    engine.replace("/v1/models", '"tiny"', '"other"')


FACTS = {"block_size": 32, "dp_size": 1, "model": "tiny"}
CHANGES: dict[str, tuple[Callable[[ScriptedEngine], None], dict[str, object]]] = {
    "blocks": (has_other_blocks, {"block_size": 16}),
    "ranks": (has_two_ranks, {"dp_size": 2}),
    "model": (serves_another_model, {"model": "other"}),
}


def facts_of(card: CardNow) -> dict[str, object]:
    now = card()
    return {} if now is None else {name: getattr(now, name) for name in FACTS}


@pytest.mark.parametrize(
    ("entrance", "change"),
    [
        (entrance, change)
        for entrance in ENTRANCES
        for change in CHANGES
        if (entrance, change) != ("file", "model")  # a file says which model its line has: the next test
    ],
)
async def test_an_engine_that_comes_back_as_another_is_taken_as_what_it_now_is(
    entrance: str, change: str, tmp_path: Path
) -> None:
    happens, becomes = CHANGES[change]
    async with scripted_engine() as engine, ENTRANCES[entrance]("vllm", engine, tmp_path) as card:
        await until(lambda: facts_of(card) == FACTS)
        before = card()
        assert before is not None
        await engine.stop()
        await until(lambda: (now := card()) is not None and now.engine_silent)
        happens(engine)
        await engine.start()
        await until(lambda: facts_of(card) == {**FACTS, **becomes})
        now = card()
        assert now is not None
        assert (now.worker_id, now.engine_silent) == (before.worker_id, False)
        assert now.incarnation != before.incarnation, "nothing that was known of it holds any more"


async def test_an_engine_that_comes_back_against_its_file_has_no_worker_until_it_is_as_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_engine() as engine, ENTRANCES["file"]("vllm", engine, tmp_path) as card:
        await engine.stop()
        await until(lambda: (now := card()) is not None and now.engine_silent)
        serves_another_model(engine)
        await engine.start()
        await until(lambda: "not 'tiny': give one of these" in caplog.text)
        assert "worker_refused" in caplog.text
        assert card() is None
        engine.replace("/v1/models", '"other"', '"tiny"')
        await until(lambda: facts_of(card) == FACTS)


def test_a_new_kind_needs_its_folder_and_one_line() -> None:
    """In a process of its own: the kinds are those that are registered when it begins."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.toy_engine.registration"]
    command += ["-p", "no:cacheprovider", "tests/support/toy_engine/checks.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("....  "), done.stdout
