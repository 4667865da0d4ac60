"""Engines of labelled pods in one process: they join, rest, move, come back as others, and leave."""

import asyncio
import logging
from pathlib import Path

import pytest

from kvrouter.app.attach import attachment, pod_fleet
from kvrouter.app.attach.attachment import ANNOUNCING, SERVED_ELSEWHERE
from kvrouter.app.attach.pod_fleet import (
    JOINED,
    MISTAKEN,
    REFUSED,
    PodPolicy,
    full_selector,
    policy_of,
    worker_id_of,
)
from kvrouter.app.nats_connection import NatsUnreachable
from kvrouter.cli.worker.engine_pods import PodsDiscovery
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement, Role
from kvrouter.fleetfile.fleet_file import KvTransferSpec
from kvrouter.fleetfile.worker_options import EnginePods
from kvrouter.worker import Worker
from tests.testing.calls import WatchCalls
from tests.testing.constants import SetConstants
from tests.testing.pod_fleet import ZONE, PodFleetHarness, pod_of_engine, running_pod_fleet, stopped_engine
from tests.testing.scripted_engine import SGLANG_PAGES, scripted_engine
from tests.testing.waits import until

CONNECTION_REFUSED = "connection refused"
IN_ZONE = PodPolicy(transfer=KvTransferSpec(domain="zone"))


@pytest.fixture(autouse=True)
def _asked_at_once(set_constants: SetConstants) -> None:
    set_constants(attachment, PROBE_EVERY_S=0.01)
    for each in (attachment, pod_fleet):
        set_constants(each, RETRY_AFTER_S=0.01)


def problems(made: PodFleetHarness) -> list[str]:
    """The engines without a worker, a line for each."""
    return [str(engine) for engine in made.fleet.expected() if engine.has_problem]


async def test_ready_pod_gets_a_worker_with_an_id_from_its_uid() -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine, labels={ZONE: "a"}, annotations={"role": "prefill", "taints": "gpu"})
        made.fleet.on_pod(given)
        card = await made.joined(given)
        assert (card.model, card.role, card.block_size) == ("tiny", Role.PREFILL, 32)
        assert card.runtime_config.topology_domains == {"zone": "a"}
        assert card.runtime_config.taints == {"gpu"}
        assert worker_id_of(given.uid) == worker_id_of("uid of vllm-0") != worker_id_of("another")
        await until(lambda: made.reported(JOINED) != [])
        assert made.reported(JOINED) == [f"kvrouter serves tiny here, as worker {card.worker_id} (prefill)"]
        (known,) = made.fleet.expected()
        assert (known.state, known.pod, known.worker_id) == ("joined", "vllm-0", card.worker_id)
    assert made.gone == [card.incarnation]


async def test_worker_of_an_unready_pod_drains_until_the_pod_is_ready_again() -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine)
        made.fleet.on_pod(pod_of_engine(engine, ready=False))
        assert problems(made) == ["the engine of pod vllm-0 is awaited: the pod is not ready"]
        made.fleet.on_pod(given)
        card = await made.joined(given)
        for change in ({"ready": False}, {"more": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}):
            made.fleet.on_pod(pod_of_engine(engine, **change))
            await until(lambda: made.cards[card.worker_id].draining)
            made.fleet.on_pod(given)
            await until(lambda: not made.cards[card.worker_id].draining)
        assert made.gone == []


async def test_pod_turned_unready_before_its_engine_answers_joins_draining() -> None:
    late = await stopped_engine()
    async with running_pod_fleet() as made:
        given = pod_of_engine(late)
        made.fleet.on_pod(given)
        await until(lambda: [CONNECTION_REFUSED in line for line in problems(made)] == [True])
        made.fleet.on_pod(pod_of_engine(late, ready=False))
        await late.start()
        try:
            assert (await made.joined(given)).draining
        finally:
            await late.stop()


async def test_pod_changes_during_a_join_are_applied_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, goes_on = Worker.start, asyncio.Event()

    async def slow(worker: Worker) -> None:
        await start(worker)
        await goes_on.wait()

    monkeypatch.setattr(Worker, "start", slow)
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine, labels={ZONE: "a"})
        made.fleet.on_pod(given)
        card = await made.joined(given)
        made.fleet.on_pod(pod_of_engine(engine, labels={ZONE: "b"}))
        made.fleet.on_pod(pod_of_engine(engine, labels={ZONE: "b"}, ready=False))
        await asyncio.sleep(0)
        goes_on.set()
        await until(lambda: made.cards[card.worker_id].draining)
        await until(lambda: made.cards[card.worker_id].runtime_config.topology_domains == {"zone": "b"})
        assert made.gone == []


async def test_silent_engine_does_not_delay_another_pod() -> None:
    silent = await stopped_engine()
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine, "one")
        made.fleet.on_pod(pod_of_engine(silent, "silent"))
        made.fleet.on_pod(given)
        await made.joined(given)
        at = f"the engine of pod silent at {silent.url} is awaited: /v1/models: {CONNECTION_REFUSED}"
        await until(lambda: [line.startswith(at) for line in problems(made)] == [True])
        made.fleet.on_gone("uid of silent")
        await until(lambda: len(made.fleet.expected()) == 1)


async def test_gone_pod_withdraws_its_worker_and_its_return_is_a_new_incarnation() -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine)
        made.fleet.on_pod(given)
        card = await made.joined(given)
        made.fleet.on_gone(given.uid)
        await until(lambda: made.gone == [card.incarnation])
        await until(lambda: made.fleet.workers == {})
        over = pod_of_engine(engine)
        made.fleet.on_pod(over)
        again = await made.joined(over)
        assert again.incarnation != card.incarnation


@pytest.mark.parametrize("change", ["container", "address", "annotation"])
async def test_restart_new_address_or_new_role_makes_a_new_incarnation(change: str) -> None:
    async with scripted_engine() as engine, scripted_engine() as other, running_pod_fleet() as made:
        given = pod_of_engine(engine)
        made.fleet.on_pod(given)
        card = await made.joined(given)
        changed = {
            "container": pod_of_engine(engine, restarts=1),
            "address": pod_of_engine(other),
            "annotation": pod_of_engine(engine, annotations={"role": "decode"}),
        }[change]
        made.fleet.on_pod(changed)
        await until(lambda: made.gone == [card.incarnation] and made.card(given) is not None)
        now = await made.joined(given)
        assert (now.worker_id, now.incarnation == card.incarnation) == (card.worker_id, False)
        assert (now.role is Role.DECODE) is (change == "annotation")


async def test_internal_error_while_a_worker_leaves_does_not_block_its_pod(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop, mistakes = Worker.stop, [RuntimeError("a mistake of ours")]

    async def stopped(worker: Worker) -> None:
        await stop(worker)
        if mistakes:
            raise mistakes.pop()

    monkeypatch.setattr(Worker, "stop", stopped)
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine)
        made.fleet.on_pod(given)
        card = await made.joined(given)
        made.fleet.on_pod(pod_of_engine(engine, restarts=1))
        await until(lambda: made.gone == [card.incarnation] and made.card(given) is not None)
    assert caplog.text.count("internal_error") == 1


async def test_changed_label_moves_the_worker_without_a_new_incarnation() -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine, labels={ZONE: "a"}, annotations={"taints": "gpu"})
        made.fleet.on_pod(given)
        card = await made.joined(given)
        made.fleet.on_pod(pod_of_engine(engine, labels={ZONE: "b"}, annotations={"taints": "gpu"}))
        await until(lambda: made.cards[card.worker_id].runtime_config.topology_domains == {"zone": "b"})
        now = made.cards[card.worker_id]
        assert now.incarnation == card.incarnation
        assert now.runtime_config.taints == {"gpu"}
        assert made.gone == []


async def test_pod_mistake_is_reported_once_and_its_fix_lets_the_engine_join(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with scripted_engine() as engine, running_pod_fleet() as made:
        wrong = pod_of_engine(engine, annotations={"role": "cook"})
        made.fleet.on_pod(wrong)
        made.fleet.on_pod(wrong)
        (message,) = made.reported(MISTAKEN)
        assert message.startswith("annotation kvrouter.dev/role: must be ")
        assert caplog.text.count("engine_pod_refused") == 1
        assert problems(made) == [f"the engine of pod vllm-0 is refused: {message}"]
        fixed = pod_of_engine(engine)
        made.fleet.on_pod(fixed)
        card = await made.joined(fixed)
        made.fleet.on_pod(wrong)
        await until(lambda: made.gone == [card.incarnation])
        assert len(made.reported(MISTAKEN)) == 2


async def test_folder_without_a_tokenizer_does_not_keep_an_engine_out(tmp_path: Path) -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine, annotations={"tokenizer": str(tmp_path)})
        made.fleet.on_pod(given)
        assert (await made.joined(given)).tokenizer == str(tmp_path)
        assert made.reported(REFUSED) == []


async def test_engine_that_contradicts_its_pod_is_reported_once_and_retried() -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine, annotations={"block-size": "64"})
        made.fleet.on_pod(given)
        await until(lambda: engine.asked["/v1/models"] > 3)
        (message,) = made.reported(REFUSED)
        assert message.startswith(
            f"pod vllm-0: {engine.url}: annotation kvrouter.dev/block-size: the engine's blocks have 32 "
            "tokens, not 64"
        )
        (known,) = made.fleet.expected()
        assert (known.state, known.engine_url) == ("refused", engine.url)
        assert (known.reason or "").startswith("annotation kvrouter.dev/block-size: the engine's blocks have")
        engine.replace("/metrics", 'block_size="32"', 'block_size="64"')
        assert (await made.joined(given)).block_size == 64


async def test_unreachable_planes_are_not_reported_as_an_engine_mistake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine)
        made.ground.mistakes.append(NatsUnreachable("no NATS server lets us in"))
        made.fleet.on_pod(given)
        await until(lambda: engine.asked["/v1/models"] > 2)
        why = "it cannot be announced: no NATS server lets us in"
        await until(lambda: problems(made) == [f"the engine of pod vllm-0 at {engine.url} is awaited: {why}"])
        assert (made.events, caplog.text.count("plane_disturbed")) == ([], 1)
        made.ground.mistakes.clear()
        await made.joined(given)


async def test_engines_of_two_kinds_for_one_pair_are_refused() -> None:
    async with scripted_engine() as one, scripted_engine(SGLANG_PAGES) as other, running_pod_fleet() as made:
        first = pod_of_engine(one, annotations={"role": "prefill"})
        made.fleet.on_pod(first)
        await made.joined(first)
        labels = {"kvrouter.dev/engine": "sglang"}
        made.fleet.on_pod(pod_of_engine(other, "sglang-0", labels=labels))
        await until(lambda: made.reported(REFUSED) != [])
        assert "label kvrouter.dev/engine: must be 'vllm', as that of pod vllm-0" in made.reported(REFUSED)[0]


async def test_pod_under_a_policy_joins_once_its_place_is_known() -> None:
    async with scripted_engine() as engine, running_pod_fleet(IN_ZONE) as made:
        made.fleet.on_pod(pod_of_engine(engine))
        (message,) = made.reported(MISTAKEN)
        assert message.startswith("label topology.kubernetes.io/zone: is required")
        placed = pod_of_engine(engine, labels={ZONE: "a"})
        made.fleet.on_pod(placed)
        config = (await made.joined(placed)).runtime_config
        assert (config.kv_transfer_domain, config.kv_transfer_enforcement) == ("zone", Enforcement.REQUIRED)


async def test_worker_whose_place_is_taken_leaves_and_rejoins_when_it_is_free() -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine)
        made.fleet.on_pod(given)
        card = await made.joined(given)
        made.ground.is_free.clear()
        made.ground.losses[0].set()
        await until(lambda: made.gone == [card.incarnation])
        await until(lambda: [SERVED_ELSEWHERE in line for line in problems(made)] == [True])
        made.fleet.on_pod(pod_of_engine(engine, ready=False))
        made.ground.is_free.set()
        again = await made.joined(given)
        assert (again.incarnation == card.incarnation, again.draining) == (False, True)


async def test_engine_whose_worker_waits_for_another_process_is_described_so() -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        made.ground.is_free.clear()
        made.fleet.on_pod(pod_of_engine(engine))
        await until(lambda: [ANNOUNCING in line for line in problems(made)] == [True])


async def test_worker_whose_place_is_taken_drains_within_the_limit(
    watch_calls: WatchCalls,
) -> None:
    drains = watch_calls(Worker, "drain")
    async with scripted_engine() as engine, running_pod_fleet(drain_limit_s=7.0) as made:
        given = pod_of_engine(engine)
        made.fleet.on_pod(given)
        card = await made.joined(given)
        made.ground.losses[0].set()
        await until(lambda: made.gone == [card.incarnation])
    assert [call.arguments[1] for call in drains] == [7.0]


async def test_drain_withdraws_all_workers_and_admits_no_pods() -> None:
    async with scripted_engine() as engine, running_pod_fleet() as made:
        given = pod_of_engine(engine)
        made.fleet.on_pod(given)
        card = await made.joined(given)
        await made.fleet.drain()
        made.fleet.on_pod(given)
        assert (made.gone, made.fleet.workers, made.fleet.expected()) == ([card.incarnation], {}, [])


async def test_late_watcher_is_informed_that_the_store_is_lost() -> None:
    discovery = PodsDiscovery()
    heard: list[tuple[bool, str]] = []
    discovery.on_store(False, "away")
    end = await discovery.watch(lambda _: None, lambda *_: None, lambda *reported: heard.append(reported))
    discovery.on_store(True, "")
    end()
    discovery.on_store(False, "away")
    assert heard == [(False, "away"), (True, "")]


def test_policy_and_keys_of_pods_are_read_from_worker_variables() -> None:
    assert policy_of({}) == (PodPolicy(), ())
    policy, _ = policy_of(
        {
            "DYN_KV_TRANSFER_DOMAIN": "rack",
            "DYN_KV_TRANSFER_ENFORCEMENT": "preferred",
            "DYN_KV_TRANSFER_PREFERRED_WEIGHT": "0.5",
            "DYN_TOPOLOGY_LEVELS": "zone,rack",
            "KVROUTER_ENGINE_API_KEY": "secret",
            "KVROUTER_ENGINE_API_KEY_A": "another",
            "KVROUTER_PLANE_TOKEN": "none of the engines' business",
        }
    )
    assert policy == PodPolicy(
        transfer=KvTransferSpec(domain="rack", enforcement=Enforcement.PREFERRED, preferred_weight=0.5),
        levels=("zone", "rack"),
        keys={"KVROUTER_ENGINE_API_KEY": "secret", "KVROUTER_ENGINE_API_KEY_A": "another"},
    )
    with pytest.raises(ConfigError, match="DYN_KV_TRANSFER_ENFORCEMENT"):
        policy_of({"DYN_KV_TRANSFER_DOMAIN": "zone", "DYN_KV_TRANSFER_ENFORCEMENT": "hard"})


def test_pod_selector_always_includes_the_engine_label() -> None:
    assert full_selector(EnginePods()) == "kvrouter.dev/engine"
    assert full_selector(EnginePods(selector="team=a")) == "kvrouter.dev/engine,team=a"


async def test_shutdown_does_not_wait_for_a_silent_engine() -> None:
    silent = await stopped_engine()
    async with asyncio.timeout(30.0), running_pod_fleet() as made:
        made.fleet.on_pod(pod_of_engine(silent))
        await until(lambda: made.fleet.expected() != [])
    assert made.fleet.workers == {}
    assert made.events == []
