"""``kvrouter cordon``, ``uncordon`` and ``drain`` against a router."""

import asyncio
import json

import pytest

from kvrouter.api.client import AskFailed, RouterClient, decode_answer
from kvrouter.api.cordon_schema import CordonBody, CordonChange
from kvrouter.cli import main
from kvrouter.cli.cordon.run import wait_empty
from tests.testing.frontend_harness import FrontendHarness, running_frontend, text_answer
from tests.testing.router_harness import card, decode_card, prefill_card
from tests.testing.scripted_transport import silent
from tests.testing.waits import until


def url_of(frontend: FrontendHarness) -> str:
    host, port = frontend.address
    return f"http://{host}:{port}"


async def run(frontend: FrontendHarness, *arguments: str) -> int:
    return await asyncio.to_thread(main, [*arguments, "--url", url_of(frontend)])


async def test_cordon_is_set_listed_and_removed_by_uncordon(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_frontend(
        card(1, zone="a"), card(2, zone="b"), card(3, zone="b"), script=text_answer("ok")
    ) as frontend:
        assert await run(frontend, "cordon") == 0
        assert capsys.readouterr().out == "nothing is cordoned\n"
        assert await run(frontend, "cordon", "zone", "a", "--reason", "rack 4", "--by", "ann") == 0
        assert capsys.readouterr().out == (
            "zone a is cordoned (1 worker)\nmodel mock: 2 of 3 both workers take new requests\n"
        )
        assert await run(frontend, "cordon", "zone", "a") == 0
        assert "zone a was cordoned already (1 worker)" in capsys.readouterr().out
        assert await run(frontend, "cordon") == 0
        heading, row = capsys.readouterr().out.splitlines()
        assert heading.split() == ["cordoned", "workers", "running", "since", "by", "reason"]
        assert row.split()[:4] == ["zone", "a", "1", "0"]
        assert row.split()[-3:] == ["ann", "rack", "4"]
        assert await run(frontend, "cordon", "--output", "json") == 0
        assert json.loads(capsys.readouterr().out)["cordons"][0]["by"] == "ann"
        assert await run(frontend, "uncordon", "zone", "a") == 0
        assert "zone a is uncordoned (1 worker)" in capsys.readouterr().out
        assert await run(frontend, "uncordon", "zone", "a", "--output", "json") == 0
        assert json.loads(capsys.readouterr().out)["changed"] is False
        assert await run(frontend, "cordon", "worker", "3") == 0
        (cordon,) = frontend.harness.service.cordons.rules.all
        assert "@" in cordon.by


async def test_cordoning_the_last_worker_needs_force(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_frontend(prefill_card(1), decode_card(2)) as frontend:
        assert await run(frontend, "cordon", "worker", "2") == 1
        assert "needs --force: with worker 2 cordoned, model mock: none of its 1" in capsys.readouterr().err
        assert await run(frontend, "cordon", "worker", "2", "--force") == 0
        assert "kvrouter: warning: model mock: none of its 1 decode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("cordon", "zone"), 2, "give LEVEL and NAME"),
        (("cordon", "--force"), 2, "are about LEVEL NAME"),
        (("cordon", "rack", "1"), 1, "404 level: no worker here has a 'rack'"),
        (("uncordon", "rack", "1"), 1, "404 level: "),
        (("drain", "worker", "9"), 1, "404 name: no worker 9 is here"),
        (("drain", "worker"), 2, "Missing argument 'NAME'"),
    ],
)
async def test_cordon_or_drain_mistake_is_reported_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    async with running_frontend(card(1, zone="a")) as frontend:
        assert await run(frontend, *arguments) == code
    assert said in capsys.readouterr().err


async def test_drain_waits_for_running_requests_and_names_their_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running_frontend(card(1, zone="a"), card(2, zone="b"), script=silent) as frontend:
        pins = [{"nvext": {"backend_instance_id": worker}} for worker in (1, 1, 2)]
        chats = [asyncio.create_task(frontend.chat(fields=pin, max_tokens=1)) for pin in pins]
        await until(lambda: len(frontend.plane.opened) == 3)
        draining = asyncio.create_task(run(frontend, "drain", "zone", "a"))
        said = ""
        while "2 requests run (worker 1: 2)" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
        assert not draining.done()
        for stream in frontend.plane.opened:
            text_answer("ok")(stream)
        assert {(await chat).status_code for chat in chats} == {200}, "no request is cut"
        assert await draining == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("zone a: nothing runs there any more\n")
    assert not printed.err.strip() or "waiting until every router knows" in printed.err


async def test_drain_that_times_out_leaves_the_cordon(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_frontend(card(1), card(2), script=silent) as frontend:
        chat = asyncio.create_task(frontend.chat(max_tokens=1))
        await until(lambda: bool(frontend.plane.opened))
        worker = frontend.plane.opened[0].address[-1]
        assert await run(frontend, "drain", "worker", worker, "--timeout", "0") == 1
        said = f"worker {worker}: after 0 s 1 request runs (worker {worker}: 1); the cordon stays"
        assert said in capsys.readouterr().err
        assert frontend.harness.service.cordons.rules
        text_answer("ok")(frontend.plane.opened[0])
        assert (await chat).status_code == 200


async def test_drain_retries_an_unreachable_router_and_ends_when_uncordoned() -> None:
    async with running_frontend(card(1), card(2)) as frontend:
        client = RouterClient(url_of(frontend))
        body = CordonBody("worker", "1")
        change = decode_answer(await asyncio.to_thread(client.cordon, body), CordonChange)
        now, away = [0.0], iter((True, True, False, False, True))

        class Sometimes(RouterClient):
            def cordons(self) -> bytes:
                if next(away, False):
                    raise AskFailed("away")
                return super().cordons()

        def sleep(seconds: float) -> None:
            now[0] += seconds

        def wait(timeout_s: float | None) -> None:
            there = Sometimes(url_of(frontend))
            wait_empty(there, change, timeout_s=timeout_s, clock=lambda: now[0], sleep=sleep)

        await asyncio.to_thread(wait, None)
        assert now[0] == 3.0, "twice away, and two readings"
        await asyncio.to_thread(client.uncordon, "worker", "1")
        with pytest.raises(AskFailed, match="somebody uncordoned it"):
            await asyncio.to_thread(wait, 60.0)


async def test_drain_says_every_few_seconds_what_still_runs(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_frontend(card(1), card(2), script=silent) as frontend:
        chat = asyncio.create_task(frontend.chat(max_tokens=1))
        await until(lambda: bool(frontend.plane.opened))
        worker = frontend.plane.opened[0].address[-1]
        client = RouterClient(url_of(frontend))
        answer = await asyncio.to_thread(client.cordon, CordonBody("worker", worker))
        change, now = decode_answer(answer, CordonChange), [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        def wait() -> None:
            wait_empty(client, change, timeout_s=25.0, clock=lambda: now[0], sleep=sleep)

        with pytest.raises(AskFailed):
            await asyncio.to_thread(wait)
        runs = f"1 request runs (worker {worker}: 1)"
        assert capsys.readouterr().err.splitlines() == [
            f"worker {worker}: {runs}",
            f"worker {worker}: still, after 10 s: {runs}",
            f"worker {worker}: still, after 20 s: {runs}",
        ]
        text_answer("ok")(frontend.plane.opened[0])
        await chat
