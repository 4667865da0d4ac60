"""Grove's topologies, in both spellings, and with the mistakes that other people make."""

import pytest

from kvrouter.operator.api import ClusterTopology, Level, read_topology, topology_label
from kvrouter.operator.api.names import LEVEL_CHARS_MAX
from kvrouter.operator.cluster_info import by_name

LEVELS = (Level("zone", "topology.kubernetes.io/zone"), Level("rack", "example.com/rack"))


@pytest.mark.parametrize(
    ("kind", "key"), [("ClusterTopology", "labelKey"), ("ClusterTopologyBinding", "key")]
)
def test_both_spellings_say_the_same(kind: str, key: str) -> None:
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
def test_what_is_no_topology_is_none(found: object) -> None:
    assert read_topology(found) is None


@pytest.mark.parametrize("spec", [None, [], {}, {"levels": None}, {"levels": {"zone": "a"}}])
def test_a_topology_without_levels_is_one(spec: object) -> None:
    assert read_topology({"metadata": {"name": "fabric"}, "spec": spec}) == ClusterTopology("fabric", ())


def test_the_longest_level_fits_into_a_label() -> None:
    key = topology_label("x" * LEVEL_CHARS_MAX)
    assert len(key.partition("/")[2]) == 63


def test_of_two_kinds_of_one_name_the_newer_is_taken() -> None:
    newer = ClusterTopology("fabric", LEVELS)
    older = ClusterTopology("fabric", (), "ClusterTopology")
    assert by_name([newer, older]) == by_name([older, newer]) == {"fabric": newer}
