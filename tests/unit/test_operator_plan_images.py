"""Which image a pod's containers are of, and what rolls with it."""

from dataclasses import replace

from pydantic import JsonValue

from tests.support.deployments import DEFAULTS, deployment, planned, templates


def test_an_engine_does_not_roll_with_kvrouters_image_while_its_init_container_keeps_the_old_one() -> None:
    engine: JsonValue = {"spec": {"containers": [{"name": "main", "image": "engine"}]}}
    policy: dict[str, JsonValue] = {"clusterTopologyName": "gpu-fabric", "domain": "zone"}
    reported = deployment(policy=policy, pods={"decode": engine})
    old, new = replace(DEFAULTS, image="kvrouter:1"), replace(DEFAULTS, image="kvrouter:2")
    kept = replace(new, wait_image="kvrouter:1")
    was, becomes, stays = (
        templates(planned(reported, defaults=defaults))["decode"] for defaults in (old, new, kept)
    )
    assert was == stays
    assert was != becomes
