"""A replica is ready once the API server answered it, and its admission door is open with a certificate."""

from pathlib import Path

import httpx
import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.operators import Operator, operator
from tests.system.cluster.webhooks import name_of, on_deployments, own_certificate, until_reported
from tests.testing.processes import eventually, free_ports

pytestmark = pytest.mark.api_server


async def test_the_operator_is_healthy_but_not_ready_without_an_api_server(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere.yaml"
    nowhere.write_text(plane.admin.read_text().replace(plane.url, f"https://127.0.0.1:{free_ports(1)}"))
    async with operator(plane, namespace, "one", kubeconfig=nowhere) as one:
        await until_reported(one, "lease_not_renewed")
        assert (await reported(one, "/healthz"))[0] == 200
        status, why = await reported(one, "/readyz")
        assert status == 503
        assert why.startswith(
            f"the API server: GET /apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        )
        assert await one.end() == 0


async def test_the_operator_is_ready_once_it_may_answer_admission(
    plane: ControlPlane, namespace: str
) -> None:
    port = free_ports(1)
    async with operator(plane, namespace, "one", *own_certificate(namespace, port)) as one:
        await until_reported(one, "certificate_refused")
        await until_reported(one, "operator_leads")
        status, why = await reported(one, "/readyz")
        assert status == 503
        assert why.startswith("admission: there is no certificate yet: ValidatingWebhookConfiguration")
        assert "install the manifests" in why
        plane.apply(on_deployments(namespace, port))
        try:

            async def is_ready() -> bool:
                return await reported(one, "/readyz") == (200, "ok\n")

            await eventually(is_ready)
            await until_reported(one, "ready kind=admission")
            async with httpx.AsyncClient(verify=False, timeout=60.0) as client:
                assert (await client.get(f"https://127.0.0.1:{port}/readyz")).text == "ok\n"
            assert await one.end() == 0
        finally:
            plane.kubectl("delete", "validatingwebhookconfiguration", name_of(namespace))


async def reported(replica: Operator, path: str) -> tuple[int, str]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{replica.port('http')}", timeout=60.0) as client:
        answer = await client.get(path)
    return answer.status_code, answer.text
