"""A program joins worker processes by public names alone."""

import asyncio

import pytest

from kvrouter import KvRouter, KvRouterConfig, Runtime, Settings, mock_fleet
from kvrouter.core.errors import ConfigError
from tests.testing.nats_server import NatsServer
from tests.testing.processes import Fleet, eventually, fleet

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


async def test_a_program_routes_over_tcp_and_zeromq() -> None:
    async with fleet() as processes:
        await both_legs(processes)
        directory = processes.environ["KVROUTER_DISCOVERY_DIR"]
        await route(settings_of(processes, discovery="file", discovery_dir=directory))


async def test_a_program_routes_over_nats_with_a_token(shared_nats: NatsServer) -> None:
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


async def test_runtime_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_routers_of_programs_count_each_others_requests(shared_nats: NatsServer) -> None:
    """A booking of one is load of the other, until it ends, or its router does."""
    environ = {"DYN_DISCOVERY_BACKEND": "nats", "NATS_SERVER": shared_nats.url}
    async with fleet(environ) as processes:
        await processes.worker("--block-size", "32")
        settings = settings_of(processes, nats_server=shared_nats.url)
        settings = settings.model_copy(update={"router": KvRouterConfig(replica_sync=True)})
        async with Runtime.connect(settings) as runtime, Runtime.connect(settings) as other:
            endpoints = [
                each.namespace(processes.namespace).component("backend").endpoint("generate")
                for each in (runtime, other)
            ]
            for endpoint in endpoints:
                client = await endpoint.client()
                await client.wait_for_instances()
                client.close()
            one, two = (KvRouter(endpoint, block_size=32) for endpoint in endpoints)
            async with two:
                async with one:
                    await one.best_worker(PROMPT, request_id="r-1")
                    await load_becomes(two, len(PROMPT) * 2)
                    await one.free("r-1")
                    await load_becomes(two, len(PROMPT))
                    await one.best_worker(PROMPT, request_id="r-2")
                    await load_becomes(two, len(PROMPT) * 2)
                await load_becomes(two, len(PROMPT))


async def load_becomes(router: KvRouter, tokens: int) -> None:
    """Wait until the prompt would make this many tokens wait for prefill."""

    async def becomes() -> bool:
        loads = await router.get_potential_loads(PROMPT)
        return [load["potential_prefill_tokens"] for load in loads] == [tokens]

    await eventually(becomes)


async def test_replica_sync_on_a_runtime_without_it_is_refused() -> None:
    async with mock_fleet() as runtime:
        endpoint = runtime.namespace("default").component("backend").endpoint("generate")
        with pytest.raises(ConfigError, match=r"replica_sync: this runtime was connected without"):
            KvRouter(endpoint, block_size=64, kv_router_config=KvRouterConfig(replica_sync=True))
