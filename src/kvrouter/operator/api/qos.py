"""The quality of the network between workers, as a deployment and a topology state it."""

from typing import Annotated

from annotated_types import Ge, Gt, MaxLen, MinLen
from pydantic import Field, Strict

from kvrouter.operator.api.names import DomainName, LabelValue, ObjectPart, list_map

QOS_LEVELS_MAX = 16
QOS_PAIRS_MAX = 256
"""Pairs of places in one table: the table is the value of a variable, and those have 128 KiB on Linux."""

_Bandwidth = Annotated[float, Strict(), Gt(0)]
_NotNegative = Annotated[float, Strict(), Ge(0)]


class LinkQoS(ObjectPart):
    """One link by which KV travels."""

    latency_seconds: _NotNegative
    """Seconds until the first byte arrives."""
    bandwidth_bytes_per_second: _Bandwidth
    """Bytes a second, for all transfers on the link together."""
    price_per_gb: Annotated[_NotNegative | None, Field(alias="pricePerGB")] = None
    """What 10⁹ bytes over the link cost, in a currency that all links share. Left out, none is known."""


class LevelQoS(LinkQoS):
    """The link of two workers whose narrowest shared level with a link is ``level``."""

    level: DomainName
    """The level: one of the topology's, or the domain of ``label``."""


class PairQoS(LinkQoS):
    """The link between two values of a level; it overrides the links of levels."""

    level: DomainName
    """The level whose values are named."""
    between: Annotated[
        tuple[LabelValue, ...],
        MinLen(2),
        MaxLen(2),
        Field(json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ]
    """The two values, in either order: what node labels have."""

    @property
    def place(self) -> tuple[str, str, str]:
        """The level and its two values: the same whatever their order."""
        one, other = sorted(self.between)
        return self.level, one, other


class NetworkQoS(ObjectPart):
    """The links by which KV travels: by the narrowest level that two workers share, and between places."""

    levels: Annotated[
        tuple[LevelQoS, ...], MaxLen(QOS_LEVELS_MAX), Field(json_schema_extra=list_map("level"))
    ] = ()
    """The links of two workers that share a level; one without a link has that of the next broader one."""
    across: LinkQoS | None = None
    """The link of two workers that share no level with a link. Left out, 25 Gbit/s and 2 ms are assumed, or
    what the slowest of the levels has where that is slower."""
    pairs: Annotated[
        tuple[PairQoS, ...],
        MaxLen(QOS_PAIRS_MAX),
        Field(json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Links that were measured between two places; of several that fit, the first counts."""

    @property
    def is_empty(self) -> bool:
        """Whether it states no link."""
        return not self.levels and not self.pairs and self.across is None
