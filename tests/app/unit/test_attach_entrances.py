"""An engine gets its worker in four ways, and whichever way it was, comes back as what it now is."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.app.attach import attachment
from kvrouter.engines.openai.engine import ServedEngine
from kvrouter.engines.vllm.introspect import STARTED_METRIC
from tests.testing.attach_paths import ATTACH_PATHS, CurrentCard
from tests.testing.constants import SetConstants
from tests.testing.scripted_engine import ScriptedEngine, scripted_engine
from tests.testing.waits import until


@pytest.fixture(autouse=True)
def _asked_at_once(monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants) -> None:
    set_constants(attachment, PROBE_EVERY_S=0.01)
    # As in production an engine is probed several times before the attach loop asks what it is.
    set_constants(attachment, RETRY_AFTER_S=0.2)
    monkeypatch.setitem(ServedEngine.__init__.__kwdefaults__ or {}, "look_each_s", 0.02)


def was_started_again(engine: ScriptedEngine) -> None:
    page = engine.pages["/metrics"].pieces[0].decode()
    engine.set_page("/metrics", re.sub(rf"(?m)^({STARTED_METRIC}) .*$", r"\1 1800000000.0", page))


def has_other_blocks(engine: ScriptedEngine) -> None:
    engine.replace("/metrics", 'block_size="32"', 'block_size="16"')


def has_two_ranks(engine: ScriptedEngine) -> None:
    page = engine.pages["/metrics"].pieces[0].decode()
    second = [re.sub('engine="0"', 'engine="1"', line) for line in page.splitlines() if 'engine="0"' in line]
    engine.set_page("/metrics", "\n".join([page, *second, ""]))


def serves_another_model(engine: ScriptedEngine) -> None:
    engine.replace("/v1/models", '"tiny"', '"other"')


def has_another_context(engine: ScriptedEngine) -> None:
    engine.replace("/v1/models", '"max_model_len":2048', '"max_model_len":1024')


FACTS = {"block_size": 32, "dp_size": 1, "model": "tiny", "context_length": 2048}
CHANGES: dict[str, tuple[Callable[[ScriptedEngine], None], dict[str, object]]] = {
    "blocks": (has_other_blocks, {"block_size": 16}),
    "ranks": (has_two_ranks, {"dp_size": 2}),
    "model": (serves_another_model, {"model": "other"}),
    "context": (has_another_context, {"context_length": 1024}),
}


def facts_of(card: CurrentCard) -> dict[str, object]:
    now = card()
    return {} if now is None else {name: getattr(now, name) for name in FACTS}


@pytest.mark.parametrize(
    ("entrance", "change"),
    [
        (entrance, change)
        for entrance in ATTACH_PATHS
        for change in CHANGES
        if (entrance, change) != ("file", "model")  # a file says which model its line has: the next test
    ],
)
async def test_restarted_engine_with_changed_facts_gets_a_new_incarnation_and_card(
    entrance: str, change: str, tmp_path: Path
) -> None:
    happens, becomes = CHANGES[change]
    async with scripted_engine() as engine, ATTACH_PATHS[entrance]("vllm", engine, tmp_path) as card:
        await until(lambda: facts_of(card) == FACTS)
        before = card()
        assert before is not None
        await engine.stop()
        await until(lambda: (now := card()) is not None and now.engine_silent)
        happens(engine)
        was_started_again(engine)
        await engine.start()
        await until(lambda: facts_of(card) == {**FACTS, **becomes})
        now = card()
        assert now is not None
        assert (now.worker_id, now.engine_silent) == (before.worker_id, False)
        assert now.incarnation != before.incarnation, "nothing that was known of it holds any more"


async def test_restarted_engine_against_its_file_has_no_worker_until_it_matches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_engine() as engine, ATTACH_PATHS["file"]("vllm", engine, tmp_path) as card:
        await engine.stop()
        await until(lambda: (now := card()) is not None and now.engine_silent)
        serves_another_model(engine)
        was_started_again(engine)
        await engine.start()
        refusal = "not 'tiny': give one of these"
        await until(lambda: refusal in caplog.text)
        asked = engine.asked["/v1/models"]
        await until(lambda: engine.asked["/v1/models"] > asked + 2)
        assert caplog.text.count(refusal) == 1, "reported once, however often it is tried"
        assert caplog.text.count("worker_refused") == 1
        assert card() is None
        engine.replace("/v1/models", '"other"', '"tiny"')
        await until(lambda: facts_of(card) == FACTS)


def has_odd_numbers(engine: ScriptedEngine) -> None:
    page = engine.pages["/metrics"].pieces[0].decode()
    engine.set_page("/metrics", re.sub(r'num_gpu_blocks="\d+"', 'num_gpu_blocks="None"', page))
    was_started_again(engine)


def has_no_metrics(engine: ScriptedEngine) -> None:
    del engine.pages["/metrics"]


def has_metrics_for_others(engine: ScriptedEngine) -> None:
    engine.set_page("/metrics", "who are you?", status=401)


def names_no_model(engine: ScriptedEngine) -> None:
    has_no_metrics(engine)
    engine.set_page("/v1/models", "not yet", status=500)


TROUBLES: dict[str, tuple[Callable[[ScriptedEngine], None], bool]] = {
    "not a number": (has_odd_numbers, False),
    "no page": (has_no_metrics, False),
    "another server's error": (has_metrics_for_others, False),
    "no model": (names_no_model, True),
}
"""What happens to its pages, and whether it counts as silent by that: it serves unless none says so."""


@pytest.mark.parametrize("entrance", ATTACH_PATHS)
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_restarted_engine_with_unreadable_pages_keeps_its_worker(
    entrance: str, trouble: str, tmp_path: Path
) -> None:
    happens, is_silent = TROUBLES[trouble]
    async with scripted_engine() as engine, ATTACH_PATHS[entrance]("vllm", engine, tmp_path) as card:
        await until(lambda: facts_of(card) == FACTS)
        before, pages = card(), dict(engine.pages)
        assert before is not None
        await engine.stop()
        await until(lambda: (now := card()) is not None and now.engine_silent)
        happens(engine)
        await engine.start()
        asked = engine.asked.total()
        await until(lambda: engine.asked.total() > asked + 20)
        now = card()
        assert now is not None, "its running legs would be cut"
        assert (now.incarnation, now.engine_silent) == (before.incarnation, is_silent)
        engine.pages.update(pages)
        await until(lambda: (now := card()) is not None and not now.engine_silent)
        now = card()
        assert now is not None
        assert now.incarnation == before.incarnation


def test_new_engine_kind_needs_its_folder_and_one_line() -> None:
    """In a process of its own: the kinds are those that are registered when it begins."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.testing.toy_engine.registration"]
    command += ["-p", "no:cacheprovider", "tests/testing/toy_engine/checks.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{'.' * (len(ATTACH_PATHS) + 1)}  "), done.stdout


async def test_newly_loaded_adapter_keeps_the_incarnation_of_the_engine(tmp_path: Path) -> None:
    async with scripted_engine() as engine, ATTACH_PATHS["command"]("vllm", engine, tmp_path) as card:
        before = card()
        assert before is not None
        await engine.stop()
        await until(lambda: (now := card()) is not None and now.engine_silent)
        models = engine.json("/v1/models")
        (base,) = models["data"]
        engine.set_json("/v1/models", {**models, "data": [base, {**base, "id": "french", "parent": "tiny"}]})
        was_started_again(engine)
        await engine.start()
        await until(lambda: (now := card()) is not None and not now.engine_silent)
        now = card()
        assert now is not None
        assert now.incarnation == before.incarnation, "legs that run would be cut"
