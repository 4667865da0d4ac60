"""A program joins worker processes by public names alone."""

import asyncio

import pytest

from kvrouter import KvRouter, Runtime, Settings
from kvrouter.core.errors import ConfigError
from tests.support.nats_server import NatsServer
from tests.support.processes import Fleet, fleet

PROMPT = list(range(256, 256 + 320))


async def both_legs(processes: Fleet, *flags: str) -> None:
    await processes.worker("--role", "prefill", "--block-size", "32", *flags)
    await processes.worker("--role", "decode", "--block-size", "32", *flags)


def settings_of(processes: Fleet, **planes: object) -> Settings:
    return Settings.model_validate(
        {"planes": {"namespace": processes.namespace, **planes}, "router": {"use_kv_events": True}}
    )


async def route(settings: Settings) -> None:
    """A pair serves the prompt; then its blocks are known to be cached, by events from other processes."""
    async with Runtime.connect(settings) as runtime:
        endpoint = runtime.namespace(settings.planes.namespace).component("backend").endpoint("generate")
        client = await endpoint.client()
        workers = await client.wait_for_instances()
        client.close()
        async with KvRouter(endpoint, block_size=32) as router, asyncio.timeout(60):
            while await router.dump_events() == "[]":
                answer = await router.generate(PROMPT, stop_conditions={"max_tokens": 4})
                tokens = [token async for piece in answer for token in piece["token_ids"]]
                assert len(tokens) == 4
            loads = await router.get_potential_loads(PROMPT)
            assert [load["worker_id"] for load in loads] == workers


async def test_over_tcp_and_zeromq() -> None:
    async with fleet() as processes:
        await both_legs(processes)
        directory = processes.environ["KVROUTER_DISCOVERY_DIR"]
        await route(settings_of(processes, discovery="file", discovery_dir=directory))


async def test_over_nats_with_a_token(shared_nats: NatsServer) -> None:
    environ = {
        "DYN_DISCOVERY_BACKEND": "nats",
        "DYN_REQUEST_PLANE": "nats",
        "NATS_SERVER": shared_nats.url,
        "KVROUTER_PLANE_TOKEN": "s",
    }
    async with fleet(environ) as processes:
        await both_legs(processes, "--enable-local-indexer")
        planes = {"request_plane": "nats", "nats_server": shared_nats.url, "plane_token": "s"}
        await route(settings_of(processes, **planes))


async def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet() as processes:
        await processes.worker()
        for name, value in processes.environ.items():
            if name.startswith(("DYN_", "KVROUTER_")):
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("DYN_ROUTER_TEMPERATURE", "0.5")
        async with Runtime.connect() as runtime:
            assert runtime.router_config.router_temperature == 0.5
            component = runtime.namespace(processes.namespace).component("backend")
            client = await component.endpoint("generate").client()
            assert len(await client.wait_for_instances()) == 1
            client.close()


async def test_what_a_program_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.replica_sync"):
        async with Runtime.connect(Settings.model_validate({"router": {"replica_sync": True}})):
            pass
