"""Processes among Services that are called as they are: kubelets tell every container of each of them."""

from functools import partial

import pytest

from tests.testing.mock_server import word_ids
from tests.testing.processes import Frontend, eventually, fleet, run_kvrouter
from tests.testing.service_variables import Service, ServicePort, service_variables
from tests.testing.streaming_client import expected_text

HTTP = ServicePort(8000, "http")
SERVICE_LINKS = service_variables(
    [
        Service("kvrouter", "10.0.0.1", (HTTP, ServicePort(9090, "metrics"))),
        Service("kvrouter-service", "10.0.0.2", (HTTP,)),
        Service("kvrouter-frontend", "fd00::3", (HTTP,)),
        Service("kvrouter-http", "10.0.0.4", (HTTP,)),
        Service("kvrouter-health", "10.0.0.5", (HTTP,)),
        Service("kvrouter-listen", "10.0.0.6", (ServicePort(53, "dns", "UDP"), ServicePort(53, "dns-tcp"))),
        Service("dyn-http", "10.0.0.7", (HTTP,)),
        Service("nats-server", "10.0.0.8", (ServicePort(4222),)),
    ]
)
COMMANDS = (
    ("frontend", "--http-port", "0"),
    ("router", "--http-port", "0"),
    ("up", "--http-port", "0"),
    ("worker", "mock"),
)


async def test_a_fleet_serves_and_ends_cleanly_among_service_variables() -> None:
    prompt = word_ids(first=1, n=64)
    body = {"model": "mock", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with fleet(SERVICE_LINKS) as processes:
        await processes.worker()
        router = await processes.router()
        assert (await router.http.get("/health")).status_code == 200
        for frontend in (await processes.frontend(), await processes.door("up")):
            await eventually(partial(is_served, frontend))
            answer = (await frontend.http.post("/v1/completions", json=body)).raise_for_status().json()
            assert answer["choices"][0]["text"] == expected_text(prompt, 4)
        for running in reversed(processes.processes):
            assert await running.stop() == 0, running.name


async def is_served(frontend: Frontend) -> bool:
    return (await frontend.http.get("/ready")).status_code == 200


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_a_misspelt_setting_is_reported_among_service_variables(command: tuple[str, ...]) -> None:
    async with fleet(SERVICE_LINKS) as processes:
        wrong = {"KVROUTER_RETRY_MAX": "1", "KVROUTER_FRONTEND_SERVICE_PORT_HTTPS": "443"}
        code, printed = await run_kvrouter(*command, environ={**processes.environ, **wrong})
    assert code
    reported = [line for line in printed.splitlines() if "unknown variable" in line]
    assert [name for name in wrong if not any(name in line for line in reported)] == []
    assert len(reported) == len(wrong)
