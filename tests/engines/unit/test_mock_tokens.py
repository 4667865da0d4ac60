from array import array

import pytest

from kvrouter.core.requests import Sampling
from kvrouter.engines.mock_engine.tokens import TokenModel

GREEDY = Sampling(max_tokens=1, temperature=0.0)


def model(*, model_seed: int = 0, eos_every: int | None = None) -> TokenModel:
    return TokenModel(model_seed=model_seed, token_ids=range(100, 200), eos_token_id=2, eos_every=eos_every)


def first_tokens(
    of: TokenModel, prompt: list[int], sampling: Sampling = GREEDY, count: int = 20
) -> list[int]:
    return of.draw(of.state(array("I", prompt), sampling), count, eos_from=None)[0]


def test_tokens_stay_within_the_allowed_ids() -> None:
    drawn = first_tokens(model(), [1, 2, 3], count=2_000)
    assert set(drawn) <= set(range(100, 200))
    assert len(set(drawn)) > 90


def test_resumed_sequence_gives_the_same_tokens() -> None:
    prompt = list(range(500))
    whole = first_tokens(model(), prompt, count=30)
    assert first_tokens(model(), prompt + whole[:11], count=19) == whole[11:]


@pytest.mark.parametrize("other", [[1, 2, 4], [2, 1, 3], [1, 2], [0, 1, 2, 3]])
def test_next_tokens_depend_on_every_earlier_token_and_its_place(other: list[int]) -> None:
    assert first_tokens(model(), [1, 2, 3]) != first_tokens(model(), other)


def test_tokens_depend_on_the_model_seed() -> None:
    assert first_tokens(model(), [1, 2, 3]) != first_tokens(model(model_seed=1), [1, 2, 3])


def test_request_seed_matters_only_with_a_temperature() -> None:
    def seeded(temperature: float, seed: int | None) -> list[int]:
        return first_tokens(model(), [1, 2, 3], Sampling(max_tokens=1, temperature=temperature, seed=seed))

    assert seeded(1.0, 7) != seeded(1.0, 8)
    assert seeded(1.0, 7) == seeded(1.0, 7)
    assert seeded(0.0, 7) == seeded(0.0, 8) == seeded(1.0, None)


def test_end_of_sequence_comes_at_the_asked_rate_and_never_too_early() -> None:
    lengths = []
    for start in range(400):
        of = model(eos_every=10)
        drawn, _ = of.draw(of.state(array("I", [start]), GREEDY), 1_000, eos_from=5)
        assert 2 not in drawn[:-1]
        assert drawn[-1] == 2
        lengths.append(len(drawn) - 5)
    assert min(lengths) == 1
    assert 8.0 < sum(lengths) / len(lengths) < 12.0


def test_tokens_do_not_depend_on_prompts_drawn_before() -> None:
    of = model()
    short = first_tokens(of, [1, 2, 3])
    long = first_tokens(of, list(range(5_000)))
    assert first_tokens(of, [1, 2, 3]) == short
    assert first_tokens(model(), list(range(5_000))) == long
