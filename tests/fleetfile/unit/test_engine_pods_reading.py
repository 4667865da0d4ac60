"""What a pod's labels and annotations say of its engine: good ones, mistakes, and whatever else."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.workers import EnginePod, Role
from kvrouter.fleetfile.engine_pods import ANNOTATIONS, PLACES, engine_of
from kvrouter.fleetfile.fleet_file import KvTransferSpec
from kvrouter.transports.records.kubernetes.pods import pod_of
from tests.testing.pod_fleet import ENGINE, ZONE, pod, pod_json

RACK = "grove.io/topology.rack"
PREFIX = "kvrouter.dev/"
IN_ZONE = KvTransferSpec(domain="zone")


def mistake(given: EnginePod, *, policy: KvTransferSpec | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        engine_of(given, policy=policy)
    return caught.value.message


def test_engine_label_and_one_port_describe_an_engine() -> None:
    found = engine_of(pod())
    assert (found.url, found.fleet.models[0].name, found.engine.kind) == (
        "http://10.0.0.7:8000",
        None,
        "vllm",
    )
    assert (found.group.role, found.group.domains, found.fleet.kv_transfer) == (Role.BOTH, {}, None)
    assert engine_of(pod(ip="fd00::7")).url == "http://[fd00::7]:8000"


def test_annotations_set_the_fields_of_a_fleet_file() -> None:
    found = engine_of(
        pod(
            annotations={
                "model": "org/tiny",
                "tokenizer": "/models/tiny",
                "block-size": "32",
                "context-length": " 4096 ",
                "role": "prefill",
                "dp-size": "2",
                "taints": "gpu, new",
                "kv-events-endpoint": "tcp://*:5557",
                "kv-events-replay-endpoint": "tcp://10.0.0.9:5558",
            },
        )
    )
    (model,) = found.fleet.models
    assert (model.name, model.tokenizer, model.block_size) == ("org/tiny", "/models/tiny", 32)
    assert (model.context_length, found.group.role, found.group.dp_size) == (4096, Role.PREFILL, 2)
    assert found.group.taints == ("gpu", "new")
    assert found.engine.kv_events_endpoint == "tcp://10.0.0.7:5557"
    assert found.engine.kv_events_replay_endpoint == "tcp://10.0.0.9:5558"
    assert not engine_of(pod(annotations={"kv-events": "False"})).engine.kv_events


@pytest.mark.parametrize(
    ("ports", "said", "number"),
    [
        ({"http": 8000, "events": 5557}, None, 8000),
        ({"api": 9000}, None, 9000),
        ({"http": 8000, "api": 9000}, "9000", 9000),
        ({"http": 8000, "api": 9000}, "api", 9000),
        ({"api": 9000}, "8123", 8123),
    ],
)
def test_engine_port_is_the_annotated_the_http_or_the_only_port(
    ports: Mapping[str, int], said: str | None, number: int
) -> None:
    annotations = {} if said is None else {"engine-port": said}
    assert engine_of(pod(ports=ports, annotations=annotations)).url == f"http://10.0.0.7:{number}"


def test_only_a_restart_of_the_engines_own_container_changes_its_start() -> None:
    assert engine_of(pod()).start != engine_of(pod(restarts=1)).start
    given = pod_json()
    given["spec"]["containers"].append({"name": "other"})
    given["status"]["containerStatuses"].append({"name": "other", "restartCount": 4})
    assert engine_of(pod_of(json.dumps(given).encode())).start == engine_of(pod()).start


def test_start_of_an_unnamed_port_is_the_only_containers_or_unknown() -> None:
    said = {"engine-port": "9000"}
    assert engine_of(pod(annotations=said)).start != engine_of(pod(annotations=said, restarts=1)).start
    given = pod_json(annotations=said)
    del given["spec"]["containers"][0]["ports"]
    alone = pod_of(json.dumps(given).encode())
    given["status"]["containerStatuses"][0]["restartCount"] = 1
    assert engine_of(alone).start != engine_of(pod_of(json.dumps(given).encode())).start
    with_sidecar = pod_json(annotations=said)
    with_sidecar["status"]["containerStatuses"].append({"name": "other", "restartCount": 4})
    assert engine_of(pod_of(json.dumps(with_sidecar).encode())).start == ""


def test_place_comes_from_pod_labels_and_else_from_annotations() -> None:
    labels = {
        ZONE: "a",
        "topology.kubernetes.io/region": "r",
        RACK: "a7",
        "grove.io/topology.host": "",
    }
    found = engine_of(pod(labels=labels, annotations={"topology.host": "h1"}))
    assert found.group.domains == {"zone": "a", "region": "r", "rack": "a7", "host": "h1"}
    assert found.fleet.topology.levels == ("region", "zone", "host", "rack")
    assert engine_of(pod(labels=labels), levels=("zone", "rack", "row")).fleet.topology.levels == (
        "zone",
        "rack",
        "row",
        "region",
    )
    same = engine_of(pod(labels={ZONE: "a"}, annotations={"topology.zone": "a"}))
    assert same.group.domains == {"zone": "a"}
    by_operator = engine_of(pod(labels={ZONE: "a", "grove.io/topology.zone": "b"}))
    assert by_operator.group.domains == {"zone": "b"}


def test_process_policy_applies_to_pods_and_requires_their_place() -> None:
    found = engine_of(pod(labels={ZONE: "a"}), policy=IN_ZONE)
    assert found.fleet.kv_transfer == IN_ZONE
    assert mistake(pod(), policy=IN_ZONE) == (
        "label topology.kubernetes.io/zone: is required, since KV transfers keep to the zone: where the "
        "cluster does not put it on pods, give the annotation kvrouter.dev/topology.zone"
    )
    assert "label grove.io/topology.rack: is required" in mistake(pod(), policy=KvTransferSpec(domain="rack"))


MISTAKES: Mapping[str, tuple[Mapping[str, str], str]] = {
    "another kind": (
        {"label": "mock"},
        "label kvrouter.dev/engine: must be vllm, sglang or trtllm, not 'mock'",
    ),
    "a key that is none": (
        {"rolle": "prefill"},
        "annotation kvrouter.dev/rolle: unknown (did you mean kvrouter.dev/role?)",
    ),
    "a role that is none": (
        {"role": "both-ways"},
        "annotation kvrouter.dev/role: must be 'prefill', 'decode' or 'both', not 'both-ways'",
    ),
    "no number": ({"block-size": "many"}, "annotation kvrouter.dev/block-size: must be a whole number"),
    "a number too large": ({"block-size": "5000"}, "annotation kvrouter.dev/block-size: must be ≤ 4096"),
    "no switch": ({"kv-events": "yes"}, "annotation kvrouter.dev/kv-events: must be true or false"),
    "no endpoint": (
        {"kv-events-endpoint": "5557"},
        "annotation kvrouter.dev/kv-events-endpoint: must be tcp://HOST:PORT",
    ),
    "replay alone": (
        {"kv-events-replay-endpoint": "tcp://*:1"},
        "annotation kvrouter.dev/kv-events-replay-endpoint: only together with kv_events_endpoint",
    ),
    "no port": (
        {"engine-port": "web"},
        "annotation kvrouter.dev/engine-port: must be a port or the name of one (the containers have "
        "8000 http), not 'web'",
    ),
    "a port beyond all": ({"engine-port": "70000"}, "annotation kvrouter.dev/engine-port: must be a port"),
    "a domain that is none": (
        {"topology.Big Zone": "a"},
        "annotation kvrouter.dev/topology.Big Zone: must be lower-case letters, digits and dashes",
    ),
    "a reserved taint": (
        {"taints": "dynamo.topology/zone=a"},
        "annotation kvrouter.dev/taints: must not begin with dynamo.topology/",
    ),
    "an adapter that its engine does not name": (
        {"taints": "kvrouter.adapter/french"},
        "annotation kvrouter.dev/taints: must not begin with kvrouter.adapter/",
    ),
    "another place than its node's": (
        {"topology.zone": "b"},
        "annotation kvrouter.dev/topology.zone: is 'b', and the label topology.kubernetes.io/zone says 'a', "
        "which counts: leave the annotation out",
    ),
}


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_a_mistake_names_label_or_annotation_and_fix(name: str) -> None:
    said, message = MISTAKES[name]
    labels = {ZONE: "a"} | ({ENGINE: said["label"]} if "label" in said else {})
    annotations = {key: value for key, value in said.items() if key != "label"}
    reported = mistake(pod(labels=labels, annotations=annotations))
    assert reported.startswith(message)
    assert "\n" not in reported


def test_unnamed_ports_are_asked_about_and_all_mistakes_reported_at_once() -> None:
    assert mistake(pod(ports={"one": 1, "two": 2})) == (
        "annotation kvrouter.dev/engine-port: is required where no port of the containers is named http and "
        "there is not exactly one (there are: 1 one, 2 two)"
    )
    reported = mistake(pod(annotations={"role": "cook", "block-size": "0"}))
    assert sorted(line.split(": ")[0] for line in reported.splitlines()) == [
        "annotation kvrouter.dev/block-size",
        "annotation kvrouter.dev/role",
    ]


def test_every_field_an_engine_may_contradict_has_a_label_or_annotation() -> None:
    known = {f"annotation {PREFIX}{name}" for name in ANNOTATIONS} | {f"label {ENGINE}"}
    assert set(PLACES.values()) <= known


def test_leaving_over_unready_or_addressless_pod_is_recognized() -> None:
    assert pod(more={"deletionTimestamp": "2026-01-01T00:00:00Z"}).is_leaving
    assert not pod(ready=False).is_ready
    assert not pod(ip="").is_ready
    given = pod_json()
    given["status"]["phase"] = "Failed"
    assert pod_of(json.dumps(given).encode()).is_over


scalars = st.none() | st.booleans() | st.integers(-5, 70_000) | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
texts = st.text(max_size=20) | st.sampled_from(["vllm", "both", "16", "tcp://*:1", "a,b", "true", "http", ""])
names = st.text("abcXYZ019-_.", max_size=12)
keys = st.sampled_from(
    [
        ENGINE,
        ZONE,
        RACK,
        f"{PREFIX}engine-port",
        f"{PREFIX}topology.zone",
        *(PREFIX + name for name in ANNOTATIONS),
    ]
)


@given(st.binary(max_size=40) | anything.map(lambda value: json.dumps(value).encode()))
def test_any_json_is_a_pod_or_a_protocol_error(text: bytes) -> None:
    with suppress(ProtocolError):
        pod_of(text)


@given(path=st.sampled_from([("metadata",), ("spec",), ("status",), ("spec", "containers")]), value=anything)
def test_pod_with_any_replaced_part_is_a_pod_or_a_protocol_error(
    path: tuple[str, ...], value: object
) -> None:
    given_: dict[str, object] = pod_json()
    here = given_
    for part in path[:-1]:
        here = here[part]  # type: ignore[assignment]
    here[path[-1]] = value
    with suppress(ProtocolError):
        pod_of(json.dumps(given_).encode())


@given(
    labels=st.dictionaries(keys, texts, max_size=4),
    annotations=st.dictionaries(keys | names.map(PREFIX.__add__), texts, max_size=5),
    policy=st.sampled_from([None, IN_ZONE]),
)
def test_any_labels_and_annotations_are_an_engine_or_named_mistakes(
    labels: dict[str, str], annotations: dict[str, str], policy: KvTransferSpec | None
) -> None:
    given_ = pod_json(labels=labels)
    given_["metadata"]["annotations"] = annotations
    read = pod_of(json.dumps(given_).encode())
    try:
        found = engine_of(read, policy=policy)
    except ConfigError as error:
        for line in error.message.splitlines():
            assert line.startswith(("label ", "annotation "))
    else:
        assert found.url.startswith("http://10.0.0.7:")
        assert policy is None or "zone" in found.group.domains


def test_documentation_page_names_every_annotation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kubernetes-engines.md").read_text()
    for name in (*ANNOTATIONS, "engine-port", "topology."):
        assert f"`kvrouter.dev/{name}" in page
