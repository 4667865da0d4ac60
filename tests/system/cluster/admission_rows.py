"""The rows of the policy page's table of mistakes: what is applied, and what is reported."""

from typing import Any, NamedTuple

from tests.system.cluster.nodes import ZONE

Fields = dict[str, Any]
ENGINE: Fields = {"spec": {"containers": [{"name": "main", "image": "example.com/engine:1"}]}}
IN_FABRIC: Fields = {"topologyConstraint": {"clusterTopologyName": "fabric"}}
BY_ZONE: Fields = {"clusterTopologyName": "fabric", "domain": "zone"}
ON_ZONE: Fields = {"level": "zone", "label": ZONE}
LINK: Fields = {"latencySeconds": 0.001, "bandwidthBytesPerSecond": 12.5e9, "pricePerGB": 0.01}
AT_ZONE: Fields = {**LINK, "level": "zone"}
OF_PAIR: Fields = {**LINK, "level": "zone", "between": ["a", "b"]}
BY_LABEL: Fields = {"labelKey": ZONE, "domain": "zone"}


def component(kind: str, name: str = "", **fields: Any) -> Fields:
    engine = {} if kind == "frontend" else {"podTemplate": ENGINE}
    return {"name": name or kind, "type": kind, "replicas": 0, **engine, **fields}


def of_frontend(**policy: Any) -> list[Fields]:
    return [component("frontend", kvCacheTransferTopology=policy), component("prefill"), component("decode")]


def weighed(weight: float) -> Fields:
    return {**ON_ZONE, "kvTransferWeight": weight}


WORKERS = [component("frontend"), component("prefill"), component("decode")]


def of_port(port: str, **fields: Any) -> Fields:
    """A frontend that says where it listens."""
    main = {"name": "main", "env": [{"name": "DYN_HTTP_PORT", "value": port}], **fields}
    return component("frontend", podTemplate={"spec": {"containers": [main]}})


MAIN = "spec.components[0].podTemplate.spec.containers[0]"
MOCK: Fields = {"name": "main", "args": ["worker", "mock"]}
ON_HOST = component("decode", podTemplate={"spec": {"hostNetwork": True, "containers": [MOCK]}})
SOURCES: Fields = {"envFrom": [{"configMapRef": {"name": "settings"}}, {"secretRef": {"name": "hub"}}]}
FROM_SOURCES = component("decode", podTemplate={"spec": {"containers": [{**MOCK, **SOURCES}]}})
FORGED = component("decode", podTemplate={**ENGINE, "metadata": {"labels": {ZONE: "here"}}})


class Case(NamedTuple):
    """What is applied, over ``before`` if it is given; and what is reported."""

    spec: Fields
    reported: tuple[str, ...]
    before: Fields = {}  # noqa: RUF012 - a default that nobody changes
    name: str = ""


def graph(*reported: str, **policy: Any) -> Case:
    return Case({"components": WORKERS, "experimental": {"kvTransferPolicy": policy}}, reported)


def spec(components: list[Fields], **fields: Any) -> Fields:
    return {"components": components, **fields}


GRAPH = "spec.experimental.kvTransferPolicy"
FRONTEND = "spec.components[0].kvCacheTransferTopology"
NO_GROVE = "this cluster knows no ClusterTopologyBinding and no ClusterTopology (grove.io). Install Grove,"
STAYS = "clusterTopologyName cannot change once it is set: delete the deployment and create it again"

BY_THE_DEFINITION: dict[str, list[Case]] = {
    "`kvCacheTransferTopology` on a component that is no frontend": [
        Case(
            spec([component("decode", kvCacheTransferTopology={"level": "zone", "label": ZONE})]),
            ("spec.components[0]", "kvCacheTransferTopology belongs to the component of type frontend"),
        )
    ],
    "neither a topology nor a label": [
        Case(
            spec(of_frontend(level="zone")),
            ("kvCacheTransferTopology needs its own label, or spec.topologyConstraint.clusterTopologyName",),
        )
    ],
    "`kvTransferPolicy` with both sources, or none": [
        graph(GRAPH, "exactly one of labelKey and clusterTopologyName is needed", domain="zone"),
        graph(GRAPH, "exactly one of labelKey and clusterTopologyName", **{**BY_LABEL, **BY_ZONE}),
    ],
    "a label by which pods are found, such as `pod-template-hash`": [
        graph(f"{GRAPH}.labelKey", "pods are found by this one", labelKey="pod-template-hash", domain="zone"),
        Case(
            spec(of_frontend(level="zone", label="kvrouter.dev/deployment")),
            (f"{FRONTEND}.label", "must be the key of a node label"),
        ),
    ],
    "`preferredWeight` without `preferred`, or `preferred` without it, or out of 0 to 1": [
        graph(GRAPH, "preferredWeight is only for enforcement: preferred", **BY_LABEL, preferredWeight=0.5),
        graph(GRAPH, "enforcement: preferred needs preferredWeight", **BY_LABEL, enforcement="preferred"),
        *(
            graph(
                f"{GRAPH}.preferredWeight",
                f"should be {'less' if weight > 1 else 'greater'} than or equal to {int(weight > 1)}",
                **BY_LABEL,
                enforcement="preferred",
                preferredWeight=weight,
            )
            for weight in (1.5, -0.5)
        ),
    ],
    "`kvTransferWeight`, a latency or a price below 0, or a bandwidth that is not above 0": [
        Case(
            spec(of_frontend(level="zone", label=ZONE, kvTransferWeight=-1)),
            (f"{FRONTEND}.kvTransferWeight", "should be greater than or equal to 0"),
        ),
        *(
            Case(
                spec(of_frontend(level="zone", label=ZONE, networkQoS={"across": {**LINK, field: value}})),
                (f"{FRONTEND}.networkQoS.across.{field}", f"should be {must}"),
            )
            for field, value, must in (
                ("latencySeconds", -1, "greater than or equal to 0"),
                ("pricePerGB", -1, "greater than or equal to 0"),
                ("bandwidthBytesPerSecond", 0, "greater than 0"),
            )
        ),
    ],
    "a level twice in `networkQoS.levels`": [
        Case(
            spec(of_frontend(level="zone", label=ZONE, networkQoS={"levels": [AT_ZONE, AT_ZONE]})),
            ('networkQoS.levels: duplicate entries for key [level="zone"]',),
        )
    ],
    "`prefill.weight` under `enforcement: required`, or out of 0 to 1": [
        Case(
            spec(of_frontend(**ON_ZONE, prefill={"level": "zone", "enforcement": "required", "weight": 0.5})),
            (f"{FRONTEND}.prefill", "weight is only for enforcement: preferred"),
        ),
        Case(
            spec(of_frontend(**ON_ZONE, prefill={"level": "zone", "weight": 1.5})),
            (f"{FRONTEND}.prefill.weight", "should be less than or equal to 1"),
        ),
    ],
    "two components whose names differ in case alone": [
        Case(
            spec([component("decode", "Decode"), component("prefill", "decode")]),
            ("spec.components", "names of components must be unique, whatever their case"),
        )
    ],
    "`<name>-<component>` longer than 63 characters, or a name that no Service can have": [
        Case(spec(WORKERS), ("must have at most 63 characters",), name="x" * 56),
        Case(spec(WORKERS), ("metadata.name becomes the name of Services",), name="my.llm"),
        Case(spec([component("decode", "de_code")]), ("spec.components[0].name", "should match"), name="llm"),
    ],
    "a component's `topologyConstraint` where the deployment has none": [
        Case(
            spec([component("decode", topologyConstraint={"packDomain": "rack"})]),
            ("a component's topologyConstraint needs spec.topologyConstraint.clusterTopologyName",),
        )
    ],
    "a label or an annotation of the operator's own in `spec.labels` or `spec.annotations`": [
        *(
            Case(spec(WORKERS, labels={key: "x"}), ("spec.labels", "the operator's own labels are reserved"))
            for key in ("kvrouter.dev/component", "app.kubernetes.io/name", "grove.io/topology.zone")
        ),
        Case(
            spec(WORKERS, annotations={"kvrouter.dev/template-hash": "x"}),
            ("spec.annotations", "annotations kvrouter.dev/… are the operator's own"),
        ),
    ],
    "a name twice in `spec.env`, or one with both `value` and `valueFrom`": [
        Case(
            spec(WORKERS, env=[{"name": "A", "value": "a"}, {"name": "A", "value": "b"}]),
            ('spec.env: duplicate entries for key [name="A"]',),
        ),
        Case(
            spec(WORKERS, env=[{"name": "A", "value": "a", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]),
            ("spec.env[0]", "exactly one of value and valueFrom"),
        ),
    ],
    "another `type` for a component": [
        Case(
            spec([component("prefill", "a")]),
            ("spec.components", "type cannot change: add a component under another name, then remove this"),
            before=spec([component("decode", "a")]),
        )
    ],
    "another `spec.topologyConstraint.clusterTopologyName`, or none where there was one": [
        Case(
            spec(WORKERS, topologyConstraint={"clusterTopologyName": "other"}),
            ("spec.topologyConstraint.clusterTopologyName", STAYS),
            before=spec(WORKERS, **IN_FABRIC),
        ),
        Case(spec(WORKERS), ("spec", STAYS), before=spec(WORKERS, **IN_FABRIC)),
    ],
}

WITHOUT_GROVE: dict[str, list[Case]] = {
    "Grove is not installed": [
        Case(
            spec(of_frontend(level="zone"), **IN_FABRIC),
            (
                "spec.topologyConstraint.clusterTopologyName: 'fabric'",
                f"{NO_GROVE} or set kvCacheTransferTopology.label to the key of a node label",
            ),
        ),
        graph(
            f"{GRAPH}.clusterTopologyName: 'fabric'", f"{NO_GROVE} or replace clusterTopologyName", **BY_ZONE
        ),
    ],
}

WITH_GROVE: dict[str, list[Case]] = {
    "a key or a value in `spec.labels` that no label has, or the policy's `label`": [
        Case(spec(WORKERS, labels={"a b": "x"}), ("spec.labels.a b: is no key of a label",)),
        Case(spec(WORKERS, labels={"a": "b c"}), ("spec.labels.a: must have at most 63 letters",)),
        Case(
            spec(WORKERS, labels={ZONE: "x"}, experimental={"kvTransferPolicy": BY_LABEL}),
            (f"spec.labels.{ZONE}: is the node's to say",),
        ),
    ],
    "no such topology": [
        Case(
            spec(of_frontend(level="zone"), topologyConstraint={"clusterTopologyName": "fabrik"}),
            (
                "spec.topologyConstraint.clusterTopologyName: no ClusterTopologyBinding or ClusterTopology",
                "there are fabric, older (did you mean fabric?)",
                "Name one that is there, create it, or set kvCacheTransferTopology.label",
            ),
        ),
        graph(
            f"{GRAPH}.clusterTopologyName: no ClusterTopologyBinding or ClusterTopology 'none'",
            "or replace clusterTopologyName by labelKey",
            clusterTopologyName="none",
            domain="zone",
        ),
    ],
    "no such level": [
        Case(
            spec(of_frontend(level="zones"), **IN_FABRIC),
            (
                f"{FRONTEND}.level: 'zones' is no level of ClusterTopologyBinding fabric",
                "which has zone, rack (did you mean zone?)",
            ),
        ),
        graph(
            f"{GRAPH}.domain: 'host' is no level of ClusterTopology older, which has zone, rack",
            clusterTopologyName="older",
            domain="host",
        ),
    ],
    "`networkQoS` with a level that is none of the topology's, or with `label` not the domain": [
        Case(
            spec(of_frontend(level="zone", networkQoS={"levels": [{**LINK, "level": "racks"}]}), **IN_FABRIC),
            (
                f"{FRONTEND}.networkQoS.levels[0].level: 'racks' is no level of clusterTopologyName fabric",
                "which has zone, rack (did you mean rack?)",
            ),
        ),
        Case(
            spec(of_frontend(level="room", label=ZONE, networkQoS={"levels": [AT_ZONE]})),
            (f"{FRONTEND}.networkQoS.levels[0].level: 'zone' is no level of label {ZONE}, which has room",),
        ),
    ],
    "`prefill` at a level that is none of the topology's, or with `label` not the domain": [
        Case(
            spec(of_frontend(level="zone", prefill={"level": "racks"}), **IN_FABRIC),
            (
                f"{FRONTEND}.prefill.level: 'racks' is no level of clusterTopologyName fabric",
                "which has zone, rack (did you mean rack?)",
            ),
        ),
        Case(
            spec(of_frontend(**ON_ZONE, prefill={"level": "rack"})),
            (f"{FRONTEND}.prefill.level: 'rack' is no level of label {ZONE}, which has zone",),
        ),
    ],
    "a pair twice in `networkQoS.pairs`; frontends with different weights, links or `prefill`": [
        Case(
            spec(of_frontend(level="zone", label=ZONE, networkQoS={"pairs": [OF_PAIR, OF_PAIR]})),
            (f"{FRONTEND}.networkQoS.pairs[1].between: 'a' and 'b' of zone are there twice",),
        ),
        Case(
            spec(
                [
                    component(
                        "frontend", name, kvCacheTransferTopology={**ON_ZONE, "kvTransferWeight": weight}
                    )
                    for name, weight in (("one", 1), ("other", 2))
                ]
            ),
            (
                f"spec.components[1].kvCacheTransferTopology.kvTransferWeight: is not what "
                f"{FRONTEND}.kvTransferWeight says: remove one of them, or make them say the same",
            ),
        ),
    ],
    "both spellings, and they differ": [
        Case(
            spec(
                of_frontend(level="zone"),
                **IN_FABRIC,
                experimental={"kvTransferPolicy": {**BY_ZONE, "domain": "rack"}},
            ),
            (
                f"{GRAPH}: says required in rack of clusterTopologyName fabric, but {FRONTEND} says required",
                "remove one of them, or make them say the same",
            ),
        )
    ],
    "workers' pods without a container, a container without an image or `args`, or a `podTemplate` of a "
    "wrong form": [
        Case(
            spec([component("decode", podTemplate=template)]),
            (f"podTemplate.spec.containers{reported}",),
        )
        for template, reported in (
            ({}, ": is needed: the container of decode's engine, called main"),
            ({"spec": {"containers": [{"name": "main"}]}}, "[0]: needs an image, or args for kvrouter's own"),
            ({"spec": {"containers": "none"}}, ": expected list"),
        )
    ],
    "a prefill component whose worker has `--role decode`, or a decode component with `--role prefill`": [
        Case(
            spec([component(kind, podTemplate={"spec": {"containers": [main]}})]),
            (f"podTemplate.spec.containers[0].args: --role {role} contradicts the component's type {kind}",),
        )
        for kind, role in (("prefill", "decode"), ("decode", "prefill"))
        for main in ({"name": "main", "args": ["worker", "mock", "--role", role]},)
    ],
}

UNREAD: dict[str, list[Case]] = {
    "Grove could not be read just now": [
        graph(f"{GRAPH}.clusterTopologyName: 'fabric' could not be read just now", "try again", **BY_ZONE)
    ],
}

WARNED: list[Case] = [
    Case(
        spec([component("frontend"), component("worker")], experimental={"kvTransferPolicy": BY_ZONE}),
        (f"{GRAPH}: has no effect: no component is of type prefill",),
    ),
    Case(
        spec([component("frontend"), component("prefill")], experimental={"kvTransferPolicy": BY_ZONE}),
        ("spec.components: has prefill workers, and none that decode",),
    ),
    Case(
        spec(
            WORKERS,
            experimental={"kvTransferPolicy": BY_ZONE},
            topologyConstraint={"clusterTopologyName": "older"},
        ),
        (f"{GRAPH}.clusterTopologyName: is 'fabric', but pods are placed by 'older'",),
    ),
    Case(
        spec(WORKERS, topologyConstraint={"clusterTopologyName": "fabric", "packDomain": "host"}),
        ("spec.topologyConstraint.packDomain: 'host' is no level of fabric, which has zone, rack",),
    ),
    Case(
        spec(of_frontend(level="zone", kvTransferWeight=50), **IN_FABRIC),
        (f"{FRONTEND}.kvTransferWeight: weighs links that are assumed",),
    ),
    Case(
        spec(
            WORKERS,
            env=[{"name": "DYN_KV_TRANSFER_DOMAIN", "value": "x"}],
            experimental={"kvTransferPolicy": BY_LABEL},
        ),
        ("spec.env[0]: DYN_KV_TRANSFER_DOMAIN follows from the policy of KV transfers, and has no effect",),
    ),
    graph(
        f"{GRAPH}: prefers nothing: preferredWeight is 0",
        **BY_ZONE,
        enforcement="preferred",
        preferredWeight=0,
    ),
    Case(
        spec([*WORKERS[:2], FORGED], experimental={"kvTransferPolicy": BY_LABEL}),
        (f"podTemplate.metadata.labels.{ZONE}: is the node's to say, and is left out: remove it here",),
    ),
    Case(
        spec(WORKERS[1:], experimental={"kvTransferPolicy": BY_LABEL}),
        (f"{GRAPH}: is kept by frontends, and no component is of type frontend",),
    ),
    graph(
        f"{GRAPH}.labelKey: is 'app.kubernetes.io/zone', by which people and tools find pods",
        labelKey="app.kubernetes.io/zone",
        domain="zone",
    ),
    Case(
        spec([*WORKERS[:2], FROM_SOURCES]),
        (
            "spec.components[2].podTemplate.spec.containers[0].envFrom: is overruled, since env takes",
            "DYN_DISCOVERY_BACKEND",
            "KVROUTER_HEALTH_PORT",
            "To set one of these, write it as env of this container",
        ),
    ),
    Case(
        spec([*WORKERS[:2], ON_HOST]),
        (
            "spec.components[2].podTemplate.spec.hostNetwork: pods take 9190 of their nodes",
            "those without a node stay Pending. Components that share nodes need other ports",
        ),
    ),
    Case(
        spec([of_port("70000"), *WORKERS[1:]]),
        (f"{MAIN}.env: DYN_HTTP_PORT must be a port from 1 to 65535, not '70000'",),
    ),
    Case(
        spec([of_port("9000", readinessProbe={"httpGet": {"port": 8000}}), *WORKERS[1:]]),
        (f"{MAIN}.readinessProbe: asks port 8000, and the frontend listens on 9000 (DYN_HTTP_PORT)",),
    ),
]
