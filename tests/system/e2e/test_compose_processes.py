"""The Compose example's commands and variables, as processes of one host, without containers."""

from tests.testing.compose_files import SECRETS, compose_services, service_environment
from tests.testing.nats_server import NatsServer
from tests.testing.processes import eventually, fleet

SECRET = {name: f"{name.lower()}-of-this-test" for name in SECRETS}
HERE = {"KVROUTER_LISTEN_HOST": "127.0.0.1", "KVROUTER_HEALTH_PORT": "", "KVROUTER_LOG_FORMAT": "text"}
"""In containers each process has addresses and ports of its own. Tests read lines of text."""


async def test_compose_processes_serve_and_keep_admin_routes_closed(shared_nats: NatsServer) -> None:
    services = compose_services("compose.yaml", SECRET)
    here = HERE | {"NATS_SERVER": shared_nats.url}
    workers = [service for service in services.values() if service.get("command", [""])[0] == "worker"]
    async with fleet() as processes:
        for service in workers:
            _, engine, *arguments = service["command"]
            await processes.worker(*arguments, engine=engine, environ=service_environment(service) | here)
        command, *arguments = services["frontend"]["command"]
        front = await processes.door(
            command, *arguments, environ=service_environment(services["frontend"]) | here
        )
        assert (await front.http.get("/v1/fleet")).status_code == 401
        front.http.headers["authorization"] = f"Bearer {SECRET['KVROUTER_ADMIN_TOKEN']}"
        await eventually(lambda: front.serves(len(workers)))
        assert (await front.http.get("/accepting")).status_code == 200
        call = {"model": "mock", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
        answer = (await front.http.post("/v1/chat/completions", json=call)).raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == 3
        zones = {worker["domains"]["zone"] for worker in (await front.fleet())["workers"]}
        assert zones == {"a", "b"}
