"""The links that frontends get: the deployment's own over its topology's, assumed ones, and a user's own."""

import json
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.fleetfile.fleet_file import LinksSpec
from kvrouter.fleetfile.fleet_workers import table_of_links
from kvrouter.kernel.topology.link_table import ACROSS_LINK, Link
from kvrouter.operator.api.deployment import DynamoGraphDeployment
from kvrouter.operator.api.grove import ClusterTopology
from kvrouter.operator.api.qos import QOS_LEVELS_MAX, QOS_PAIRS_MAX, LevelQoS, LinkQoS, NetworkQoS, PairQoS
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.plan.frontend_links import SAME_LEVEL_LINK, read_qos
from kvrouter.operator.plan.plan import QOS_ANNOTATION, Plan, plan
from kvrouter.settings.problems import dotted, parse_document
from kvrouter.settings.sources import load_settings
from tests.testing.planned_deployments import (
    DEFAULTS,
    FACTS,
    LEVELS,
    at,
    deployment,
    environment,
    of_kind,
    planned,
    templates,
)

Fields = dict[str, JsonValue]
TABLE = "KVROUTER_ROUTER_LINKS"
WEIGHT = "KVROUTER_KV_TRANSFER_WEIGHT"
ON_FRONTEND: Fields = {"level": "zone"}
ARGUMENTS_BYTES_MAX = 128 * 1024
"""The longest that Linux takes as one variable."""


def link(latency_s: float, **more: JsonValue) -> Fields:
    return {"latencySeconds": latency_s, "bandwidthBytesPerSecond": 1e10, **more}


def spec(latency_s: float, **more: JsonValue) -> Fields:
    return {"latency_s": latency_s, "bandwidth_bytes_per_s": 1e10, **more}


def level_qos(level: str, latency_s: float) -> LevelQoS:
    return LevelQoS(level=level, latency_seconds=latency_s, bandwidth_bytes_per_second=1e10)


def pair_qos(level: str, one: str, other: str, latency_s: float) -> PairQoS:
    return PairQoS(
        level=level, between=(one, other), latency_seconds=latency_s, bandwidth_bytes_per_second=1e10
    )


STATED = NetworkQoS(
    levels=(level_qos("zone", 0.1), level_qos("rack", 0.2)),
    across=LinkQoS(latency_seconds=0.3, bandwidth_bytes_per_second=1e10),
    pairs=(pair_qos("zone", "a", "b", 0.4), pair_qos("zone", "a", "c", 0.5)),
)


def stating(qos: NetworkQoS | None, levels: tuple[object, ...] = LEVELS) -> ClusterInfo:
    """A cluster whose topology states these links."""
    topology = ClusterTopology("gpu-fabric", LEVELS[: len(levels)], network_qos=qos)
    return ClusterInfo(grove=Grove.PRESENT, topologies={"gpu-fabric": topology})


def weighed(qos: Fields | None = None, **fields: JsonValue) -> DynamoGraphDeployment:
    stated: Fields = {} if qos is None else {"networkQoS": qos}
    return deployment(of_frontend={**ON_FRONTEND, **stated, **fields})


def variables(found: Plan) -> dict[str, str]:
    return environment(templates(found)["frontend"])


def table(found: Plan) -> JsonValue:
    return cast(JsonValue, json.loads(variables(found)[TABLE]))


def test_frontend_gets_no_link_table_without_links_or_a_weight() -> None:
    for of in (deployment(of_frontend=ON_FRONTEND), weighed({}), weighed(label="a.b/zone")):
        environ = variables(planned(of))
        assert TABLE not in environ
        assert WEIGHT not in environ
    assert QOS_ANNOTATION not in str(planned(weighed({})).manifests)


def test_a_deployments_links_are_written_as_the_router_reads_them() -> None:
    found = planned(
        weighed(
            {
                "levels": [link(0.1, level="zone", pricePerGB=0.02)],
                "pairs": [link(0.2, level="rack", between=["r1", "r2"])],
            },
            kvTransferWeight=50,
        )
    )
    assert found.warnings == ()
    text = variables(found)[TABLE]
    assert text == (
        '{"pairs":[{"bandwidth_bytes_per_s":10000000000.0,"between":["r1","r2"],"latency_s":0.2,'
        '"level":"rack"}],"within":{"zone":{"bandwidth_bytes_per_s":10000000000.0,"latency_s":0.1,'
        '"price_per_gb":0.02}}}'
    )
    links = table_of_links(LinksSpec.model_validate(json.loads(text)))
    assert links.otherwise == Link(0.1, ACROSS_LINK.bandwidth_bytes_per_s)
    assert variables(found)[WEIGHT] == "50.0"
    environ = {name: value for name, value in variables(found).items() if name != TABLE}
    assert load_settings(flags={}, environ=environ, document=None).settings.router.kv_transfer_weight == 50.0


@given(
    st.floats(0, allow_infinity=False),
    st.floats(0, exclude_min=True, allow_infinity=False),
    st.none() | st.floats(0, allow_infinity=False),
)
def test_link_table_of_any_numbers_is_read_back_exactly(
    latency_s: float, bandwidth: float, price: float | None
) -> None:
    """A frontend reads it as it reads files, which are YAML."""
    stated: Fields = {"latencySeconds": latency_s, "bandwidthBytesPerSecond": bandwidth, "pricePerGB": price}
    text = variables(planned(weighed({"levels": [{**stated, "level": "zone"}]})))[TABLE]
    read = LinksSpec.model_validate(parse_document(text, TABLE).content).within["zone"]
    assert (read.latency_s, read.bandwidth_bytes_per_s, read.price_per_gb) == (latency_s, bandwidth, price)


def test_topology_links_are_written_for_both_policy_spellings() -> None:
    graph = deployment(policy={"clusterTopologyName": "gpu-fabric", "domain": "zone"})
    for of in (deployment(of_frontend=ON_FRONTEND), graph):
        found = planned(of, stating(STATED))
        assert table(found) == {
            "within": {"zone": spec(0.1), "rack": spec(0.2)},
            "across": spec(0.3),
            "pairs": [
                spec(0.4, level="zone", between=["a", "b"]),
                spec(0.5, level="zone", between=["a", "c"]),
            ],
        }
        assert WEIGHT not in variables(found)


def test_each_link_of_the_deployment_takes_precedence_over_the_topologys() -> None:
    own: Fields = {
        "levels": [link(0.01, level="rack")],
        "pairs": [
            link(0.02, level="zone", between=["d", "e"]),
            link(0.03, level="zone", between=["b", "a"]),
        ],
    }
    found = table(planned(weighed(own), stating(STATED)))
    assert found == {
        "within": {"zone": spec(0.1), "rack": spec(0.01)},
        "across": spec(0.3),
        "pairs": [
            spec(0.02, level="zone", between=["d", "e"]),
            spec(0.03, level="zone", between=["b", "a"]),
            spec(0.5, level="zone", between=["a", "c"]),
        ],
    }
    across = table(planned(weighed({"across": link(0.04)}), stating(STATED)))
    assert at(across, "across") == spec(0.04)
    assert at(across, "within") == {"zone": spec(0.1), "rack": spec(0.2)}


def test_a_raw_label_takes_no_links_of_a_topology() -> None:
    found = planned(weighed({"levels": [link(0.1, level="zone")]}, label="a.b/zone"), stating(STATED))
    assert table(found) == {"within": {"zone": spec(0.1)}}
    assert QOS_ANNOTATION not in str(found.manifests)


def test_links_at_missing_levels_are_left_out_with_a_warning() -> None:
    own: Fields = {
        "levels": [link(0.1, level="host"), link(0.2, level="zone")],
        "pairs": [link(0.3, level="row", between=["a", "b"])],
    }
    found = planned(weighed(own))
    assert table(found) == {"within": {"zone": spec(0.2)}}
    at_qos = "spec.components[0].kvCacheTransferTopology.networkQoS"
    of = "of clusterTopologyName gpu-fabric, which has zone, rack: the link is left out"
    assert [f"{dotted(each.path)} {each.must}" for each in found.warnings] == [
        f"{at_qos}.levels[0].level 'host' is no level {of}",
        f"{at_qos}.pairs[0].level 'row' is no level {of}",
    ]


def test_no_link_table_is_written_when_all_links_are_left_out() -> None:
    own: Fields = {"levels": [link(0.1, level="host")]}
    assert TABLE not in variables(planned(weighed(own)))
    assumed = planned(weighed(own, kvTransferWeight=1))
    assert variables(assumed)[TABLE] == variables(planned(weighed(kvTransferWeight=1)))[TABLE]


def test_weight_without_links_uses_assumed_links_and_warns_once() -> None:
    main: JsonValue = {"spec": {"containers": [{"name": "main"}, {"name": "other", "image": "e"}]}}
    policy: Fields = {**ON_FRONTEND, "kvTransferWeight": 2.5}
    found = planned(deployment(of_frontend=policy, pods={"frontend": main}))
    same: Fields = {
        "latency_s": SAME_LEVEL_LINK.latency_s,
        "bandwidth_bytes_per_s": SAME_LEVEL_LINK.bandwidth_bytes_per_s,
    }
    assert table(found) == {
        "within": {"zone": same, "rack": same},
        "across": {
            "latency_s": ACROSS_LINK.latency_s,
            "bandwidth_bytes_per_s": ACROSS_LINK.bandwidth_bytes_per_s,
        },
    }
    (warning,) = found.warnings
    assert dotted(warning.path) == "spec.components[0].kvCacheTransferTopology.kvTransferWeight"
    assert "assumed" in warning.must
    assert planned(weighed(kvTransferWeight=2.5), stating(STATED)).warnings == ()


def of_user(name: str, value: str, *args: str) -> dict[str, JsonValue]:
    container: Fields = {"name": "main", "env": [{"name": name, "value": value}], "args": [*args]}
    return {"frontend": {"spec": {"containers": [container]}}}


@pytest.mark.parametrize(
    "pods",
    [
        of_user(TABLE, "/etc/links/table.yaml"),
        of_user("A", "b", "frontend", "--router-links", "/etc/links/table.yaml"),
        of_user("A", "b", "frontend", "--router-links=/etc/links/table.yaml"),
    ],
)
def test_user_links_are_kept_where_the_deployment_states_none(pods: dict[str, JsonValue]) -> None:
    for policy in (ON_FRONTEND, {**ON_FRONTEND, "kvTransferWeight": 2.5}):
        found = planned(deployment(of_frontend=policy, pods=pods))
        assert variables(found).get(TABLE) in (None, "/etc/links/table.yaml")
        assert found.warnings == ()


def test_user_links_and_weight_give_way_to_stated_ones_with_a_warning() -> None:
    stated: Fields = {**ON_FRONTEND, "kvTransferWeight": 1, "networkQoS": {"across": link(0.1)}}
    for name, value in ((TABLE, "/etc/links/table.yaml"), (WEIGHT, "7")):
        pods = of_user(name, value)
        (warning,) = planned(deployment(of_frontend=stated, pods=pods)).warnings
        assert warning.must.startswith(f"{name} follows from the policy of KV transfers, and becomes ")
        assert len(warning.must) < 200, "an event has 1,024 characters"
        alone = planned(deployment(of_frontend=ON_FRONTEND, pods=pods))
        assert variables(alone)[name] == value
        assert alone.warnings == ()


def test_links_and_weights_roll_frontends_alone() -> None:
    before = templates(planned(deployment(of_frontend=ON_FRONTEND)))
    for cluster_info, of in (
        (stating(STATED), deployment(of_frontend=ON_FRONTEND)),
        (FACTS, weighed({"across": link(0.1)})),
        (FACTS, weighed(kvTransferWeight=3)),
    ):
        after = templates(planned(of, cluster_info))
        assert {name for name in before if before[name] != after[name]} == {"frontend"}


def test_missing_topology_with_known_links_rolls_no_frontend() -> None:
    of, cluster_info = weighed({"levels": [link(0.01, level="rack")]}), stating(STATED)
    before = planned(of, cluster_info)
    annotation = at(of_kind(before, "Deployment")["llm-frontend"], "metadata", "annotations", QOS_ANNOTATION)
    last = read_qos(str(annotation))
    assert last == STATED
    for gone in (ClusterInfo(), ClusterInfo(grove=Grove.UNREAD), ClusterInfo(grove=Grove.PRESENT)):
        found = plan(of, gone, DEFAULTS, last_levels=LEVELS, last_qos=last)
        assert found.manifests == before.manifests
    assert table(planned(of, ClusterInfo())) == {"within": {"rack": spec(0.01)}}
    assert TABLE not in variables(plan(weighed(), stating(None), DEFAULTS, last_qos=last))


@pytest.mark.parametrize("annotation", [None, "", "{", "[]", '{"levels": 3}'])
def test_invalid_links_annotation_reads_as_no_links(annotation: str | None) -> None:
    assert read_qos(annotation) is None


def test_largest_link_table_fits_into_a_variable() -> None:
    long = "x" * 60
    pairs: list[JsonValue] = [
        link(1 / 3, level="rack", between=[f"{long}{n:03}", f"{long}{n + 1:03}"], pricePerGB=1 / 7)
        for n in range(QOS_PAIRS_MAX)
    ]
    more = NetworkQoS(pairs=tuple(pair_qos("zone", "a", f"z{n}", 0.1) for n in range(3)))
    found = planned(weighed({"pairs": pairs}), stating(more))
    text = variables(found)[TABLE]
    assert len(TABLE) + 1 + len(text) < ARGUMENTS_BYTES_MAX - QOS_LEVELS_MAX * 256
    assert len(LinksSpec.model_validate(json.loads(text)).pairs) == QOS_PAIRS_MAX
    (warning,) = found.warnings
    assert dotted(warning.path).endswith("networkQoS.pairs")
    assert "259: the last, beyond 256, are left out" in warning.must
