"""``kvrouter explain --request-id``, and what ``explain`` tells of a real router and its chats."""

import asyncio
import io
import json

import pytest
from rich.console import Console

from kvrouter.api.client import decode_answer
from kvrouter.api.decision_schema import Decisions
from kvrouter.cli import main
from kvrouter.cli.explain.report import draw_decisions
from kvrouter.core.workers import Enforcement, Role
from kvrouter.fleetfile.fleet_checks import default_fleet_document, load_fleet
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.frontend_harness import running_frontend, text_answer
from tests.testing.mock_server import MODEL, MockServer, mock_server, user, words
from tests.testing.router_harness import card
from tests.testing.scripted_transport import ScriptedStream

PICK = {
    "worker_id": 1,
    "dp_rank": 0,
    "overlap_blocks": 2,
    "prefill_blocks": 8.25,
    "decode_blocks": 10.0,
    "transfer_blocks": 0.0,
    "multiplier": 1.0,
    "cost": 18.25,
    "candidates": 3,
}
ATTEMPT = {
    "attempt": 0,
    "decided_at": 1_700_000_000.25,
    "mode": "kv",
    "prefill": PICK,
    "decode": PICK | {"worker_id": 7, "dp_rank": 1, "cost": 3.5},
    "constraint": {"enforcement": "required", "domain": "zone", "value": "a"},
    "fallback_used": False,
    "cross_domain": False,
}


def drawn(*attempts: dict[str, object]) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=140, force_terminal=True, color_system="standard")
    answer = json.dumps({"request_id": "r[1]", "attempts": attempts}).encode()
    draw_decisions(decode_answer(answer, Decisions), console)
    return stream.getvalue()


def rows_of(text: str) -> list[list[str]]:
    return [line.replace("│", "").split() for line in text.splitlines() if "│" in line]


def test_decisions_of_all_attempts_are_drawn_with_mode_and_kv_transfer() -> None:
    out = drawn(ATTEMPT, ATTEMPT | {"attempt": 1, "prefill": None, "constraint": None})
    assert "r[1]" in out
    assert "2 decisions" in out
    assert "Attempt 0, mode kv, 2023-11-14T22:13:20.250Z" in out
    assert "Attempt 1" in out
    assert out.count("KV transfer: ") == 1
    assert out.count("\x1b[1;32m") >= 3
    assert "crosses" not in out


def test_last_resort_decision_is_marked() -> None:
    assert "failed again and again" in drawn(ATTEMPT | {"last_resort": True})
    assert "failed again and again" not in drawn(ATTEMPT)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"fallback_used": True, "cross_domain": True},
            "crosses its domain: no decode worker was left in it",
        ),
        ({"cross_domain": True}, "not known to stay in its domain, which is preferred"),
    ],
)
def test_handoff_that_leaves_its_domain_is_highlighted(fields: dict[str, object], said: str) -> None:
    out = drawn(ATTEMPT | fields)
    assert "\x1b[33mThe handoff" in out
    assert said in out


async def test_a_kept_decision_of_a_router_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    def script(worker: ScriptedStream) -> None:
        if worker.request.attempt == 0:
            worker.die()
        else:
            text_answer("ok")(worker)

    config = KvRouterConfig(router_cost="blocks")
    async with running_frontend(
        card(1, zone="a"), card(2, zone="a"), config=config, script=script
    ) as frontend:
        url = "http://{}:{}".format(*frontend.address)
        response = await frontend.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "hello"},
            headers={"x-request-id": "team/a:1@x"},
        )
        assert response.status_code == 200
        arguments = ["explain", "--url", url, "--request-id"]
        assert await asyncio.to_thread(main, [*arguments, "team/a:1@x"]) == 0
        out = capsys.readouterr().out
        assert await asyncio.to_thread(main, [*arguments, "team/a:1@x", "--output", "json"]) == 0
        kept = json.loads(capsys.readouterr().out)
        assert await asyncio.to_thread(main, [*arguments, "a b"]) == 1
        unknown = capsys.readouterr().err
    assert out.startswith("team/a:1@x, 2 decisions\n")
    assert "\x1b" not in out
    answered = response.headers["x-kvrouter-decode-worker"]
    failed = str(3 - int(answered))
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["→", f"{answered}/0", "→", f"{failed}/0"]
    assert rows[3][-1] == "excluded"
    assert [row[1] for row in rows_of(out) if row[0] == "→"] == [f"{failed}/0", f"{answered}/0"]
    assert [attempt["attempt"] for attempt in kept["attempts"]] == [0, 1]
    assert unknown == f"kvrouter: {url}: 404 request_id: no decision is kept for 'a b'\n"


async def test_a_fallback_of_a_router_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    cards = (
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.FALLBACK),
        card(2, Role.DECODE, zone="b"),
    )
    async with running_frontend(*cards, script=text_answer("ok"), config=KvRouterConfig()) as frontend:
        url = "http://{}:{}".format(*frontend.address)
        await frontend.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"x-request-id": "f"}
        )
        assert await asyncio.to_thread(main, ["explain", "--url", url, "--request-id", "f"]) == 0
    out = capsys.readouterr().out
    assert [row[:2] for row in rows_of(out)][:2] == [["→", "1/0"], ["→", "2/0"]]
    assert "KV transfer: fallback zone=a" in out
    assert "crosses its domain" in out


async def test_a_past_refusal_is_drawn_with_the_reason_of_each_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cards = (card(1, taints=("gpu",)), card(2))
    async with running_frontend(*cards, script=text_answer("ok")) as frontend:
        url = "http://{}:{}".format(*frontend.address)
        body = {"model": MODEL, "prompt": "x", "nvext": {"routing_constraints": {"required_taints": ["tpu"]}}}
        response = await frontend.http.post("/v1/completions", json=body, headers={"x-request-id": "f"})
        assert response.status_code == 503
        frontend.harness.discovery.drop(1)
        assert await asyncio.to_thread(main, ["explain", "--url", url, "--request-id", "f"]) == 0
    out = capsys.readouterr().out
    assert "no_eligible_worker: no decode worker may take this request (of 2 decode ranks: 2 taint" in out
    assert "Worker: nobody, 0 of 2 eligible" in out
    assert [(row[0], row[-1]) for row in rows_of(out)] == [("1/0", "taint_missing"), ("2/0", "taint_missing")]


async def overlaps(here: MockServer, *arguments: str, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The overlap of each prefill worker with the prompt that is explained."""
    assert await asyncio.to_thread(main, ["explain", *arguments, "--url", here.url, "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["prefill"]["candidates"]
    return [row["overlap_blocks"] for row in rows]


async def test_explain_shows_the_overlap_that_a_chat_left_on_a_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt = words(n=200)
    async with mock_server(load_fleet(default_fleet_document()).fleet) as here:
        await here.openai.chat.completions.create(model=MODEL, messages=user(prompt), max_tokens=1)
        await here.until_quiet()
        chat = await overlaps(here, prompt, capsys=capsys)
        completion = await overlaps(here, "--completion", prompt, capsys=capsys)
    assert sorted(chat) == [0, 3]
    assert completion == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "give PROMPT, or --request-id ID, and not both"),
        (["hi", "--request-id", "r"], "give PROMPT, or --request-id ID, and not both"),
        (["--request-id", "r", "--model", "m"], "--model and --completion are about PROMPT"),
        (["--request-id", "r", "--completion"], "--model and --completion are about PROMPT"),
    ],
)
def test_explain_flag_mistake_is_one_line_with_exit_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvrouter: {line}")
    assert err.count("\n") == 1
