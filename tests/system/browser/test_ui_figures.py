"""What the page at ``/ui`` shows first, in a real Chromium: figures that equal ``/metrics``."""

import re
from typing import Any

import pytest

from tests.system.browser.driver import Browser
from tests.system.browser.ui_page import CONTRASTS, OUTSIDE, PLAIN, opened, polled, refused, send
from tests.testing.mock_fleet import fleet_file, uniform_fleet, zoned_fleet
from tests.testing.mock_server import MockServer, mock_server

FLEETS = {"plain": uniform_fleet(), "zones": zoned_fleet()}
LONG = "an-organisation/a-model-with-a-name-as-long-as-those-of-hubs-can-be-70B-Instruct-2026-11-29"
CARDS = """() => Object.fromEntries([...document.querySelectorAll('.totals > div')].map((card) => [
  card.children[0].innerText, card.innerText.replaceAll('\\u00a0', ' ')]))"""
PARTS = """() => [...document.querySelectorAll('section')].filter((node) => node.checkVisibility())
  .map((node) => node.id)"""


def numbers(text: str, pattern: str) -> list[float]:
    """The numbers that a pattern finds in a text."""
    found = re.search(pattern, text, re.S)
    assert found, text
    return [float(number.replace(",", "")) for number in found.groups()]


def figure(cards: dict[str, str], title: str, pattern: str) -> list[float]:
    """The numbers that a pattern finds in a card."""
    return numbers(cards[title], pattern)


async def mix(house: MockServer) -> None:
    for number, (first, n) in enumerate(((1, 200), (2, 700), (1, 200), (1, 450), (2, 700))):
        await send(house, first, n=n, max_tokens=6, name=f"chat-{number}")
    await refused(house)
    await house.until_quiet()


@pytest.mark.parametrize("name", FLEETS)
async def test_the_first_figures_equal_the_metrics(chromium: Browser, name: str) -> None:
    async with mock_server(FLEETS[name]) as house:
        await mix(house)
        metrics = await house.metrics()
        await opened(chromium, house.url)
        cards = await chromium.evaluate(CARDS)
        minute = (await house.http.get("/v1/fleet")).json()["request_stats"]["last_minute"]
        decision = await chromium.until_text(".decision", "chat-4", "→")
        (row,) = (await house.http.get("/v1/decisions?limit=1")).json()["decisions"]
        assert await chromium.complaints() == []
    prompt, cached, expected, answer = (
        metrics.value(f"{each}_tokens_total") for each in ("prompt", "cached", "overlap", "completion")
    )
    hits = figure(
        cards,
        "Cache hit rate, as engines count",
        r"([\d.]+)%\nrouter expected ([\d.]+)%.* ([\d.]+)% since the start",
    )
    assert hits == pytest.approx([100 * each / prompt for each in (cached, expected, cached)], abs=0.051)
    assert cached > 0
    first_tokens = metrics.value("time_to_first_token_seconds_count")
    assert figure(cards, "TTFT p50 / p99", r"of ([\d,]+) first tokens") == [first_tokens]
    p50_ms, p99_ms = (1e3 * minute[f"ttft_{each}_s"] for each in ("p50", "p99"))
    shown_ms = figure(cards, "TTFT p50 / p99", r"\n([\d.]+)(?: ms)? / ([\d.]+) ms")
    assert shown_ms == pytest.approx([p50_ms, p99_ms], abs=0.51)
    requests = metrics.value("requests_total")
    assert figure(cards, "Requests a second", r"([\d,]+) since the start") == [requests]
    errors = metrics.value("errors_total")
    assert figure(cards, "Errors", r"\n([\d,]+)\nof ([\d,]+) requests.* ([\d,]+) of ([\d,]+) since") == [
        errors,
        requests,
        errors,
        requests,
    ]
    assert minute["completion_tokens"] == answer
    (answered_a_second,) = figure(cards, "Tokens a second", r"\n([\d,.]+)\n")
    (prompt_a_second,) = figure(cards, "Tokens a second", r"and ([\d,.]+) of prompts")
    assert prompt_a_second / answered_a_second == pytest.approx(prompt / answer, rel=0.02)
    assert "mock" in decision
    assert f"{row['isl_tokens']} tokens" in decision
    shares = [100 * row[each] / row["isl_tokens"] for each in ("expected_cached_tokens", "cached_tokens")]
    assert numbers(decision, r"(\d+)% → (\d+)%") == pytest.approx(shares, abs=1.0)
    picks = [row[leg] for leg in ("prefill", "decode") if row[leg] is not None]
    expected_ms = sum(pick["times"]["expected_ms"] for pick in picks)
    times_ms = numbers(decision, r"([\d.]+) ms → ([\d.]+) ms")
    assert times_ms == pytest.approx([expected_ms, row["ttft_ms"]], abs=0.51)


HITS = {
    "counted": (7, "Cache hit rate, as engines count", r"\n30\.0%\nrouter expected 45\.0%"),
    "counted-partly": (3, "Cache hit rate, as engines count", "counted in 3 of 7 answers"),
    "not-counted": (0, "Cache hit rate, as the router expects", r"\n45\.0%\nengines do not count theirs"),
}


@pytest.mark.parametrize("case", HITS)
async def test_the_hit_rate_is_that_of_the_engines_where_they_count(chromium: Browser, case: str) -> None:
    counted, title, says = HITS[case]
    async with mock_server(FLEETS["plain"]) as house:
        answer = (await house.http.get("/v1/fleet")).json()
        for window in answer["request_stats"].values():
            tokens = {"prompt_tokens": 1000 if counted else 0, "cached_tokens": 300 if counted else 0}
            predicted = {"requests": 7, "prompt_tokens": 1000, "cached_tokens": 450}
            window.update(first_tokens=7, predicted=predicted, reported={"requests": counted, **tokens})
        await opened(chromium, house.url, answers={"/v1/fleet": answer})
        cards = await chromium.evaluate(CARDS)
    assert re.search(says, cards[title]), cards[title]


async def test_a_plain_fleet_shows_no_part_that_has_nothing_yet(chromium: Browser) -> None:
    async with mock_server(FLEETS["plain"]) as house:
        await opened(chromium, house.url)
        parts = await chromium.evaluate(PARTS)
        cards = await chromium.evaluate(CARDS)
        assert parts == ["serving", "fleet", "decisions", "ask"]
        assert "no request yet" in cards["Cache hit rate, as the router expects"]
        await send(house, 1)
        await chromium.until_text("#decision-list", "chat-1")
        assert await chromium.evaluate(PARTS) == parts
        assert "Handoffs" not in await chromium.evaluate(CARDS)
        assert "KV" not in await chromium.evaluate("document.querySelector('nav').innerText")
        await refused(house)
        await chromium.until_text("#refusals", "no_eligible_worker")


async def test_parts_for_pairs_come_with_the_first_handoff(chromium: Browser) -> None:
    async with mock_server(FLEETS["zones"]) as house:
        await opened(chromium, house.url)
        assert "flows" not in await chromium.evaluate(PARTS)
        await send(house, 1)
        await chromium.until_text("#flow-table", "zone")
        assert "Handoffs" in await chromium.evaluate(CARDS)


async def test_a_few_cached_blocks_of_many_make_a_bar_that_can_be_read(chromium: Browser) -> None:
    widths = """[...document.querySelectorAll('.cache i')].map((bar) => [
        bar.clientWidth, parseFloat(getComputedStyle(bar, '::after').width)])"""
    async with mock_server(fleet_file(PLAIN)) as house:
        answer = (await house.http.get("/v1/fleet")).json()
        for worker, blocks in zip(answer["workers"], (38, 2), strict=True):
            worker["ranks"][0]["index_blocks"] = blocks
        await opened(chromium, house.url, answers={"/v1/fleet": answer})
        await chromium.until_text("#zones", "38 of 16,384", "2 of 16,384")
        await chromium.until_text(".legend", "a full bar is 1% of a worker's")
        await chromium.until(f"() => {widths}[0][1] > 8")  # the bar grows
        (width, many), (_, few) = await chromium.evaluate(widths)
    assert many / width > 0.1
    assert few >= 3


async def test_long_tables_say_how_many_rows_there_are_and_show_all(chromium: Browser) -> None:
    async with mock_server(FLEETS["plain"]) as house:
        for number in range(17):
            await send(house, 1, name=f"chat-{number}")
        answer: dict[str, Any] = (await house.http.get("/v1/fleet")).json()
        answer["models"] = [{**answer["models"][0], "model": f"{LONG}-{number}"} for number in range(25)]
        await opened(chromium, house.url, answers={"/v1/fleet": answer})
        await chromium.until_text("#model-table", f"{LONG}-19", "20 of 25 rows")
        await chromium.click("#model-table button")
        await chromium.until_text("#model-table", f"{LONG}-24", "All 25 rows")
        await polled(chromium)
        await chromium.until_text("#model-table", f"{LONG}-24")
        await chromium.until_text("#decisions", "The latest 14 of 17 requests")
        await chromium.click("#older")
        await chromium.until_text("#decision-list", "chat-0")
        assert await chromium.evaluate("document.querySelectorAll('.decision').length") == 17
        assert await chromium.complaints() == []


def with_problems(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer of ``/v1/fleet`` with long names, and with engines that have not joined."""
    reason = "/v1/models: connection refused, nothing listens at its host and port: is it running?"
    engine = {"written_at": "workers[1].engine.url", "worker_id": 2, "kind": "vllm", "role": "both"}
    expected = [
        {
            **engine,
            "engine_url": "http://10.0.0.8:8000",
            "state": "awaited",
            "reason": reason,
            "since_s": 1.0,
        },
        {**engine, "engine_url": f"http://{'a' * 60}:1", "state": "refused", "reason": "other block_size"},
        {**engine, "engine_url": "http://10.0.0.9:8000", "state": "joined", "reason": None},
    ]
    rest = {"model": LONG, "pod": None}
    workers = [
        {**worker, "model": LONG, "domains": {"zone": LONG}, "engine_url": f"http://{LONG}:8000"}
        for worker in answer["workers"]
    ]
    return {
        **answer,
        "workers": workers,
        "models": [{**answer["models"][0], "model": f"{LONG}-{number}"} for number in range(3)],
        "expected_engines": [{"since_s": None, **rest, **each} for each in expected],
    }


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
async def test_engines_that_have_not_joined_are_shown_first_with_their_reason(
    chromium: Browser, width: int, scheme: str
) -> None:
    async with mock_server(FLEETS["zones"]) as house:
        await send(house, 1, name=LONG)
        answer = with_problems((await house.http.get("/v1/fleet")).json())
        await opened(chromium, house.url, width=width, scheme=scheme, answers={"/v1/fleet": answer})
        text = await chromium.until_text("main", "1 of 3 engines joined", "http://10.0.0.8:8000", "awaited")
        page = await chromium.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
        outside = await chromium.evaluate(OUTSIDE)
        faint = await chromium.evaluate(CONTRASTS)
    assert text.startswith("1 of 3 engines joined")
    assert "nothing listens at its host and port" in text
    assert "other block_size" in text
    assert "10.0.0.9" not in text
    assert page[0] <= page[1]
    assert outside == []
    assert faint == {}
