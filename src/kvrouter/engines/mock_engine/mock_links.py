"""Links between mock workers: which link a transfer uses, which transfers share it, and how it changes."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvrouter.core.ids import WorkerId
from kvrouter.kernel.topology.link_table import Link, LinkTable, distance

LevelName = Annotated[str, Meta(max_length=63)]
DomainValue = Annotated[str, Meta(max_length=189)]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a worker: its value at each known level, and its id if it has no values."""

    domains: Annotated[dict[LevelName, DomainValue], Meta(max_length=16)]
    worker_id: Annotated[WorkerId, Meta(ge=0, le=(1 << 63) - 1)]


class DomainPair(NamedTuple):
    """The source and target domain of a transfer: values of the report level, "" if unknown."""

    src_domain: str
    dst_domain: str


class LinkName(NamedTuple):
    """The key of transfers that share a link: a level, and the values of both ends from the broadest level
    down to it. Without a level, the link connects two workers, and the ends are their numbers.
    """

    level: str | None
    src: tuple[str, ...]
    dst: tuple[str, ...]


class LinkChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new bandwidth or latency of the link between two values of ``level``, in both directions: as a factor
    of its first value, or absolute. Fields that are None stay unchanged.
    """

    level: str
    between: tuple[str, str]
    bandwidth_factor: float | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_factor: float | None = None
    latency_s: float | None = None

    def concerns(self, name: LinkName) -> bool:
        """Whether it is about the link of this name."""
        return name.level == self.level and (name.src[-1], name.dst[-1]) in (self.between, self.between[::-1])

    def changed(self, first: Link, link: Link) -> Link:
        """Return what becomes of ``link``, which was ``first`` at the beginning."""
        latency_s, bandwidth = link.latency_s, link.bandwidth_bytes_per_s
        if self.latency_factor is not None:
            latency_s = first.latency_s * self.latency_factor
        elif self.latency_s is not None:
            latency_s = self.latency_s
        if self.bandwidth_factor is not None:
            bandwidth = first.bandwidth_bytes_per_s * self.bandwidth_factor
        elif self.bandwidth_bytes_per_s is not None:
            bandwidth = self.bandwidth_bytes_per_s
        return replace(link, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """The links of ``table``, by which decisions are weighed too, over ``levels``, broadest first.

    Transfers are reported by the values of ``report_level``.
    """

    table: LinkTable = LinkTable()
    levels: tuple[str, ...] = ()
    report_level: str | None = None

    def place(self, domains: Mapping[str, str], worker_id: WorkerId) -> Place:
        """Return the place of a worker: its values of the known levels."""
        return Place({level: domains[level] for level in self.levels if level in domains}, worker_id)

    def between(self, src_domain: str, dst_domain: str) -> Link:
        """Return the link between workers of which only their values of ``report_level`` are known."""
        level = self.report_level or ""
        return self.table.link({level: src_domain}, {level: dst_domain}, self.levels)

    def shared(self, src: Place, dst: Place) -> tuple[LinkName, Link]:
        """Return the link from one worker to another, and its name: all transfers over links of one name
        share it.

        That is the link of the level, or of the pair of values, by which the table decides; without one, that
        of the broadest level in which the two differ, else of the narrowest that they share, else their own.
        """
        link, level = self.table.decided(src.domains, dst.domains, self.levels)
        if level is None:
            level = self._differing(src, dst) or distance(src.domains, dst.domains, self.levels).level
        if level is None:
            return LinkName(None, (str(src.worker_id),), (str(dst.worker_id),)), link
        return LinkName(level, self._down_to(level, src), self._down_to(level, dst)), link

    def pair(self, src: Place, dst: Place) -> DomainPair:
        """Return the pair of domains under which a transfer is reported."""
        level = self.report_level or ""
        return DomainPair(src.domains.get(level, ""), dst.domains.get(level, ""))

    def _differing(self, src: Place, dst: Place) -> str | None:
        for level in self.levels:
            one, other = src.domains.get(level), dst.domains.get(level)
            if one is not None and other is not None and one != other:
                return level
        return None

    def _down_to(self, level: str, place: Place) -> tuple[str, ...]:
        around = self.levels[: self.levels.index(level) + 1]
        return tuple(place.domains.get(each, "") for each in around)
