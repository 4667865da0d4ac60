"""Learned speeds of links, from KV handoffs: the time between the end of a prefill and the first token.

For a transfer whose time by the link table, with the other transfers on its link, is ``plain_s``, ``seen_s``
is its measured time without the table's latency and the decode worker's steps. Over the last transfers of one
kind of link (within one value of a level, or between two of its values) ::

    seen_s = slowness · plain_s + extra_s

is fitted by the median of the slopes between all pairs of transfers, weighed by their distance (Theil 1950,
Sen 1968; extra_s is the median residual), with the 95 % interval of a median. A link has a separate pace if
its transfers differ from its kind's by more than :data:`ALIKE`.

Without measurements a link has its kind's pace, a kind the median of the other kinds, and all of them the
table's; a difference within the interval, or within ALIKE, has no effect. Late transfers count before they
end, so that a nearly stalled link is noticed, unless as many others arrive in time: then the destination rank
is late, not the link. A stuck transfer counts a third once it has arrived, until another one is in time. A
change by a factor of two, in several transfers in a row, replaces earlier measurements. The difference of an
unused link decays by half-lives, so that it is tried again: a slow kind's to the others, no further.

Where no link is configured, all have one pace and no load until two of them are known to differ: the topology
alone has no effect.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence, Set
from itertools import islice, takewhile
from math import exp, inf, log, sqrt
from statistics import median
from typing import NamedTuple

import numpy as np

from kvrouter.core.ids import RouterId
from kvrouter.kernel.fleet.columns import FloatColumn
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.topology.link_table import (
    AS_GIVEN,
    UNKNOWN_KIND,
    Link,
    LinkKind,
    LinkPace,
    LinkState,
    LinkTable,
    SharedLink,
)

KIND_TRANSFERS_MAX = 64
LINK_TRANSFERS_MAX = 16
"""The number of last transfers that count, for a kind and for a link."""

KINDS_MAX = 64
"""The most kinds of links that are measured: a fleet has two for each of its levels."""

LINKS_MAX = 4096
"""The most links that are measured separately; beyond it the least recently used is dropped."""

FIT_TRANSFERS = 3
"""The least number of transfers from which a kind's slowness is estimated."""

LINE_TRANSFERS = 6
"""The least number of transfers, of different lengths, from which the constant time is estimated too."""

ALIKE = 1.25
"""Slownesses that differ by less than this factor count as equal."""

OWN_TRANSFERS = 3
"""The least number of a link's transfers for a slowness that differs from its kind's."""

CHANGED = 2.0
"""The factor by which the time of transfers must differ, either way, for the link to have changed."""

CHANGED_TRANSFERS = 3
"""The number of consecutive transfers that must show a change."""

LATE_S = 0.02
"""A transfer is late when it takes this much more than CHANGED times the expected time."""

STUCK_S = 0.5
"""A transfer is stuck, which alone makes its link slow, when it takes this much more than expected."""

PLAIN_MIN_S = 0.002
"""Shorter transfers do not show the bandwidth."""

EXTRA_MAX_S = 0.2
"""The largest plausible constant time of a transfer."""

FORGET_S = 240.0
"""The half-life of a link's difference to its kind without a transfer."""

SLOW = 2.0
RECOVERED = 1.5
"""A link becomes slow at SLOW times its expected time, until it is at RECOVERED times or less."""

SLOWNESS_MIN = 1e-3
SLOWNESS_MAX = 1e4


class TransferSample(NamedTuple):
    """One measured KV transfer."""

    link: SharedLink | None
    table: Link
    began_s: float
    at_s: float
    plain_s: float
    seen_s: float
    seen_by: RouterId = RouterId("")
    number: int = 0
    """The number of the transfer at the router that measured it."""

    @property
    def kind(self) -> LinkKind:
        """The kind of its link."""
        return UNKNOWN_KIND if self.link is None else self.link.kind


class LinkReading(NamedTuple):
    """The learned speed of a kind of links, or of one link, given by ``name``."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    slowness: float
    """Relative to the link table."""
    low: float | None
    high: float | None
    """The 95 % interval of a kind's slowness; None for a single link."""
    transfers: int
    is_slow: bool


class LearnedLinks:
    """The learned paces of one model's links, in ``state``. ``now_s`` is seconds of one monotonic clock."""

    def __init__(self, state: LinkState, events: PlacementEvents) -> None:
        self._state = state
        self.events = events
        self._kinds: dict[LinkKind, _Kind] = {}
        self._links: dict[SharedLink, _Link] = {}
        self._unsettled: set[SharedLink] = set()
        """Links whose pace may change at the next refresh."""
        self._levels: set[str] = set()
        """Levels with measured transfers."""
        self._others = 1.0
        """The slowness of kinds without measured transfers."""
        self._table = LinkTable()

    def use(self, table: LinkTable | None) -> None:
        """Learn relative to another link table, from nothing."""
        self.forget()
        self._table = table or LinkTable()
        self._state.count_loads(not self._table.is_assumed)

    def note(self, sample: TransferSample) -> None:
        """Add a completed transfer."""
        if sample.plain_s < PLAIN_MIN_S:
            return
        kind = self._kinds.get(sample.kind)
        if kind is None:
            if len(self._kinds) >= KINDS_MAX:
                return
            kind = self._kinds[sample.kind] = _Kind()
        kind.add(sample)
        if sample.link is not None:
            link = self._links.pop(sample.link, None) or _Link()
            self._links[sample.link] = link  # the most recently used link is last
            link.samples.append(sample)
            self._levels.update(level for level, _ in sample.link.src)
            self._unsettled.add(sample.link)
            if _has_changed(link.samples, self._settled(sample), CHANGED_TRANSFERS):
                since_s = link.samples[-CHANGED_TRANSFERS].at_s
                _keep_last(link.samples, CHANGED_TRANSFERS)
                kind.forget(sample.link, since_s)
            while len(self._links) > LINKS_MAX:
                self._forget(next(iter(self._links)))
        if kind.has_changed():
            _keep_last(kind.samples, CHANGED_TRANSFERS + 1)

    def refresh(self, on_the_way: Iterable[TransferSample], *, now_s: float) -> None:
        """Update the paces in ``state``; ``on_the_way`` are transfers in progress."""
        moving: defaultdict[LinkKind, set[SharedLink | None]] = defaultdict(set)
        late: defaultdict[SharedLink | None, list[TransferSample]] = defaultdict(list)
        for sample in on_the_way:
            moving[sample.kind].add(sample.link)
            if _is_late(sample, self._settled(sample)):
                late[sample.link].append(sample)
        for key, kind in self._kinds.items():
            stuck = [sample for link, found in late.items() if _kind_of(link) == key for sample in found]
            self._settle_kind(key, kind, stuck, moving[key], now_s)
        self._settle_others()
        self._show_kinds()
        unsettled = self._unsettled | {link for link in late if link is not None}
        self._unsettled = set()
        for name in unsettled:
            self._settle_link(name, late.get(name, ()), now_s)

    def samples(self) -> list[TransferSample]:
        """Return the transfers that count, the oldest first."""
        found = {id(sample): sample for kind in self._kinds.values() for sample in kind.samples}
        found |= {id(sample): sample for link in self._links.values() for sample in link.samples}
        return sorted(found.values(), key=lambda sample: sample.at_s)

    def forget(self) -> None:
        """Drop all measurements: every link has the table's speed again."""
        for name in tuple(self._links):
            self._forget(name)
        for of in [of for of, _ in self._state.paces()]:
            self._state.set_pace(of, None)
        for key, kind in self._kinds.items():
            if kind.is_slow:
                self.events.link_speed_changed(kind_name(key), is_slow=False, slowness=1.0)
        self._kinds.clear()
        self._unsettled.clear()
        self._levels.clear()
        self._others = 1.0

    def _settled(self, sample: TransferSample) -> LinkPace:
        """Return the pace of a transfer's link by completed transfers alone."""
        kind = self._kinds.get(sample.kind)
        pace = AS_GIVEN if kind is None else kind.settled
        link = None if sample.link is None else self._links.get(sample.link)
        return pace if link is None or link.settled is None else pace._replace(slowness=link.settled)

    def readings(self) -> list[LinkReading]:
        """Return the measured kinds, then the links with a separate pace, slow ones first."""
        kinds = [kind.reading(key) for key, kind in self._kinds.items() if kind.samples]
        links = [
            link.reading(name, self._kinds[name.kind])
            for name, link in self._links.items()
            if link.slowness is not None and link.samples
        ]
        return sorted(kinds, key=lambda kind: kind.name) + sorted(
            links, key=lambda link: (not link.is_slow, link.name)
        )

    @property
    def _tells_apart(self) -> bool:
        """Whether two links are known to differ, in bandwidth or in the constant time."""
        extras = [kind.undecayed.extra_s for kind in self._kinds.values() if kind.is_fitted]
        return not self.are_alike or (bool(extras) and max(extras) - min(extras) > LATE_S)

    @property
    def are_alike(self) -> bool:
        """Whether the measurements do not distinguish links, however old they are."""
        if any(link.slowness is not None for link in self._links.values()):
            return False
        s_per_byte = [
            kind.undecayed.slowness / kind.samples[-1].table.bandwidth_bytes_per_s
            for kind in self._kinds.values()
            if kind.samples and (kind.is_fitted or kind.pace != kind.settled)
        ]
        return not s_per_byte or max(s_per_byte) <= ALIKE * min(s_per_byte)

    def _settle_kind(
        self,
        key: LinkKind,
        kind: "_Kind",
        late: Sequence[TransferSample],
        moving: Set[SharedLink | None],
        now_s: float,
    ) -> None:
        kind.fit(now_s)
        others = self._others_than(kind, now_s) if kind.is_fitted else self._others
        pace = kind.settled = kind.pace_now(others, now_s)
        n_late = len({sample.link for sample in late})
        n_links = len(moving | {sample.link for sample in kind.samples})
        if n_late >= CHANGED_TRANSFERS and 2 * n_late > n_links:
            pace = pace._replace(slowness=max(pace.slowness, median(map(_ratio, late))))
        kind.pace = pace
        slowness = kind.judge(self._table)
        if slowness is not None:
            self.events.link_speed_changed(kind_name(key), is_slow=kind.is_slow, slowness=slowness)

    def _settle_others(self) -> None:
        """Give kinds without measurements the median slowness of the others, at least the table's."""
        fitted = [kind.pace.slowness for kind in self._kinds.values() if kind.is_fitted]
        self._others = _usual(fitted)

    def _others_than(self, kind: "_Kind", now_s: float) -> float:
        """Return the median slowness of the other kinds, at least the table's: old ones are nearer to it."""
        others = [each for each in self._kinds.values() if each.is_fitted and each is not kind]
        return _usual([each.faded(1.0, now_s) for each in others])

    def _show_kinds(self) -> None:
        """Set the paces of kinds: one for all where none is configured and none is known to differ."""
        tells_apart = not self._table.is_assumed or self._tells_apart
        self._state.count_loads(tells_apart)
        paces = {
            LinkKind(level, within): LinkPace(self._others, 0.0)
            for level in self._levels
            for within in (True, False)
        }
        paces |= {key: kind.pace for key, kind in self._kinds.items()}
        fitted = [kind.pace for kind in self._kinds.values() if kind.is_fitted]
        if fitted and not tells_apart:
            common = LinkPace(
                median(pace.slowness for pace in fitted), median(pace.extra_s for pace in fitted)
            )
            paces = dict.fromkeys(paces, common)
        for key, pace in paces.items():
            self._state.set_pace(key, None if pace == AS_GIVEN else pace)

    def _settle_link(self, name: SharedLink, late: Sequence[TransferSample], now_s: float) -> None:
        link, kind_pace = self._links.get(name), self._state.pace_of_kind(name.kind)
        if link is None:
            link = self._links[name] = _Link()
        own = link.own(kind_pace, now_s)
        link.settled = own if _differ(own, kind_pace.slowness) else None
        settled = kind_pace if link.settled is None else kind_pace._replace(slowness=link.settled)
        late = late if _is_the_link(late, link.samples, settled) else ()
        is_sure = len(late) > 1 or not (late or (link.is_slow and link.ended_late(settled, now_s)))
        if len(late) > 1 or _is_stuck(late, kind_pace):
            own = max(own, median(map(_ratio, late)))
        relative = own / kind_pace.slowness
        own = max(own, link.suspected(kind_pace, now_s))
        link.slowness = own if _differ(own, kind_pace.slowness) else None
        pace = None if link.slowness is None else LinkPace(own, kind_pace.extra_s)
        self._state.set_pace(name, pace)
        if late or pace is not None or link.is_slow:  # it is tried again, in time
            self._unsettled.add(name)
        is_slow = relative >= (RECOVERED if link.is_slow else SLOW)
        if is_slow != link.is_slow and is_sure:
            link.is_slow = is_slow
            self.events.link_speed_changed(link_name(name), is_slow=is_slow, slowness=relative)
        if not link.samples and not late:
            self._forget(name)

    def _forget(self, name: SharedLink) -> None:
        if self._links.pop(name).is_slow:
            self.events.link_speed_changed(link_name(name), is_slow=False, slowness=1.0)
        self._unsettled.discard(name)
        self._state.set_pace(name, None)


def kind_name(kind: LinkKind) -> str:
    """Return the display name of a kind of links."""
    if kind.level is None:
        return "between unknown places"
    return f"within one {kind.level}" if kind.within else f"between two values of {kind.level}"


def link_name(link: SharedLink) -> str:
    """Return the display name of a link: its ends."""
    begin = "/".join(f"{level}={value}" for level, value in link.src)
    return f"{begin} to {link.src[-1][0]}={link.dst}"


class _Kind:
    """The last transfers over links of one kind."""

    def __init__(self) -> None:
        self.samples: deque[TransferSample] = deque(maxlen=KIND_TRANSFERS_MAX)
        self.pace = self.settled = AS_GIVEN
        """The current pace, and the pace by completed transfers alone."""
        self.is_slow = False
        self._fitted: LinkPace | None = None
        self._low, self._high = 0.0, inf
        self._fitted_s = -inf
        self._is_new = False
        self._shown: float | None = None

    def add(self, sample: TransferSample) -> None:
        self.samples.append(sample)
        self._is_new = True

    def forget(self, link: SharedLink, since_s: float) -> None:
        """Drop a link's transfers before ``since_s``."""
        kept = [sample for sample in self.samples if sample.link != link or sample.at_s >= since_s]
        self.samples = deque(kept, maxlen=KIND_TRANSFERS_MAX)
        self._is_new = True

    def has_changed(self) -> bool:
        """Whether the last transfers, over more than one link if there are more, all show a change."""
        wanted = CHANGED_TRANSFERS + 1
        last = list(self.samples)[-wanted:]
        links = {sample.link for sample in self.samples}
        if len(links) > 1 and len({sample.link for sample in last}) < 2:
            return False
        return _has_changed(self.samples, self.pace, wanted)

    @property
    def is_fitted(self) -> bool:
        return self._fitted is not None

    def fit(self, now_s: float) -> None:
        """Fit the line, if there are new transfers."""
        n = len(self.samples)
        is_due = n <= LINK_TRANSFERS_MAX or now_s - self._fitted_s >= _FIT_S
        if n >= FIT_TRANSFERS and self._is_new and is_due:
            self._fitted, self._low, self._high = _fit(self.samples)
            self._fitted_s, self._is_new = now_s, False
            if self._low <= ALIKE and self._high >= 1.0 / ALIKE:
                self._fitted = self._fitted._replace(slowness=1.0)

    @property
    def undecayed(self) -> LinkPace:
        """Its pace by the transfers that count, as if the last one were now."""
        return self.pace if self._fitted is None or self.pace != self.settled else self._fitted

    def pace_now(self, others: float, now_s: float) -> LinkPace:
        """Return the kind's current pace, given the slowness of other kinds."""
        if self._fitted is None:
            return AS_GIVEN if others == 1.0 else LinkPace(others, 0.0)
        slowness, extra_s = self._fitted
        # to forget that it is slow makes it no faster than the others are
        towards = max(1.0, min(slowness, others))
        return LinkPace(self.faded(towards, now_s), extra_s * _kept(self.samples[-1].at_s, now_s))

    def faded(self, towards: float, now_s: float) -> float:
        """Return the fitted slowness, the nearer to ``towards`` the longer the last transfer is ago."""
        slowness = AS_GIVEN.slowness if self._fitted is None else self._fitted.slowness
        return towards * exp(log(slowness / towards) * _kept(self.samples[-1].at_s, now_s))

    def judge(self, table: LinkTable) -> float | None:
        """Return the slowness relative to the expected one if the kind became slow or recovered. A link that
        ``table`` does not state is expected to be as it is first found.
        """
        if self._fitted is None:
            return None
        should = self._shown
        if should is None:
            should = 1.0 if table.states(self.samples[-1].link) else self.pace.slowness
        relative = self.pace.slowness / should
        is_slow = relative >= (RECOVERED if self.is_slow else SLOW)
        if not is_slow and len(self.samples) > LINK_TRANSFERS_MAX:
            self._shown = self.pace.slowness
        if is_slow == self.is_slow:
            return None
        self.is_slow = is_slow
        return relative

    def reading(self, key: LinkKind) -> LinkReading:
        table, pace = self.samples[-1].table, self.pace
        return LinkReading(
            name=kind_name(key),
            latency_s=table.latency_s + pace.extra_s,
            bandwidth_bytes_per_s=table.bandwidth_bytes_per_s / pace.slowness,
            slowness=pace.slowness,
            low=self._low,
            high=self._high,
            transfers=len(self.samples),
            is_slow=self.is_slow,
        )


class _Link:
    """The last transfers over one link. ``slowness`` is None when it is its kind's; ``settled`` is the
    slowness by completed transfers alone.
    """

    def __init__(self) -> None:
        self.samples: deque[TransferSample] = deque(maxlen=LINK_TRANSFERS_MAX)
        self.slowness: float | None = None
        self.settled: float | None = None
        self.is_slow = False

    def own(self, kind: LinkPace, now_s: float) -> float:
        """Return the link's current slowness; its kind's counts as one more transfer."""
        if len(self.samples) < OWN_TRANSFERS:
            return kind.slowness
        weights = [sample.plain_s for sample in self.samples]
        ratios = [_bounded((sample.seen_s - kind.extra_s) / sample.plain_s) for sample in self.samples]
        own = _weighted_median([*ratios, kind.slowness], [*weights, sum(weights) / len(weights)])
        kept = _kept(self.samples[-1].at_s, now_s)
        return kind.slowness * exp(log(own / kind.slowness) * kept)

    def suspected(self, kind: LinkPace, now_s: float) -> float:
        """Return the slowness that the last consecutive stuck transfers suggest, weighed by their share of
        the transfers that prove a change: after one that took seconds, others already avoid the link.
        """
        if not self.samples:
            return kind.slowness
        last_s = self.samples[-1].at_s
        pace = kind._replace(slowness=self.own(kind, last_s))
        last = islice(reversed(self.samples), CHANGED_TRANSFERS)
        stuck = list(takewhile(lambda sample: _is_late(sample, pace) and _is_stuck((sample,), pace), last))
        if not stuck:
            return kind.slowness
        share = len(stuck) / CHANGED_TRANSFERS
        suspected = log(pace.slowness) * (1.0 - share) + log(median(map(_ratio, stuck))) * share
        return kind.slowness * exp((suspected - log(kind.slowness)) * _kept(last_s, now_s))

    def ended_late(self, pace: LinkPace, now_s: float) -> bool:
        """Whether the last completed transfer, not long ago, was late. Then few late transfers in progress do
        not settle the pace, and the link does not count as recovered.
        """
        return (
            bool(self.samples)
            and now_s - self.samples[-1].at_s < FORGET_S
            and _is_late(self.samples[-1], pace)
        )

    def reading(self, name: SharedLink, kind: _Kind) -> LinkReading:
        of_kind, table = kind.reading(name.kind), self.samples[-1].table
        slowness = kind.pace.slowness if self.slowness is None else self.slowness
        return of_kind._replace(
            name=link_name(name),
            bandwidth_bytes_per_s=table.bandwidth_bytes_per_s / slowness,
            slowness=slowness,
            low=None,
            high=None,
            transfers=len(self.samples),
            is_slow=self.is_slow,
        )


def _kept(last_s: float, now_s: float) -> float:
    """Return the share of a difference that remains since ``last_s``."""
    return float(2.0 ** -(max(0.0, now_s - last_s) / FORGET_S))


def _usual(slownesses: Sequence[float]) -> float:
    """Return the median, at least the table's; the table's without any."""
    usual = median(slownesses) if slownesses else 1.0
    return usual if usual >= ALIKE else 1.0


def _differ(one: float, other: float) -> bool:
    return abs(log(one / other)) > log(ALIKE)


def _kind_of(link: SharedLink | None) -> LinkKind:
    return UNKNOWN_KIND if link is None else link.kind


def _ratio(sample: TransferSample) -> float:
    return _bounded(sample.seen_s / sample.plain_s)


def _bounded(slowness: float) -> float:
    return min(max(slowness, SLOWNESS_MIN), SLOWNESS_MAX)


def _is_late(sample: TransferSample, pace: LinkPace) -> bool:
    expected_s = sample.plain_s * pace.slowness + pace.extra_s
    return sample.plain_s >= PLAIN_MIN_S and sample.seen_s > CHANGED * expected_s + LATE_S


def _is_the_link(late: Sequence[TransferSample], samples: Iterable[TransferSample], pace: LinkPace) -> bool:
    """Whether the link delays the ``late`` transfers, and not their destination: fewer others that began no
    earlier arrived in time.
    """
    if not late:
        return False
    since_s = min(each.began_s for each in late)
    in_time = sum(each.began_s >= since_s and not _is_late(each, pace) for each in samples)
    return in_time < len(late)


def _is_stuck(late: Sequence[TransferSample], pace: LinkPace) -> bool:
    return any(sample.seen_s - sample.plain_s * pace.slowness > STUCK_S for sample in late)


def _has_changed(samples: Sequence[TransferSample], pace: LinkPace, wanted: int) -> bool:
    """Whether the last transfers, and not all of them, took much longer or shorter than ``pace`` predicts."""
    if len(samples) <= wanted:
        return False
    last = list(samples)[-wanted:]
    expected = [each.plain_s * pace.slowness + pace.extra_s for each in last]
    slower = all(each.seen_s > CHANGED * one + LATE_S / 2 for each, one in zip(last, expected, strict=True))
    faster = all(CHANGED * each.seen_s < one for each, one in zip(last, expected, strict=True))
    return slower or faster


def _keep_last(samples: deque[TransferSample], n: int) -> None:
    while len(samples) > n:
        samples.popleft()


def _fit(samples: Sequence[TransferSample]) -> tuple[LinkPace, float, float]:
    """Return the line through the transfers, and the interval of its slope."""
    plain = np.array([each.plain_s for each in samples])
    measured = np.array([each.seen_s for each in samples])
    n = len(plain)
    if n >= LINE_TRANSFERS and plain.max() >= 2.0 * plain.min():
        one, other = np.triu_indices(n, 1)
        apart = np.abs(plain[one] - plain[other])
        far = apart > 0.1 * plain.max()
        slopes = (measured[one] - measured[other])[far] / (plain[one] - plain[other])[far]
        slowness = _weighted_median(slopes, apart[far])
        extra_s = float(np.median(measured - slowness * plain))
        if slowness > 0.0 and 0.0 <= extra_s <= EXTRA_MAX_S:
            # Kendall's variance of the number of pairs in order, as in Sen 1968
            share = 1.96 * sqrt(n * (n - 1) * (2 * n + 5) / 18.0) / (n * (n - 1) / 2) / 2.0
            low, high = np.quantile(slopes, (max(0.0, 0.5 - share), min(1.0, 0.5 + share))).tolist()
            return LinkPace(_bounded(slowness), extra_s), max(0.0, min(low, slowness)), max(high, slowness)
    slowness = _bounded(_weighted_median(measured / plain, plain))
    ratios = np.maximum(measured / plain / slowness, SLOWNESS_MIN)[plain >= np.median(plain)]
    spread = 1.4826 * float(np.median(np.abs(np.log(ratios))))
    width = exp(min(1.96 * 1.2533 * spread / sqrt(len(ratios)), 50.0))  # the standard error of a median
    return LinkPace(slowness, 0.0), slowness / width, slowness * width


def _weighted_median(values: Sequence[float] | FloatColumn, weights: Sequence[float] | FloatColumn) -> float:
    order = np.argsort(values)
    reached = np.cumsum(np.asarray(weights)[order])
    at = int(np.searchsorted(reached, reached[-1] / 2))
    return float(np.asarray(values)[order[min(at, len(order) - 1)]])


_FIT_S = 1.0
