"""Grove's topologies, in both spellings, and with the mistakes that other people make."""

import pytest

from kvrouter.operator.api.grove import ClusterTopology, Level, read_topology
from kvrouter.operator.api.names import LEVEL_CHARS_MAX, topology_label
from kvrouter.operator.api.qos import QOS_LEVELS_MAX, QOS_PAIRS_MAX, LevelQoS, LinkQoS, NetworkQoS, PairQoS
from kvrouter.operator.cluster_info import by_name

LEVELS = (Level("zone", "topology.kubernetes.io/zone"), Level("rack", "example.com/rack"))


@pytest.mark.parametrize(
    ("kind", "key"), [("ClusterTopology", "labelKey"), ("ClusterTopologyBinding", "key")]
)
def test_both_topology_kinds_of_grove_read_the_same(kind: str, key: str) -> None:
    found = read_topology(
        {
            "apiVersion": "grove.io/v1alpha1",
            "kind": kind,
            "metadata": {"name": "fabric"},
            "spec": {"levels": [{"domain": domain, key: label} for domain, label in LEVELS]},
        }
    )
    assert found == ClusterTopology("fabric", LEVELS, kind)
    assert found.domains == ("zone", "rack")
    assert found.label_key("rack") == "example.com/rack"
    assert found.label_key("host") is None


def test_levels_that_cannot_be_used_are_left_out_and_reported() -> None:
    levels = [
        {"domain": "zone", "key": "a.b/zone"},
        {"domain": "zone", "key": "a.b/zone-again"},
        {"domain": "rack-", "key": "a.b/rack"},
        {"domain": "x" * (LEVEL_CHARS_MAX + 1), "key": "a.b/x"},
        {"domain": "host"},
        "host",
        {"domain": "row", "key": "no key"},
        {"domain": "hall", "labelKey": f"{'a' * 254}/hall"},
    ]
    found = read_topology({"metadata": {"name": "fabric"}, "spec": {"levels": levels}})
    assert found is not None
    assert found.domains == ("zone",)
    wrong = [
        "'zone' is there twice",
        "'rack-' is not of lower-case",
        f"more than the {LEVEL_CHARS_MAX} characters",
        "needs a domain",
        "needs a domain",
        "its key 'no key' is no key of a label",
        "has too many characters before its '/'",
    ]
    for number, (oddity, why) in enumerate(zip(found.oddities, wrong, strict=True), start=1):
        assert oddity.startswith(f"ClusterTopologyBinding fabric: spec.levels[{number}]: ")
        assert why in oddity


@pytest.mark.parametrize("found", [None, [], {}, {"metadata": {}}, {"metadata": {"name": 3}}, "fabric"])
def test_document_without_a_name_is_not_read_as_a_topology(found: object) -> None:
    assert read_topology(found) is None


@pytest.mark.parametrize("spec", [None, [], {}, {"levels": None}, {"levels": {"zone": "a"}}])
def test_topology_without_valid_levels_is_read_as_an_empty_one(spec: object) -> None:
    assert read_topology({"metadata": {"name": "fabric"}, "spec": spec}) == ClusterTopology("fabric", ())


def test_the_longest_level_fits_into_a_label() -> None:
    key = topology_label("x" * LEVEL_CHARS_MAX)
    assert len(key.partition("/")[2]) == 63


LINK: dict[str, object] = {"latencySeconds": 0.001, "bandwidthBytesPerSecond": 25e9}
READ = LinkQoS(latency_seconds=0.001, bandwidth_bytes_per_second=25e9)


def of_links(whole: object, *of_levels: object) -> ClusterTopology:
    """A topology of zones and racks, whose levels and whose whole have these links."""
    levels = [
        {"domain": domain, "key": label, "networkQoS": link}
        for (domain, label), link in zip(LEVELS, (*of_levels, None, None), strict=False)
    ]
    found = read_topology({"metadata": {"name": "fabric"}, "spec": {"levels": levels, "networkQoS": whole}})
    assert found is not None
    assert found.levels == LEVELS
    return found


def test_topology_links_of_levels_across_and_pairs_are_read() -> None:
    whole = {
        "across": {**LINK, "pricePerGB": 0.02, "measuredBy": "somebody"},
        "pairs": [{**LINK, "level": "zone", "between": ["a", "b"]}],
    }
    found = of_links(whole, LINK)
    assert found.oddities == ()
    assert found.network_qos == NetworkQoS(
        levels=(LevelQoS(level="zone", **dict(READ)),),
        across=READ.model_copy(update={"price_per_gb": 0.02}),
        pairs=(PairQoS(level="zone", between=("a", "b"), **dict(READ)),),
    )


@pytest.mark.parametrize("whole", [None, {}, {"across": None, "pairs": None}, {"pairs": {}}])
def test_a_topology_that_states_no_links_has_none(whole: object) -> None:
    found = of_links(whole)
    assert (found.network_qos, found.oddities) == (None, ())


def test_links_that_cannot_be_used_are_left_out_and_reported() -> None:
    pair = {**LINK, "level": "zone", "between": ["a", "b"]}
    across: dict[str, object] = {**LINK, "bandwidthBytesPerSecond": 0}
    pairs: list[object] = [{**pair, "level": "host"}, pair, {**pair, "between": ["a", "b", "c"]}, 3]
    found = of_links(
        {"across": across, "pairs": pairs},
        {"latencySeconds": 0.1},
        "fast",
    )
    assert found.network_qos == NetworkQoS(pairs=(PairQoS(level="zone", between=("a", "b"), **dict(READ)),))
    at = "ClusterTopologyBinding fabric: spec."
    assert found.oddities == (
        f"{at}levels[0].networkQoS.bandwidthBytesPerSecond is required",
        f"{at}levels[1].networkQoS must be an object",
        f"{at}networkQoS.across.bandwidthBytesPerSecond must be > 0, not 0",
        f"{at}networkQoS.pairs[0].level 'host' is none of its levels",
        f"{at}networkQoS.pairs[2].between must have ≤ 2 entries",
        f"{at}networkQoS.pairs[3] must be an object",
    )
    assert of_links([]).oddities == (f"{at}networkQoS must be an object",)


def test_link_pairs_beyond_the_limit_are_left_out_and_reported() -> None:
    pairs = [{**LINK, "level": "zone", "between": ["a", f"z{number}"]} for number in range(QOS_PAIRS_MAX + 2)]
    found = of_links({"pairs": pairs})
    assert found.network_qos is not None
    assert len(found.network_qos.pairs) == QOS_PAIRS_MAX
    (oddity,) = found.oddities
    assert f"spec.networkQoS.pairs[{QOS_PAIRS_MAX}] and what follows is left out" in oddity


def test_levels_beyond_the_limit_have_no_links() -> None:
    levels = [
        {"domain": f"l{number}", "key": f"a.b/{number}", "networkQoS": LINK}
        for number in range(QOS_LEVELS_MAX + 1)
    ]
    found = read_topology({"metadata": {"name": "fabric"}, "spec": {"levels": levels}})
    assert found is not None
    assert found.network_qos is not None
    assert len(found.levels) == QOS_LEVELS_MAX + 1
    assert len(found.network_qos.levels) == QOS_LEVELS_MAX
    assert len(found.oddities) == 1


def test_topology_of_the_newer_kind_wins_where_names_are_equal() -> None:
    newer = ClusterTopology("fabric", LEVELS)
    older = ClusterTopology("fabric", (), "ClusterTopology")
    assert by_name([newer, older]) == by_name([older, newer]) == {"fabric": newer}
