"""The form in which learned speeds are kept over a restart of the router. The limits are those of a file."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvrouter.core.ids import Epoch, ModelName, WorkerRank
from kvrouter.core.workers import WorkerCard

SECONDS_MAX = 1e9
RANKS_MAX = 65_536
"""The most ranks of one model."""

JUDGED_MAX = 12

_Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]
_Ratio = Annotated[float, Meta(ge=0.0, le=1e6)]
_Sum = Annotated[float, Meta(ge=0.0, le=1e40)]
_SignedSum = Annotated[float, Meta(ge=-1e40, le=1e40)]
_Count = Annotated[int, Meta(ge=0, lt=2**53)]


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all parts: an unknown field is an error."""


class KeptTimes(_Kept, frozen=True):
    """The last requests of a rank in one kind of work; see
    :class:`kvrouter.kernel.placement.slowness.RankTimes`. The last one was measured ``age_s`` ago.
    """

    requests: Annotated[int, Meta(ge=1, lt=2**53)]
    age_s: _Seconds
    plain: _Sum
    taken: _Sum
    spread: _Sum
    last_plain_s: _Seconds
    last_ratio: _Ratio
    for_trials_s: _Seconds
    """The seconds of all ranks' requests of which its trials may cost a share."""

    def __post_init__(self) -> None:
        if not (self.plain > 0.0 and self.last_plain_s > 0.0):
            raise ValueError("plain and last_plain_s: have to be above 0")


class KeptMoments(_Kept, frozen=True):
    """What a rank's requests show of interference; see :mod:`kvrouter.kernel.placement.interference`."""

    weight: _Sum
    steps: _Sum
    observed: _Sum
    squares: _Sum
    products: _SignedSum


class KeptPrompts(_Kept, frozen=True):
    """What is known of a rank's first tokens; ``times`` is None before one was measured."""

    times: KeptTimes | None
    predictions: _Count
    predicted_s: _Seconds
    seen_s: _Seconds
    is_warm: bool
    is_slow: bool
    took_longer: Annotated[tuple[bool, ...], Meta(max_length=JUDGED_MAX)]
    very_slow: _Count


class KeptRank(_Kept, frozen=True):
    """What was learned of one rank of one start of its engine; see :class:`kvrouter.core.workers.WorkerCard`
    for what names it.
    """

    rank: WorkerRank
    incarnation: Epoch
    engine_url: str
    engine_start: str
    prompts: KeptPrompts | None
    steps: KeptTimes | None
    moments: KeptMoments | None
    inserted_tokens: _Sum
    """Those that count in its cache's turnover."""
    aged_s: _Seconds = 0.0
    """How long before the file was saved this was so: above 0 where its worker was absent then."""

    def is_of(self, card: WorkerCard) -> bool:
        """Whether the worker has the same engine, which did not start again: also where the worker did, as
        one in the router's own process does.
        """
        if self.engine_start != card.engine_start:
            return False
        has_engine = card.engine_start != "" and self.engine_url == card.engine_url
        return has_engine or self.incarnation == card.incarnation


class KeptNoise(_Kept, frozen=True):
    """The noise of all ranks' requests; see :class:`kvrouter.kernel.placement.slowness.Slowness`."""

    weights: _Sum
    squares: _Sum


class KeptSpeeds(_Kept, frozen=True):
    """What was learned of one model's ranks, relative to the engines' timing with the digest ``timing``."""

    model: ModelName
    timing: str
    prompt_noise: KeptNoise
    step_noise: KeptNoise
    answers: _Count
    answer_s: _Seconds
    ranks: Annotated[tuple[KeptRank, ...], Meta(max_length=RANKS_MAX)]
