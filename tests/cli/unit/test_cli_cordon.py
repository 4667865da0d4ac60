"""``kvrouter cordon``, ``uncordon`` and ``drain`` against a router."""

import asyncio
import json

import pytest

from kvrouter.api.client import AskFailed, RouterClient, decode_answer
from kvrouter.api.cordon_schema import CordonBody, CordonChange
from kvrouter.cli import main
from kvrouter.cli.cordon.run import wait_empty
from tests.support.fleets import card, decode_card, prefill_card
from tests.support.front import House, open_house, says
from tests.support.scripted_transport import silent
from tests.support.waits import until


def url_of(house: House) -> str:
    host, port = house.address
    return f"http://{host}:{port}"


async def run(house: House, *arguments: str) -> int:
    return await asyncio.to_thread(main, [*arguments, "--url", url_of(house)])


async def test_cordon_list_and_uncordon(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_house(
        card(1, zone="a"), card(2, zone="b"), card(3, zone="b"), script=says("ok")
    ) as house:
        assert await run(house, "cordon") == 0
        assert capsys.readouterr().out == "nothing is cordoned\n"
        assert await run(house, "cordon", "zone", "a", "--reason", "rack 4", "--by", "ann") == 0
        assert capsys.readouterr().out == (
            "zone a is cordoned (1 worker)\nmodel mock: 2 of 3 both workers take new requests\n"
        )
        assert await run(house, "cordon", "zone", "a") == 0
        assert "zone a was cordoned already (1 worker)" in capsys.readouterr().out
        assert await run(house, "cordon") == 0
        heading, row = capsys.readouterr().out.splitlines()
        assert heading.split() == ["cordoned", "workers", "running", "since", "by", "reason"]
        assert row.split()[:4] == ["zone", "a", "1", "0"]
        assert row.split()[-3:] == ["ann", "rack", "4"]
        assert await run(house, "cordon", "--output", "json") == 0
        assert json.loads(capsys.readouterr().out)["cordons"][0]["by"] == "ann"
        assert await run(house, "uncordon", "zone", "a") == 0
        assert "zone a is uncordoned (1 worker)" in capsys.readouterr().out
        assert await run(house, "uncordon", "zone", "a", "--output", "json") == 0
        assert json.loads(capsys.readouterr().out)["changed"] is False
        assert await run(house, "cordon", "worker", "3") == 0
        (cordon,) = house.bench.service.cordons.rules.all
        assert "@" in cordon.by


async def test_the_last_worker_needs_force(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_house(prefill_card(1), decode_card(2)) as house:
        assert await run(house, "cordon", "worker", "2") == 1
        assert "needs --force: with worker 2 cordoned, model mock: none of its 1" in capsys.readouterr().err
        assert await run(house, "cordon", "worker", "2", "--force") == 0
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
async def test_a_mistake_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    async with open_house(card(1, zone="a")) as house:
        assert await run(house, *arguments) == code
    assert said in capsys.readouterr().err


async def test_drain_waits_for_what_runs_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_house(card(1, zone="a"), card(2, zone="b"), script=silent) as house:
        pins = [{"nvext": {"backend_instance_id": worker}} for worker in (1, 1, 2)]
        chats = [asyncio.create_task(house.chat(fields=pin, max_tokens=1)) for pin in pins]
        await until(lambda: len(house.plane.opened) == 3)
        draining = asyncio.create_task(run(house, "drain", "zone", "a"))
        said = ""
        while "2 requests run (worker 1: 2)" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
        assert not draining.done()
        for stream in house.plane.opened:
            says("ok")(stream)
        assert {(await chat).status_code for chat in chats} == {200}, "no request is cut"
        assert await draining == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("zone a: nothing runs there any more\n")
    assert not printed.err.strip() or "waiting until every router knows" in printed.err


async def test_drain_whose_time_ran_out_leaves_the_cordon(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_house(card(1), card(2), script=silent) as house:
        chat = asyncio.create_task(house.chat(max_tokens=1))
        await until(lambda: bool(house.plane.opened))
        worker = house.plane.opened[0].address[-1]
        assert await run(house, "drain", "worker", worker, "--timeout", "0") == 1
        said = f"worker {worker}: after 0 s 1 request runs (worker {worker}: 1); the cordon stays"
        assert said in capsys.readouterr().err
        assert house.bench.service.cordons.rules
        says("ok")(house.plane.opened[0])
        assert (await chat).status_code == 200


async def test_drain_asks_again_when_the_router_is_away_and_ends_when_it_is_uncordoned() -> None:
    async with open_house(card(1), card(2)) as house:
        client = RouterClient(url_of(house))
        body = CordonBody("worker", "1")
        change = decode_answer(await asyncio.to_thread(client.cordon, body), CordonChange)
        now, away = [0.0], iter((True, True, False, False, True))

        class Sometimes(RouterClient):
            def read(self, path: str) -> bytes:
                if next(away, False):
                    raise AskFailed("away")
                return super().read(path)

        def sleep(seconds: float) -> None:
            now[0] += seconds

        def wait(timeout_s: float | None) -> None:
            there = Sometimes(url_of(house))
            wait_empty(there, change, timeout_s=timeout_s, clock=lambda: now[0], sleep=sleep)

        await asyncio.to_thread(wait, None)
        assert now[0] == 3.0, "twice away, and two readings"
        await asyncio.to_thread(client.uncordon, "worker", "1")
        with pytest.raises(AskFailed, match="somebody uncordoned it"):
            await asyncio.to_thread(wait, 60.0)
