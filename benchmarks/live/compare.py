"""What live and replay have in common: choices, and figures by the engines' own clock."""

from collections.abc import Sequence

import msgspec

from benchmarks.live.decisions import SeenDecision, decide_again, have_equal_views
from benchmarks.live.observe import Figures, Observed, figures
from benchmarks.measure import quantile
from kvrouter.kernel.placement.placer import Placer

QUANTILES = (0.5, 0.99)


class Choices(msgspec.Struct, frozen=True):
    """``decisions`` are those that both sides made. ``equal_views`` of them were made from the same readings,
    ``equal_choices`` picked the same ranks. ``broken`` names those that chose differently from equal views,
    ``not_again`` those live decisions whose view made the replay's router pick other ranks: there must be
    none of either.
    """

    decisions: int
    equal_views: int
    equal_choices: int
    broken: tuple[str, ...]
    not_again: tuple[str, ...]


class Latencies(msgspec.Struct, frozen=True):
    """One figure of both sides, in milliseconds."""

    name: str
    live_ms: float
    replay_ms: float


def compare_choices(live: Observed, replay: Observed, placer: Placer) -> Choices:
    """Compare every decision; ``placer`` is the replay's, and decides live views again.

    Raises ValueError for sides with other settings, and for a view that has no counterpart.
    """
    if live.settings != replay.settings:
        raise ValueError(f"live decides with {live.settings}, the replay with {replay.settings}")
    replayed = {seen.key: seen for seen in replay.decisions}
    both = [(seen, replayed[seen.key]) for seen in live.decisions if seen.key in replayed]
    views = [have_equal_views(one, other, placer.settings) for one, other in both]
    choices = [one.choice == other.choice for one, other in both]
    return Choices(
        decisions=len(both),
        equal_views=sum(views),
        equal_choices=sum(choices),
        broken=tuple(
            _name(one)
            for (one, _), same_view, same_choice in zip(both, views, choices, strict=True)
            if same_view and not same_choice
        ),
        not_again=tuple(_name(seen) for seen in live.decisions if decide_again(seen, placer) != seen.choice),
    )


def compare_latencies(live: Observed, replay: Observed) -> list[Latencies]:
    """Return TTFT and ITL, p50 and p99, over the requests that both sides answered."""
    ours, theirs = figures(live), figures(replay)
    both = sorted(ours.keys() & theirs.keys())
    rows: list[Latencies] = []
    for name, of in (("TTFT", _ttft_s), ("ITL", _itl_s)):
        live_s = [of(ours[key]) for key in both]
        replay_s = [of(theirs[key]) for key in both]
        rows += [
            Latencies(f"{name} p{100 * at:g}", 1e3 * _at(live_s, at), 1e3 * _at(replay_s, at))
            for at in QUANTILES
        ]
    return rows


def cached_share(observed: Observed, input_tokens: int) -> float:
    """Return the share of the prompts' tokens that engines had cached."""
    return sum(each.cached_tokens for each in figures(observed).values()) / input_tokens


def _at(samples: Sequence[float | None], fraction: float) -> float:
    return quantile([sample for sample in samples if sample is not None], fraction)


def _ttft_s(each: Figures) -> float | None:
    return each.ttft_s


def _itl_s(each: Figures) -> float | None:
    return each.itl_s


def _name(seen: SeenDecision) -> str:
    request_id, attempt, is_again = seen.key
    return f"{request_id}/{attempt}" + (" decode again" if is_again else "")
