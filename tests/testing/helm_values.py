"""Values that users might give the chart, by what they want."""

from functools import cache

from tests.testing.helm_chart import Manifest, of_kind, rendered

SHAPES: dict[str, dict[str, object]] = {
    "default": {},
    "every switch off": {
        "replicas": 1,
        "admission": {"enabled": False},
        "rbac": {"create": False, "nodes": False, "aggregate": False},
        "serviceAccount": {"create": False, "name": "theirs"},
        "metrics": {"service": False},
        "podDisruptionBudget": False,
        "cleanUp": False,
    },
    "one namespace": {"watchNamespace": "fleets", "rbac": {"nodes": False}},
    "cert-manager": {
        "certificate": {"from": "certManager", "issuerRef": {"kind": "ClusterIssuer", "name": "corp"}},
        "admission": {"bindingWebhook": True},
    },
    "cert-manager signs for itself": {"certificate": {"from": "certManager"}},
    "a certificate that is there": {
        "certificate": {"from": "existing", "secretName": "tls", "caBundle": "Q0E="},
        "admission": {"bindingWebhook": "true"},
    },
    "nats of its own": {
        "nats": {
            "enabled": True,
            "jetstream": {"persistent": True, "size": "512Mi", "storageClassName": "x"},
        },
        "fleets": {"discovery": "nats", "eventPlane": "jetstream"},
    },
    "nats elsewhere": {
        "fleets": {"natsServer": "tls://nats.corp:4222,tls://nats-2.corp:4222", "requestPlane": "nats"}
    },
    "everything of pods": {
        "image": {"repository": "corp:5000/kvrouter", "digest": f"sha256:{'a' * 64}", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "corp"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "important",
        "podLabels": {"team": "serving"},
        "podAnnotations": {"corp/mesh": "off"},
        "serviceAccount": {"annotations": {"corp/role": "x"}},
        "extraArgs": ["--host=::"],
        "nats": {"enabled": True},
        "networkPolicies": {"enabled": True, "apiServerPorts": [16443]},
        "fleets": {"planeToken": {"secretName": "plane", "key": "secret"}},
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            **dict.fromkeys(("frontendMonitor", "engineMonitor", "alerts", "dashboards"), True),
        },
        "admission": {"namespaceSelector": {"matchLabels": {"kvrouter": "yes"}}},
    },
}


@cache
def shape(name: str) -> list[Manifest]:
    return rendered(SHAPES[name])


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    (found,) = of_kind(manifests, kind, name)
    return found


def arguments(manifests: list[Manifest]) -> dict[str, str]:
    container = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["kvrouter", "operator", "run"]
    pairs = [argument.partition("=") for argument in container["args"]]
    return {flag: value for flag, _, value in pairs}
