"""How fast links are, learned from handoffs: what passed between the end of a prefill and the first token.

Of a transfer of ``plain_s`` by its table, with what it shares the link with, ``seen_s`` is what it took
beyond the table's latency and the decode worker's steps. Over the last transfers of one kind of link (within
one value of a level, or between two of its values) ::

    seen_s = slowness · plain_s + extra_s

is fitted by the median of the slopes between all pairs of transfers, each weighed by their distance (Theil
1950, Sen 1968; extra_s is the median of what is left), and its slowness has the 95 % interval of a median. A
link of its own pace is one whose transfers differ from its kind's by more than :data:`ALIKE`.

Without evidence a link is as its kind is, a kind as the others are in the middle, and all as the table has
them; what lies within the interval, or within ALIKE, changes nothing. Transfers that are late already count
before they end, so that a link which hardly moves anything is noticed while it does not, unless as many
others arrive meanwhile: then the rank is late that they go to. One that was stuck counts a third when it
has arrived, until another one is in time. A change to twice or half as long, seen by transfers in a row, ends
what was seen before. What was not heard of for long becomes again what its kind is by halves, so that it is
tried again.
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
from kvrouter.kernel.placement.events import PlacementEvents
from kvrouter.kernel.topology.links import (
    ACROSS_LINK,
    AS_GIVEN,
    UNKNOWN_KIND,
    Link,
    LinkKind,
    LinkPace,
    LinkState,
    SharedLink,
)

KIND_TRANSFERS_MAX = 64
LINK_TRANSFERS_MAX = 16
"""So many of the last transfers count."""

KINDS_MAX = 64
"""Of so many kinds something is learned: a fleet has two for each of its levels."""

LINKS_MAX = 4096
"""Of so many links the transfers are kept apart; of more, what was unused for longest is forgotten."""

FIT_TRANSFERS = 3
"""So many transfers show how fast a kind of link is,"""

LINE_TRANSFERS = 6
"""and so many of different length what each of them takes more."""

ALIKE = 1.25
"""Links that differ by less count as alike."""

OWN_TRANSFERS = 3
"""So many of its own transfers distinguish a link from others of its kind."""

CHANGED = 2.0
"""A link that takes so many times as long, or so many times less, has changed,"""

CHANGED_TRANSFERS = 3
"""when so many transfers in a row say so."""

LATE_S = 0.02
"""A transfer is late that takes this much more than CHANGED times what was expected;"""

STUCK_S = 0.5
"""one alone is enough that takes this much more."""

PLAIN_MIN_S = 0.002
"""Shorter transfers say nothing of bandwidth."""

EXTRA_MAX_S = 0.2
"""What transfers take more, each, is more than this by some mistake."""

FORGET_S = 240.0
"""After so long without a transfer half of what sets a link apart is forgotten."""

SLOW = 2.0
WELL = 1.5
"""A link is slow that takes SLOW times as long as it should, until that is WELL or less."""

SLOWNESS_MIN = 1e-3
SLOWNESS_MAX = 1e4


class Seen(NamedTuple):
    """One transfer."""

    link: SharedLink | None
    table: Link
    began_s: float
    at_s: float
    plain_s: float
    seen_s: float
    seen_by: RouterId = RouterId("")
    number: int = 0
    """Its number among those of the router that saw it."""

    @property
    def kind(self) -> LinkKind:
        """What kind of link it went over."""
        return UNKNOWN_KIND if self.link is None else self.link.kind


class LinkReading(NamedTuple):
    """What is known of a kind of link, or of one link, which ``name`` says."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    slowness: float
    """Over what the table says."""
    low: float | None
    high: float | None
    """The 95 % interval of a kind's slowness; None for one link."""
    transfers: int
    is_slow: bool


class LearnedLinks:
    """The paces of one model's links, in ``state``. ``now_s`` is a moment of one monotonic clock."""

    def __init__(self, state: LinkState, events: PlacementEvents) -> None:
        self._state = state
        self.events = events
        self._kinds: dict[LinkKind, _Kind] = {}
        self._links: dict[SharedLink, _Link] = {}
        self._unsettled: set[SharedLink] = set()
        """Links whose pace may be another one at the next refresh."""
        self._levels: set[str] = set()
        """Levels over which something was seen."""
        self._others = 1.0
        """The slowness of kinds of which nothing was seen."""

    def note(self, seen: Seen) -> None:
        """A transfer arrived."""
        if seen.plain_s < PLAIN_MIN_S:
            return
        kind = self._kinds.get(seen.kind)
        if kind is None:
            if len(self._kinds) >= KINDS_MAX:
                return
            kind = self._kinds[seen.kind] = _Kind()
        kind.add(seen)
        if seen.link is not None:
            link = self._links.pop(seen.link, None) or _Link()
            self._links[seen.link] = link  # the one that was used last comes last
            link.seen.append(seen)
            self._levels.update(level for level, _ in seen.link.src)
            self._unsettled.add(seen.link)
            if _has_changed(link.seen, self._settled(seen), CHANGED_TRANSFERS):
                since_s = link.seen[-CHANGED_TRANSFERS].at_s
                _keep_last(link.seen, CHANGED_TRANSFERS)
                kind.forget(seen.link, since_s)
            while len(self._links) > LINKS_MAX:
                self._forget(next(iter(self._links)))
        if kind.has_changed():
            _keep_last(kind.seen, CHANGED_TRANSFERS + 1)

    def refresh(self, on_the_way: Iterable[Seen], *, now_s: float) -> None:
        """Let each link have the pace that is known of it now."""
        moving: defaultdict[LinkKind, set[SharedLink | None]] = defaultdict(set)
        late: defaultdict[SharedLink | None, list[Seen]] = defaultdict(list)
        for seen in on_the_way:
            moving[seen.kind].add(seen.link)
            if _is_late(seen, self._settled(seen)):
                late[seen.link].append(seen)
        for key, kind in self._kinds.items():
            stuck = [seen for link, found in late.items() if _kind_of(link) == key for seen in found]
            self._settle_kind(key, kind, stuck, moving[key], now_s)
        self._settle_others()
        unsettled = self._unsettled | {link for link in late if link is not None}
        self._unsettled = set()
        for name in unsettled:
            self._settle_link(name, late.get(name, ()), now_s)

    def samples(self) -> list[Seen]:
        """Return the transfers that count, the oldest first."""
        found = {id(seen): seen for kind in self._kinds.values() for seen in kind.seen}
        found |= {id(seen): seen for link in self._links.values() for seen in link.seen}
        return sorted(found.values(), key=lambda seen: seen.at_s)

    def forget(self) -> None:
        """Begin again: every link is as its table has it."""
        for name in tuple(self._links):
            self._forget(name)
        for of in [of for of, _ in self._state.paces()]:
            self._state.set_pace(of, None)
        for key, kind in self._kinds.items():
            if kind.is_slow:
                self.events.link_turned(kind_name(key), is_slow=False, slowness=1.0)
        self._kinds.clear()
        self._unsettled.clear()
        self._levels.clear()
        self._others = 1.0

    def _settled(self, seen: Seen) -> LinkPace:
        """The pace of a link by what arrived."""
        kind = self._kinds.get(seen.kind)
        pace = AS_GIVEN if kind is None else kind.settled
        link = None if seen.link is None else self._links.get(seen.link)
        return pace if link is None or link.settled is None else pace._replace(slowness=link.settled)

    def readings(self) -> list[LinkReading]:
        """What is known: of each kind, then of each link whose pace is its own; slow ones first."""
        kinds = [kind.reading(key) for key, kind in self._kinds.items() if kind.seen]
        links = [
            link.reading(name, self._kinds[name.kind])
            for name, link in self._links.items()
            if link.slowness is not None and link.seen
        ]
        return sorted(kinds, key=lambda kind: kind.name) + sorted(
            links, key=lambda link: (not link.is_slow, link.name)
        )

    @property
    def are_alike(self) -> bool:
        """Whether nothing that was seen distinguishes one link from another."""
        if any(link.slowness is not None for link in self._links.values()):
            return False
        s_per_byte = [
            kind.pace.slowness / kind.seen[-1].table.bandwidth_bytes_per_s
            for kind in self._kinds.values()
            if kind.seen
        ]
        return not s_per_byte or max(s_per_byte) <= ALIKE * min(s_per_byte)

    def _settle_kind(
        self,
        key: LinkKind,
        kind: "_Kind",
        late: Sequence[Seen],
        moving: Set[SharedLink | None],
        now_s: float,
    ) -> None:
        kind.fit(now_s)
        pace = kind.settled = kind.pace_now(self._others, now_s)
        n_late = len({seen.link for seen in late})
        n_links = len(moving | {seen.link for seen in kind.seen})
        if n_late >= CHANGED_TRANSFERS and 2 * n_late > n_links:
            pace = pace._replace(slowness=max(pace.slowness, median(map(_ratio, late))))
        kind.pace = pace
        self._state.set_pace(key, None if pace == AS_GIVEN else pace)
        turned = kind.judge()
        if turned is not None:
            self.events.link_turned(kind_name(key), is_slow=kind.is_slow, slowness=turned)

    def _settle_others(self) -> None:
        """Kinds of which nothing was seen are as slow as the others are in the middle; never faster than the
        table has them.
        """
        fitted = [kind.pace.slowness for kind in self._kinds.values() if kind.is_fitted]
        self._others = max(1.0, median(fitted)) if fitted else 1.0
        if self._others < ALIKE:
            self._others = 1.0
        pace = None if self._others == 1.0 else LinkPace(self._others, 0.0)
        for level in self._levels:
            for within in (True, False):
                if LinkKind(level, within) not in self._kinds:
                    self._state.set_pace(LinkKind(level, within), pace)

    def _settle_link(self, name: SharedLink, late: Sequence[Seen], now_s: float) -> None:
        link, kind_pace = self._links.get(name), self._state.pace_of_kind(name.kind)
        if link is None:
            link = self._links[name] = _Link()
        own = link.own(kind_pace, now_s)
        link.settled = own if _differ(own, kind_pace.slowness) else None
        settled = kind_pace if link.settled is None else kind_pace._replace(slowness=link.settled)
        late = late if _is_the_link(late, link.seen, settled) else ()
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
        is_slow = relative >= (WELL if link.is_slow else SLOW)
        if is_slow != link.is_slow and is_sure:
            link.is_slow = is_slow
            self.events.link_turned(link_name(name), is_slow=is_slow, slowness=relative)
        if not link.seen and not late:
            self._forget(name)

    def _forget(self, name: SharedLink) -> None:
        if self._links.pop(name).is_slow:
            self.events.link_turned(link_name(name), is_slow=False, slowness=1.0)
        self._unsettled.discard(name)
        self._state.set_pace(name, None)


def kind_name(kind: LinkKind) -> str:
    """Return what links of a kind are called."""
    if kind.level is None:
        return "between unknown places"
    return f"within one {kind.level}" if kind.within else f"between two values of {kind.level}"


def link_name(link: SharedLink) -> str:
    """Return what one link is called: where it begins and ends."""
    begin = "/".join(f"{level}={value}" for level, value in link.src)
    return f"{begin} to {link.src[-1][0]}={link.dst}"


class _Kind:
    """What the last transfers over links of one kind took."""

    def __init__(self) -> None:
        self.seen: deque[Seen] = deque(maxlen=KIND_TRANSFERS_MAX)
        self.pace = self.settled = AS_GIVEN
        """What is known now, and what of it by transfers that arrived."""
        self.is_slow = False
        self._fitted: LinkPace | None = None
        self._low, self._high = 0.0, inf
        self._fitted_s = -inf
        self._is_new = False
        self._shown: float | None = None

    def add(self, seen: Seen) -> None:
        self.seen.append(seen)
        self._is_new = True

    def forget(self, link: SharedLink, since_s: float) -> None:
        """What one link showed before a moment no longer counts."""
        kept = [seen for seen in self.seen if seen.link != link or seen.at_s >= since_s]
        self.seen = deque(kept, maxlen=KIND_TRANSFERS_MAX)
        self._is_new = True

    def has_changed(self) -> bool:
        """Whether the last transfers, over more than one link where there are more, all say so."""
        wanted = CHANGED_TRANSFERS + 1
        last = list(self.seen)[-wanted:]
        links = {seen.link for seen in self.seen}
        if len(links) > 1 and len({seen.link for seen in last}) < 2:
            return False
        return _has_changed(self.seen, self.pace, wanted)

    @property
    def is_fitted(self) -> bool:
        return self._fitted is not None

    def fit(self, now_s: float) -> None:
        """Fit a line, where something is new."""
        n = len(self.seen)
        is_due = n <= LINK_TRANSFERS_MAX or now_s - self._fitted_s >= _FIT_S
        if n >= FIT_TRANSFERS and self._is_new and is_due:
            self._fitted, self._low, self._high = _fit(self.seen)
            self._fitted_s, self._is_new = now_s, False

    def pace_now(self, others: float, now_s: float) -> LinkPace:
        """Return the pace of the kind's links now, where other kinds take ``others`` times as long."""
        if self._fitted is None:
            return AS_GIVEN if others == 1.0 else LinkPace(others, 0.0)
        slowness, extra_s = self._fitted
        if self._low <= ALIKE and self._high >= 1.0 / ALIKE:
            slowness = 1.0
        kept = _kept(self.seen[-1].at_s, now_s)
        return LinkPace(exp(log(slowness) * kept), extra_s * kept)

    def judge(self) -> float | None:
        """Return how slow it is over what it should be, where it has just become slow, or well again."""
        if self._fitted is None:
            return None
        should = self._shown
        if should is None:
            is_given = self.seen[-1].table != ACROSS_LINK  # else nobody said how fast it is
            should = 1.0 if is_given else self.pace.slowness
        relative = self.pace.slowness / should
        is_slow = relative >= (WELL if self.is_slow else SLOW)
        if not is_slow and len(self.seen) > LINK_TRANSFERS_MAX:
            self._shown = self.pace.slowness
        if is_slow == self.is_slow:
            return None
        self.is_slow = is_slow
        return relative

    def reading(self, key: LinkKind) -> LinkReading:
        table, pace = self.seen[-1].table, self.pace
        return LinkReading(
            name=kind_name(key),
            latency_s=table.latency_s + pace.extra_s,
            bandwidth_bytes_per_s=table.bandwidth_bytes_per_s / pace.slowness,
            slowness=pace.slowness,
            low=self._low,
            high=self._high,
            transfers=len(self.seen),
            is_slow=self.is_slow,
        )


class _Link:
    """What the last transfers over one link took. ``slowness`` is None where it is that of its kind, and
    ``settled`` is what of it transfers showed that arrived.
    """

    def __init__(self) -> None:
        self.seen: deque[Seen] = deque(maxlen=LINK_TRANSFERS_MAX)
        self.slowness: float | None = None
        self.settled: float | None = None
        self.is_slow = False

    def own(self, kind: LinkPace, now_s: float) -> float:
        """Return its slowness now: that of its kind counts as one more transfer."""
        if len(self.seen) < OWN_TRANSFERS:
            return kind.slowness
        weights = [seen.plain_s for seen in self.seen]
        ratios = [_bounded((seen.seen_s - kind.extra_s) / seen.plain_s) for seen in self.seen]
        own = _weighted_median([*ratios, kind.slowness], [*weights, sum(weights) / len(weights)])
        kept = _kept(self.seen[-1].at_s, now_s)
        return kind.slowness * exp(log(own / kind.slowness) * kept)

    def suspected(self, kind: LinkPace, now_s: float) -> float:
        """Return its slowness as the last transfers have it that were stuck, by their share of those that
        would settle it: one that took seconds need not come thrice before others go elsewhere.
        """
        if not self.seen:
            return kind.slowness
        last_s = self.seen[-1].at_s
        pace = kind._replace(slowness=self.own(kind, last_s))
        last = islice(reversed(self.seen), CHANGED_TRANSFERS)
        stuck = list(takewhile(lambda seen: _is_late(seen, pace) and _is_stuck((seen,), pace), last))
        if not stuck:
            return kind.slowness
        share = len(stuck) / CHANGED_TRANSFERS
        suspected = log(pace.slowness) * (1.0 - share) + log(median(map(_ratio, stuck))) * share
        return kind.slowness * exp((suspected - log(kind.slowness)) * _kept(last_s, now_s))

    def ended_late(self, pace: LinkPace, now_s: float) -> bool:
        """Whether the transfer that arrived last, not long ago, was late: those that were late on their way
        are too few to settle a pace, and do not say that the link is well.
        """
        return bool(self.seen) and now_s - self.seen[-1].at_s < FORGET_S and _is_late(self.seen[-1], pace)

    def reading(self, name: SharedLink, kind: _Kind) -> LinkReading:
        of_kind, table = kind.reading(name.kind), self.seen[-1].table
        slowness = kind.pace.slowness if self.slowness is None else self.slowness
        return of_kind._replace(
            name=link_name(name),
            bandwidth_bytes_per_s=table.bandwidth_bytes_per_s / slowness,
            slowness=slowness,
            low=None,
            high=None,
            transfers=len(self.seen),
            is_slow=self.is_slow,
        )


def _kept(last_s: float, now_s: float) -> float:
    """Return the share that is not forgotten of what was last heard of then."""
    return float(2.0 ** -(max(0.0, now_s - last_s) / FORGET_S))


def _differ(one: float, other: float) -> bool:
    return abs(log(one / other)) > log(ALIKE)


def _kind_of(link: SharedLink | None) -> LinkKind:
    return UNKNOWN_KIND if link is None else link.kind


def _ratio(seen: Seen) -> float:
    return _bounded(seen.seen_s / seen.plain_s)


def _bounded(slowness: float) -> float:
    return min(max(slowness, SLOWNESS_MIN), SLOWNESS_MAX)


def _is_late(seen: Seen, pace: LinkPace) -> bool:
    expected_s = seen.plain_s * pace.slowness + pace.extra_s
    return seen.plain_s >= PLAIN_MIN_S and seen.seen_s > CHANGED * expected_s + LATE_S


def _is_the_link(late: Sequence[Seen], seen: Iterable[Seen], pace: LinkPace) -> bool:
    """Whether the link holds up those that are late, and not where they go: as many others that began no
    sooner would have arrived in time.
    """
    if not late:
        return False
    since_s = min(each.began_s for each in late)
    in_time = sum(each.began_s >= since_s and not _is_late(each, pace) for each in seen)
    return in_time < len(late)


def _is_stuck(late: Sequence[Seen], pace: LinkPace) -> bool:
    return any(seen.seen_s - seen.plain_s * pace.slowness > STUCK_S for seen in late)


def _has_changed(seen: Sequence[Seen], pace: LinkPace, wanted: int) -> bool:
    """Whether the last transfers, and not all of them, took much more or much less than ``pace`` says."""
    if len(seen) <= wanted:
        return False
    last = list(seen)[-wanted:]
    expected = [each.plain_s * pace.slowness + pace.extra_s for each in last]
    slower = all(each.seen_s > CHANGED * one + LATE_S / 2 for each, one in zip(last, expected, strict=True))
    faster = all(CHANGED * each.seen_s < one for each, one in zip(last, expected, strict=True))
    return slower or faster


def _keep_last(seen: deque[Seen], n: int) -> None:
    while len(seen) > n:
        seen.popleft()


def _fit(seen: Sequence[Seen]) -> tuple[LinkPace, float, float]:
    """The line through transfers, and the interval of its slope."""
    plain = np.array([each.plain_s for each in seen])
    took = np.array([each.seen_s for each in seen])
    n = len(plain)
    if n >= LINE_TRANSFERS and plain.max() >= 2.0 * plain.min():
        one, other = np.triu_indices(n, 1)
        apart = np.abs(plain[one] - plain[other])
        far = apart > 0.1 * plain.max()
        slopes = (took[one] - took[other])[far] / (plain[one] - plain[other])[far]
        slowness = _weighted_median(slopes, apart[far])
        extra_s = float(np.median(took - slowness * plain))
        if slowness > 0.0 and 0.0 <= extra_s <= EXTRA_MAX_S:
            # Kendall's variance of the number of pairs in order, as in Sen 1968
            share = 1.96 * sqrt(n * (n - 1) * (2 * n + 5) / 18.0) / (n * (n - 1) / 2) / 2.0
            low, high = np.quantile(slopes, (max(0.0, 0.5 - share), min(1.0, 0.5 + share))).tolist()
            return LinkPace(_bounded(slowness), extra_s), max(0.0, min(low, slowness)), max(high, slowness)
    slowness = _bounded(_weighted_median(took / plain, plain))
    ratios = np.maximum(took / plain / slowness, SLOWNESS_MIN)[plain >= np.median(plain)]
    spread = 1.4826 * float(np.median(np.abs(np.log(ratios))))
    width = exp(min(1.96 * 1.2533 * spread / sqrt(len(ratios)), 50.0))  # the standard error of a median
    return LinkPace(slowness, 0.0), slowness / width, slowness * width


def _weighted_median(values: Sequence[float] | FloatColumn, weights: Sequence[float] | FloatColumn) -> float:
    order = np.argsort(values)
    reached = np.cumsum(np.asarray(weights)[order])
    at = int(np.searchsorted(reached, reached[-1] / 2))
    return float(np.asarray(values)[order[min(at, len(order) - 1)]])


_FIT_S = 1.0
