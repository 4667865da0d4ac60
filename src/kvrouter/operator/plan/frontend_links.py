"""The link table of frontends: the deployment's own links take precedence over its topology's."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from kvrouter.fleetfile.fleet_file import LinkSpec, LinksSpec, PairLink
from kvrouter.kernel.topology.link_table import ACROSS_LINK, Link
from kvrouter.operator.api.qos import QOS_PAIRS_MAX, LinkQoS, NetworkQoS, PairQoS
from kvrouter.operator.cluster_info import ClusterInfo
from kvrouter.operator.labels.level_labels import Resolution
from kvrouter.operator.policy import DeploymentPolicy, FrontendSettings, NamedTopology
from kvrouter.settings.problems import Problem, did_you_mean

SAME_LEVEL_LINK = Link(0.0005, 12.5e9)
"""The link inside every level, where a weight of distance is stated and no link: 100 Gbit/s."""

ASSUMED = (
    "weighs links that are assumed, 100 Gbit/s inside every level and 25 Gbit/s otherwise: measure them and "
    "write networkQoS"
)


class FrontendLinks(NamedTuple):
    """The link settings of frontends: the weight of links, and the links in the form of the router's setting.

    Either is None if it is not stated. ``is_assumed``: links have a weight, and are assumed.
    """

    weight: float | None = None
    table: str | None = None
    is_assumed: bool = False


def qos_of_topology(
    policy: DeploymentPolicy, resolution: Resolution, cluster_info: ClusterInfo, last: NetworkQoS | None
) -> NetworkQoS | None:
    """Return the links that the policy's topology states; while it cannot be found, ``last``, those that it
    stated before.
    """
    if not isinstance(policy.source, NamedTopology):
        return None
    return cluster_info.topologies[policy.source.name].network_qos if resolution.source.is_found else last


def frontend_links(
    settings: FrontendSettings, of_topology: NetworkQoS | None, resolution: Resolution
) -> tuple[FrontendLinks, list[Problem]]:
    """Return frontends' link settings, and a warning if pairs beyond ``QOS_PAIRS_MAX`` are dropped.

    The deployment's link of a level, a pair or ``across`` overrides the topology's.
    """
    own, broader = settings.qos or NetworkQoS(), of_topology or NetworkQoS()
    levels = [level.domain for level in resolution.level_labels]
    # While the topology cannot be found its levels are unknown, and all stated links stay.
    known = levels if resolution.source.is_found else None
    fields: dict[str, object] = {}
    within = {
        each.level: _spec_of(each)
        for qos in (broader, own)
        for each in qos.levels
        if known is None or each.level in known
    }
    if within:
        fields["within"] = within
    across = own.across or broader.across
    if across is not None:
        fields["across"] = _spec_of(across)
    pairs: dict[tuple[str, str, str], PairLink] = {}
    for each in (*own.pairs, *broader.pairs):
        if known is None or each.level in known:
            pairs.setdefault(each.place, _pair_of(each))
    if pairs:
        fields["pairs"] = tuple(pairs.values())[:QOS_PAIRS_MAX]
    if fields:
        warnings = []
        if len(pairs) > QOS_PAIRS_MAX:
            must = f"and the topology's are {len(pairs)}: the last, beyond {QOS_PAIRS_MAX}, are left out"
            warnings.append(Problem((*settings.qos_at, "pairs"), must))
        return FrontendLinks(settings.weight, _text(LinksSpec.model_validate(fields))), warnings
    if settings.weight:
        same = dict.fromkeys(levels, _spec(SAME_LEVEL_LINK))
        assumed = LinksSpec(within=same, across=_spec(ACROSS_LINK))
        return FrontendLinks(settings.weight, _text(assumed), is_assumed=True), []
    return FrontendLinks(settings.weight), []


def level_problems(
    settings: FrontendSettings, policy: DeploymentPolicy, resolution: Resolution
) -> Iterator[Problem]:
    """Yield a problem for each link of the deployment at an unknown level; yields nothing while the topology
    cannot be found.
    """
    if settings.qos is None or not resolution.source.is_found:
        return
    levels = [level.domain for level in resolution.level_labels]
    named = [
        *((("levels", index), link.level) for index, link in enumerate(settings.qos.levels)),
        *((("pairs", index), link.level) for index, link in enumerate(settings.qos.pairs)),
    ]
    for place, level in named:
        if level not in levels:
            yield Problem((*settings.qos_at, *place, "level"), unknown_level(level, policy, levels))


def unknown_level(level: str, policy: DeploymentPolicy, levels: Sequence[str]) -> str:
    """Return the problem with a level that is not among ``levels``, those of the policy's source."""
    must = f"{level!r} is no level of {policy.source}, which has {', '.join(levels)}"
    return f"{must}{did_you_mean(level, levels)}"


def qos_text(qos: NetworkQoS) -> str:
    """Return ``qos`` in the form of an annotation."""
    return _json(qos.model_dump(mode="json", by_alias=True, exclude_none=True))


def read_qos(annotation: str | None) -> NetworkQoS | None:
    """Return the links that :func:`qos_text` wrote; None for any other text."""
    try:
        return None if annotation is None else NetworkQoS.model_validate_json(annotation)
    except ValidationError:
        return None


def _text(links: LinksSpec) -> str:
    return _json(links.model_dump(mode="json", exclude_none=True, exclude_unset=True))


def _json(fields: object) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _spec(link: Link) -> LinkSpec:
    return LinkSpec(latency_s=link.latency_s, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s)


def _spec_of(link: LinkQoS) -> LinkSpec:
    return LinkSpec(
        latency_s=link.latency_seconds,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_second,
        price_per_gb=link.price_per_gb,
    )


def _pair_of(link: PairQoS) -> PairLink:
    return PairLink(level=link.level, between=link.between, **dict(_spec_of(link)))
