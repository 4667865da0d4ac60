"""Advice on the changes that other transfer policies would bring; it may be to change nothing."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvrouter.sim.replay.comparison import Better
from kvrouter.sim.worth.transfer_choices import TransferChoice
from kvrouter.sim.worth.worth import BETTER, Change, Changes, FigureName

TRIFLE = 1e-6
"""A smaller share of today's figure is rounding."""

GAINS = (FigureName.TTFT_MEAN, FigureName.GOODPUT)
"""The figures for which a policy is changed."""

GUARDS = (
    FigureName.TTFT_MEAN,
    FigureName.TTFT_P90,
    FigureName.TTFT_P99,
    FigureName.GOODPUT,
    FigureName.FAILED,
    FigureName.COST,
)
"""The figures that may not get worse."""

LATENCY = (FigureName.TTFT_MEAN, FigureName.GOODPUT)
"""The figures that must be known to be as good as today if a policy is changed for money."""


class Verdict(StrEnum):
    """The kind of the advice."""

    SWITCH = "switch"
    CHEAPER = "switch for money alone"
    LEAVE = "leave it"


class Alternative(msgspec.Struct, frozen=True):
    """Another choice, its changes against today's, and with how many seeds it was replayed. One that
    ``is_looser`` than today's is never advised.
    """

    name: str
    choice: TransferChoice
    is_looser: bool
    seeds: int
    changes: Changes

    def gain(self, figure: FigureName) -> float:
        """How much better the figure gets, below 0 where it gets worse; 0 where it is not known."""
        change = self.changes.get(figure)
        return 0.0 if change is None else _gain(figure, change)

    def improves(self, figure: FigureName, threshold: float) -> bool:
        """Whether the figure gets better by more than chance among all alternatives, and by ``threshold``."""
        change = self.changes.get(figure)
        if change is None:
            return False
        gain = _gain(figure, change)
        return gain > change.within_all and gain >= max(threshold, TRIFLE) * abs(change.today)

    def worsens(self, figure: FigureName) -> bool:
        """Whether the figure gets worse by more than its own interval."""
        change = self.changes.get(figure)
        if change is None:
            return False
        loss = -_gain(figure, change)
        return loss > change.within and loss > TRIFLE * abs(change.today)

    def holds(self, figure: FigureName, threshold: float) -> bool:
        """Whether the figure is sure not to get worse by ``threshold``, a share of today's."""
        change = self.changes.get(figure)
        if change is None:
            return False
        return change.within - _gain(figure, change) <= threshold * abs(change.today)

    @property
    def harms(self) -> tuple[FigureName, ...]:
        """The guarded figures that get worse."""
        return tuple(figure for figure in GUARDS if self.worsens(figure))


class Advice(msgspec.Struct, frozen=True):
    """The advice, in words too. ``choice`` is the recommended choice, ``as_good`` are those as good within
    chance, ``looser`` those that gain too but loosen today's boundary, ``worse`` those that make a guarded
    figure worse.
    """

    verdict: Verdict
    choice: TransferChoice | None
    as_good: tuple[str, ...]
    looser: tuple[str, ...]
    worse: tuple[str, ...]
    sentences: tuple[str, ...]


def n_decisive(n_alternatives: int, *, has_prices: bool) -> int:
    """Return how many changes the advice chooses among."""
    return n_alternatives * (len(GAINS) + has_prices)


def advise(
    today: TransferChoice, alternatives: Sequence[Alternative], threshold: float, levels: Sequence[str]
) -> Advice:
    """Return the advice. ``threshold`` is the share of today's figure below which no gain is worth a change,
    ``levels`` are the fleet's, the broadest first.

    A choice is advised that makes mean TTFT or goodput better, and nothing worse; without one, a choice that
    costs less while TTFT and goodput surely stay. None is looser than today's: what bounds KV transfers may
    be no matter of speed. Of those as good as the best within its interval, the smallest change is named.
    """
    harmless = [each for each in alternatives if not each.harms]
    worse = tuple(each.name for each in alternatives if each.harms)
    looser = tuple(
        each.name
        for each in harmless
        if each.is_looser and any(each.improves(figure, threshold) for figure in GAINS)
    )
    for verdict, figures, fit in (
        (Verdict.SWITCH, GAINS, harmless),
        (
            Verdict.CHEAPER,
            (FigureName.COST,),
            [each for each in harmless if all(each.holds(figure, threshold) for figure in LATENCY)],
        ),
    ):
        for figure in figures:
            gaining = [each for each in fit if not each.is_looser and each.improves(figure, threshold)]
            if gaining:
                chosen, as_good = _least_of_the_best(today, gaining, figure, levels)
                sentences = (
                    *_switch_sentences(verdict, chosen, as_good, threshold),
                    *_refused(today, looser),
                )
                names = tuple(each.name for each in as_good)
                return Advice(verdict, chosen.choice, names, looser, worse, sentences)
    kept = f" that keeps {today.boundary}" if looser else ""
    sentences = (*_leave_sentences(alternatives, threshold, kept), *_refused(today, looser))
    return Advice(Verdict.LEAVE, None, (), looser, worse, sentences)


def _least_of_the_best(
    today: TransferChoice, gaining: Sequence[Alternative], figure: FigureName, levels: Sequence[str]
) -> tuple[Alternative, list[Alternative]]:
    best = max(gaining, key=lambda each: each.gain(figure) - each.changes[figure].within)
    lowest = best.gain(figure) - best.changes[figure].within
    alike = [each for each in gaining if each.gain(figure) >= lowest]
    chosen = min(alike, key=lambda each: each.choice.change_from(today, levels))
    return chosen, [each for each in alike if each is not chosen]


def _switch_sentences(
    verdict: Verdict, chosen: Alternative, as_good: Sequence[Alternative], threshold: float
) -> tuple[str, ...]:
    changed = [figure for figure in FigureName if chosen.improves(figure, 0.0) or chosen.worsens(figure)]
    what = "; ".join(_sentence(figure, chosen.changes[figure]) for figure in changed)
    if verdict is Verdict.SWITCH:
        rest = "" if chosen.worsens(FigureName.CROSSING) else "; nothing gets worse"
        first = f"Switch to {chosen.name}: {what}{rest}."
    else:
        first = (
            f"Switch to {chosen.name} for money alone: {what}; "
            f"TTFT and goodput get worse by less than {threshold * 100.0:g} %."
        )
    if not as_good:
        return (first,)
    return first, f"As good within its interval: {'; '.join(each.name for each in as_good)}."


def _leave_sentences(alternatives: Sequence[Alternative], threshold: float, kept: str) -> tuple[str, ...]:
    least = f" and by {threshold * 100.0:g} %" if threshold else ""
    sentences = [
        f"Leave it: nothing{kept} makes mean TTFT or goodput better by more than chance{least}, "
        "and leaves the rest as good."
    ]
    allowed = [each for each in alternatives if not each.is_looser]
    nearest = max(allowed, key=lambda each: each.gain(FigureName.TTFT_MEAN), default=None)
    change = None if nearest is None else nearest.changes.get(FigureName.TTFT_MEAN)
    if nearest is not None and change is not None and nearest.gain(FigureName.TTFT_MEAN) > 0.0:
        but = "".join(f"; {_sentence(figure, nearest.changes[figure])}" for figure in nearest.harms)
        sentences.append(f"Nearest is {nearest.name}: {_sentence(FigureName.TTFT_MEAN, change)}{but}.")
    harmful = [each for each in alternatives if each.harms]
    if harmful:
        worst = max(harmful, key=_badness)
        what = "; ".join(_sentence(figure, worst.changes[figure]) for figure in worst.harms)
        sentences.append(f"Worse than today, such as {worst.name}: {what}.")
    sentences += _saved(allowed, threshold)
    return tuple(sentences)


def _refused(today: TransferChoice, looser: Sequence[str]) -> list[str]:
    """Return a sentence on what gains and is not advised."""
    if not looser:
        return []
    return [f"Better, and never advised, because it loosens {today.boundary}: {'; '.join(looser)}."]


def _badness(each: Alternative) -> tuple[int, float, int]:
    return len(each.harms), -each.gain(FigureName.TTFT_MEAN), each.choice.strictness


def _saved(alternatives: Sequence[Alternative], threshold: float) -> list[str]:
    """Return sentences on KV that would no longer cross, if its cost is unknown."""
    saving = [
        each
        for each in alternatives
        if FigureName.COST not in each.changes
        and not each.harms
        and each.improves(FigureName.CROSSING, threshold)
        and all(each.holds(figure, threshold) for figure in LATENCY)
    ]
    if not saving:
        return []
    most = max(saving, key=lambda each: each.gain(FigureName.CROSSING))
    what = _sentence(FigureName.CROSSING, most.changes[FigureName.CROSSING])
    return [f"With {most.name}, {what}, at today's latency; price_per_gb of the links says what that saves."]


def _gain(figure: FigureName, change: Change) -> float:
    return -change.change if BETTER[figure] is Better.LOWER else change.change


_FORMATS = {
    FigureName.TTFT_MEAN: ("mean TTFT", " ms", 1.0, 0),
    FigureName.TTFT_P90: ("p90 TTFT", " ms", 1.0, 0),
    FigureName.TTFT_P99: ("p99 TTFT", " ms", 1.0, 0),
    FigureName.GOODPUT: ("goodput", " points of the requests", 100.0, 1),
    FigureName.FAILED: ("what fails or is refused", " points of the requests", 100.0, 1),
    FigureName.CROSSING: ("KV that crosses", " GB", 1.0, 1),
    FigureName.COST: ("the cost", "", 1.0, 2),
}


def _sentence(figure: FigureName, change: Change) -> str:
    """Return ``mean TTFT falls by 420 ± 30 ms (38 %)``."""
    quantity, unit, scale, digits = _FORMATS[figure]
    verb = "falls" if change.change < 0.0 else "rises"
    share = change.share
    of_today = f" ({abs(share) * 100.0:.0f} %)" if share is not None and "points" not in unit else ""
    by, within = abs(change.change) * scale, change.within * scale
    return f"{quantity} {verb} by {by:,.{digits}f} ± {within:,.{digits}f}{unit}{of_today}"
