"""Cordons as objects of an API server that others write to at the same time."""

import json
from pathlib import Path

import msgspec
import pytest

from kvrouter.core.cordon_rules import Cordon
from kvrouter.core.errors import CordonsUnavailable
from kvrouter.kube.account import Account
from kvrouter.kube.client import CONFLICT, JSON, KubeClient, Query, RequestRefused
from kvrouter.kube.objects import cordon_object
from kvrouter.transports.records.kubernetes import KubernetesCordons
from tests.testing.discovery_stores import ignore_reports

NODE = Cordon("node", "n1", at_s=1.0)


class WrittenMeanwhile(KubeClient):
    """Has the object of one cordon. It may be written after it was listed."""

    def __init__(self) -> None:
        self.versions = ["5"]
        self.is_there = True

    async def everything(
        self, path: str, *, labels: str = "", accept: str = JSON
    ) -> tuple[list[msgspec.Raw], str]:
        manifest = cordon_object(NODE, namespace="default", fleet="space")
        manifest["metadata"] |= {"uid": "u1", "resourceVersion": self.versions[0]}  # type: ignore[operator]
        return [msgspec.Raw(json.dumps(manifest).encode())], "9"

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: bytes | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        assert (method, body is not None) == ("DELETE", True)
        over = msgspec.json.decode(body or b"").get("preconditions", {}).get("resourceVersion")
        if over not in (None, self.versions[-1]):
            raise RequestRefused("the object has been modified", status=CONFLICT, reason="Conflict")
        self.is_there = False
        return b"{}"


async def test_removing_a_cordon_that_is_rewritten_meanwhile_fails_and_keeps_it() -> None:
    store = KubernetesCordons(
        Account("https://nowhere", Path(), "default"), namespace="space", on_refused=ignore_reports
    )
    api = WrittenMeanwhile()
    store._store._client = api  # type: ignore[attr-defined]
    api.versions.append("6")
    with pytest.raises(CordonsUnavailable, match="is another by now"):
        await store.remove(NODE)
    assert api.is_there
    del api.versions[0]
    await store.remove(NODE)
    assert not api.is_there
