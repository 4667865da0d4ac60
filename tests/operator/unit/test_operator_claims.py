"""Of two operators that could look after a deployment the first one does, until it is gone."""

from typing import cast

import pytest

from kvrouter.kube.client import KubeClient, RequestRefused
from kvrouter.kube.objects import LEASES, Key, Manifest, ResourceKind, metadata_of, version_of
from kvrouter.operator.reconcile.claims import AGAIN_S, GONE_S, Claims, takeover_instructions

ONE, TWO = Key("one", "kvrouter-operator"), Key("two", "kvrouter-operator")
PLACE = Key("team", "llm")


class Server:
    """An API server with one deployment, and a lease for each operator that is there."""

    def __init__(self) -> None:
        self.deployment: Manifest = {
            "metadata": {"namespace": "team", "name": "llm", "uid": "u", "resourceVersion": "1"},
            "status": {"observedGeneration": 3},
        }
        self.leases: dict[Key, int | None] = {ONE: 1, TWO: 1}
        self.now_s = 0.0
        self.reads = 0

    async def read(self, kind: ResourceKind, key: Key) -> Manifest | None:
        assert kind == LEASES
        self.reads += 1
        if key not in self.leases:
            return None
        if self.leases[key] is None:
            raise RequestRefused("GET /x: forbidden", status=403)
        return {"metadata": {"resourceVersion": str(self.leases[key])}}

    async def apply(self, _kind: ResourceKind, manifest: Manifest, *, subresource: str) -> Manifest:
        assert subresource == "status"
        if version_of(manifest) != version_of(self.deployment):
            raise RequestRefused("PATCH /x: conflict", status=409)
        version = str(int(version_of(self.deployment)) + 1)
        metadata = {**metadata_of(self.deployment), "resourceVersion": version}
        self.deployment = {"metadata": metadata, "status": manifest["status"]}
        return self.deployment

    def claims(self, lease: Key) -> Claims:
        return Claims(cast(KubeClient, self), lease, lambda: self.now_s)


async def test_first_operator_keeps_the_deployment_while_its_lease_is_renewed() -> None:
    server = Server()
    one, two = server.claims(ONE), server.claims(TWO)
    seen = server.deployment
    assert await one.other(seen) is None
    assert server.deployment["status"] == {"observedGeneration": 3, "operator": "one/kvrouter-operator"}
    assert await one.other(seen) is None, "its own watch may be late"
    with pytest.raises(RequestRefused):
        await two.other(seen)
    for renewals in range(100):
        server.leases[ONE], server.now_s = renewals, server.now_s + 10.0
        assert await two.other(server.deployment) == "one/kvrouter-operator"
        assert await one.other(server.deployment) is None


async def test_lease_of_another_operator_is_read_once_for_all_its_deployments() -> None:
    server = Server()
    two = server.claims(TWO)
    for number in range(200):
        metadata: Manifest = {"namespace": "team", "name": f"llm-{number}", "uid": str(number)}
        assert await two.other({"metadata": metadata, "status": {"operator": str(ONE)}}) == str(ONE)
    assert server.reads == 1
    server.now_s += AGAIN_S
    assert await two.other({"metadata": metadata, "status": {"operator": str(ONE)}}) == str(ONE)
    assert server.reads == 2


@pytest.mark.parametrize("is_there", [True, False])
async def test_operator_with_an_expired_or_missing_lease_is_succeeded_after_a_limit(
    *, is_there: bool
) -> None:
    server = Server()
    one, two = server.claims(ONE), server.claims(TWO)
    await one.other(server.deployment)
    if not is_there:
        del server.leases[ONE]
    assert await two.other(server.deployment) == str(ONE)
    server.now_s = GONE_S - 1.0
    assert await two.other(server.deployment) == str(ONE)
    server.now_s = GONE_S
    assert await two.other(server.deployment) is None
    assert await one.other(server.deployment) == str(TWO)


async def test_operator_with_an_unreadable_lease_keeps_its_claim_until_handover() -> None:
    server = Server()
    one, two = server.claims(ONE), server.claims(TWO)
    await one.other(server.deployment)
    server.leases[ONE] = None
    for _ in range(3):
        server.now_s += 10 * GONE_S
        assert await two.other(server.deployment) == str(ONE)
    server.deployment = {**server.deployment, "status": {"operator": str(TWO)}}
    assert await two.other(server.deployment) is None
    assert await one.other(server.deployment) == str(TWO)
    assert f'--patch \'{{"status": {{"operator": "{TWO}"}}}}\'' in takeover_instructions(
        str(TWO), str(ONE), *PLACE
    )


async def test_claim_of_an_operator_of_another_class_is_taken_over() -> None:
    server = Server()
    blue = Claims(cast(KubeClient, server), TWO, lambda: server.now_s, "blue")
    await server.claims(ONE).other(server.deployment)
    assert await blue.other(server.deployment) is None
    assert server.deployment["status"] == {"observedGeneration": 3, "operator": f"blue:{TWO}"}


async def test_a_later_deployment_of_the_same_name_is_claimed_again() -> None:
    server = Server()
    one = server.claims(ONE)
    await one.other(server.deployment)
    later: Manifest = {"metadata": {**metadata_of(server.deployment), "uid": "v"}}
    server.deployment = later
    assert await one.other(later) is None
    assert server.deployment["status"] == {"operator": str(ONE)}
