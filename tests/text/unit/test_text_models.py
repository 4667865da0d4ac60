"""A frontend loads the tokenizers of the models that workers announce, and forgets those it needs no more."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvrouter.app import text_models
from kvrouter.app.text_models import TextModelLoader
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.text.source import MOCK_FOLDER, MOCK_TOKENIZER
from kvrouter.text.tokenizer import SLOW, TOKEN_TEXT_BYTES, EncodeLimits, EncodePool
from kvrouter.transports.records.port import Gone
from tests.testing.constants import SetConstants
from tests.testing.router_harness import card


def serving(model: str, worker_id: int, *, tokenizer: str | None = MOCK_TOKENIZER) -> WorkerCard:
    return replace(card(worker_id), model=ModelName(model), tokenizer=tokenizer)


async def announce(loader: TextModelLoader, *cards: WorkerCard) -> None:
    for each in cards:
        loader.on_card(each)
    await loader.loaded()


async def test_a_model_is_loaded_when_its_first_worker_is_announced() -> None:
    loader = TextModelLoader({}, EncodePool())
    await announce(loader, serving("m", 1))
    loaded = loader.texts[ModelName("m")]
    assert loaded.context_length_tokens == card(1).context_length
    await announce(loader, serving("m", 2))
    assert loader.texts[ModelName("m")] is loaded


async def test_the_hosts_own_tokenizer_folder_wins_over_the_workers() -> None:
    loader = TextModelLoader({ModelName("m"): str(MOCK_FOLDER)}, EncodePool())
    await announce(loader, serving("m", 1, tokenizer="/of/another/host"))
    assert list(loader.texts) == ["m"]


async def test_a_failed_tokenizer_load_is_reported_and_later_retried(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    loader = TextModelLoader({}, EncodePool())
    await announce(loader, serving("m", 1, tokenizer=str(tmp_path)), serving("n", 2, tokenizer=None))
    assert (list(loader.texts), caplog.text.count("tokenizer_failed")) == ([], 2)
    await announce(loader, serving("m", 3))
    assert list(loader.texts) == ["m"]


async def test_only_models_without_workers_are_evicted_for_new_models(
    set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    set_constants(text_models, TEXTS_MAX=2)
    loader = TextModelLoader({}, EncodePool())
    await announce(loader, serving("a", 1))
    await announce(loader, serving("b", 2))
    await announce(loader, serving("c", 3))
    assert (list(loader.texts), "tokenizer_failed" in caplog.text) == (["a", "b"], True)
    loader.on_gone(WorkerId(1), Epoch(99), Gone.REPLACED)
    await announce(loader, serving("c", 3))
    assert list(loader.texts) == ["a", "b"]
    loader.on_gone(WorkerId(1), card(1).incarnation, Gone.WITHDRAWN)
    await announce(loader, serving("c", 3))
    assert list(loader.texts) == ["b", "c"]


async def test_the_tokenizer_of_most_workers_is_loaded(tmp_path: Path) -> None:
    loader = TextModelLoader({}, EncodePool())
    await announce(loader, serving("m", 1), serving("m", 2))
    loaded = loader.texts[ModelName("m")]
    other = tmp_path / "other"
    other.symlink_to(MOCK_FOLDER)
    await announce(loader, serving("m", 3, tokenizer=str(other)))
    await announce(loader, replace(serving("m", 3), context_length=1))
    assert loader.texts[ModelName("m")] is loaded
    await announce(loader, replace(serving("m", 3), context_length=10**6))
    assert loader.texts[ModelName("m")].context_length_tokens == 10**6, (
        "who may answer decides which of it counts"
    )
    loader.on_gone(WorkerId(3), card(3).incarnation, Gone.EXPIRED)
    assert loader.texts[ModelName("m")] == loaded
    await announce(loader, *(serving("m", worker_id, tokenizer=str(other)) for worker_id in (2, 3)))
    await announce(loader, serving("m", 1, tokenizer=str(other)))
    assert loader.texts[ModelName("m")] is not loaded


async def test_a_context_over_the_tokenize_budget_is_logged_once_per_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def logged() -> list[str]:
        return [each.getMessage() for each in caplog.records if "tokenize_budget_small" in each.getMessage()]

    pool = EncodePool(EncodeLimits(bytes_max=262_144 * TOKEN_TEXT_BYTES * SLOW.bytes_per_byte))
    loader = TextModelLoader({}, pool)
    fits, over = (
        replace(serving("m", 1), context_length=262_144),
        replace(serving("m", 1), context_length=262_145),
    )
    await announce(loader, fits)
    assert logged() == []
    await announce(loader, over, fits, over, replace(serving("n", 2), context_length=10**6))
    first, second = logged()
    assert "set KVROUTER_TOKENIZE_MAX_BYTES to 536872960" in first
    assert "set KVROUTER_TOKENIZE_MAX_BYTES to 2048000000" in second
    TextModelLoader({}, EncodePool(EncodeLimits(bytes_max=2_048_000_000)), dict(loader.texts))
    assert len(logged()) == 2
    TextModelLoader({}, pool, dict(loader.texts))
    assert len(logged()) == 4
