"""The load that a live engine is sent: within its bounds, and of every length and concurrency."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.sim.calibrate.engine_load import (
    CHECKED_LEAST,
    CONTEXT_LEAST,
    FITTED_LEAST,
    REQUESTS_MAX,
    engine_load,
)


@given(
    n=st.integers(FITTED_LEAST, REQUESTS_MAX),
    context=st.integers(CONTEXT_LEAST, 1 << 20),
    kv=st.none() | st.integers(4_096, 1 << 22),
    seqs=st.none() | st.integers(1, 512),
)
def test_load_has_the_requested_number_of_requests_and_all_fit(
    n: int, context: int, kv: int | None, seqs: int | None
) -> None:
    load = engine_load(n, context_tokens=context, kv_tokens=kv, max_num_seqs=seqs)
    assert sum(len(phase.requests) for phase in load.fitted) == n
    assert len(load.checked.requests) == max(CHECKED_LEAST, n // 3)
    assert load.n_requests == n + len(load.checked.requests)
    for request in load.warm_up:
        assert 1 <= request.prompt_tokens < context
    for phase in load.phases:
        assert 1 <= phase.concurrency <= min(len(phase.requests), seqs or 32)
        longest = max(request.prompt_tokens + request.answer_tokens for request in phase.requests)
        assert longest <= context
        assert kv is None or longest * phase.concurrency <= kv
        assert all(request.answer_tokens >= 1 for request in phase.requests)


def test_long_prompts_run_alone_and_short_ones_together() -> None:
    load = engine_load(30, context_tokens=32_768)
    assert [phase.concurrency for phase in load.phases] == [1, 4, 16, 8]
    longest = [max(request.prompt_tokens for request in phase.requests) for phase in load.phases]
    assert longest == [16_384, 2_048, 512, 1_024]
    alone = [request.prompt_tokens for request in load.fitted[0].requests]
    assert sorted(alone) != alone, "a length must not grow with time"
    assert len(set(alone)) == len(alone)


@pytest.mark.parametrize(
    ("n", "context", "param", "why"),
    [
        (FITTED_LEAST - 1, 4_096, "requests", "too few to measure"),
        (REQUESTS_MAX + 1, 4_096, "requests", "more than the 1000"),
        (30, CONTEXT_LEAST - 1, "max_model_len", "127 tokens are too few"),
    ],
)
def test_load_too_small_too_large_or_of_too_short_context_is_refused(
    n: int, context: int, param: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        engine_load(n, context_tokens=context)
    assert caught.value.param == param
