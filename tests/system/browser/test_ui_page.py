"""The web page at ``/ui``, in a real Chromium before a real router."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kvrouter.core.constraints import PdSelection, RouterMode
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import FrontendSettings
from tests.system.browser.driver import Browser
from tests.system.browser.ui_page import (
    CONTRASTS,
    LIVE,
    OUTSIDE,
    PLAIN,
    PRICED,
    asks,
    opened,
    polled,
    refused,
    send,
    traffic,
)
from tests.testing.mock_fleet import fleet_file, zoned_fleet
from tests.testing.mock_server import MockServer, mock_server, words
from tests.testing.processes import fleet, free_ports

PICTURES = "KVROUTER_UI_PICTURES"
"""The folder that keeps the pictures of these tests; that of the README is one of them."""

SCHEMES = ("light", "dark")
EVIL = "<img src=x onerror=alert(1)>"
NODES_MAX = 6000
SINCE_LAST_ASKED_MS = "performance.now() - performance.getEntriesByType('resource').at(-1).startTime"
TWO_ZONES = "\n".join(line for line in PRICED.splitlines() if "zone: c" not in line)
FLEETS = {"plain": PLAIN, "zones": TWO_ZONES}
REQUESTS_SHOWN = 120


async def test_the_ui_loads_without_complaints_or_foreign_requests(chromium: Browser) -> None:
    async with mock_server(zoned_fleet()) as house:
        for n in range(3):
            await send(house, n)
        await refused(house)
        await opened(chromium, house.url)
        fleet_text = await chromium.until_text("#zones", "zone a", "zone b", "#1", "#6")
        await chromium.until_text("#decision-list", "chat-2", "→")
        await chromium.until_text("#flow-table", "zone")
        await chromium.until_text("#refusal-tables", "taint_missing", "no_eligible_worker")
        await chromium.until_text("#totals", "Workers", "Handoffs")
        assert "need attention" not in fleet_text
        assert await chromium.complaints() == []
        asked = await chromium.requests()
        assert asked
        assert [address for address in asked if not address.startswith(f"{house.url}/")] == []
        landmarks = "() => [...document.querySelectorAll('header, nav, main, section')].length"
        assert await chromium.evaluate(landmarks) == 11
        unnamed = """() => [...document.querySelectorAll('button, input, select, textarea, section')].filter(
            (node) => !node.innerText.trim() && !node.labels?.length && !node.getAttribute('aria-label')
            && !node.getAttribute('aria-labelledby')).length"""
        assert await chromium.evaluate(unnamed) == 0


async def test_the_ui_updates_as_requests_run_and_a_worker_dies(chromium: Browser) -> None:
    async with mock_server(zoned_fleet()) as house:
        await opened(chromium, house.url)
        await chromium.until_text("#decisions", "No decision yet")
        await chromium.evaluate("() => { window.before = document.querySelector('.worker'); }")
        await send(house, 1, name="came-later")
        await chromium.until_text("#decision-list", "came-later")
        await chromium.until_text("#totals", "Handoffs\n1")
        await house.kill(3)
        await chromium.until(
            "() => [...document.querySelectorAll('.worker.ill')].length === 1 || "
            "document.querySelectorAll('.worker').length === 5"
        )
        await polled(chromium)
        assert await chromium.evaluate("() => window.before.isConnected"), (
            "a worker that stays is not drawn again"
        )
        assert await chromium.complaints() == []


async def test_an_opened_decision_shows_its_candidates_and_their_reasons(chromium: Browser) -> None:
    async with mock_server(zoned_fleet()) as house:
        await send(house, 1, name="before-anybody-looked")
        await opened(chromium, house.url)
        await chromium.click(".decision")
        await chromium.until_text(".opened:has(.chosen)", "Prefill", "Decode")
        await send(house, 2, name="while-it-is-open")
        await chromium.until_text("#newer", "Show 1 newer")
        assert "while-it-is-open" not in await chromium.evaluate(
            "document.querySelector('#decision-list').innerText"
        )
        await chromium.click("#newer")
        await chromium.until_text("#decision-list", "while-it-is-open")
        await chromium.click("li:not(:has(.chosen)) .decision")
        text = await chromium.until_text("[aria-expanded=true] + .opened:has(.chosen)", "Prefill", "Decode")
    assert text.count("chosen: the lowest cost") == 2
    assert "refused, domain_mismatch: KV may not leave the prefill worker's domain" in text
    assert "costs" in text


async def test_attempts_without_candidates_and_refused_ones_are_shown(chromium: Browser) -> None:
    async with mock_server(zoned_fleet()) as house:
        await send(house, 1, name="sent-again")
        path = "/v1/decisions/sent-again"
        answer = (await house.http.get(path)).json()
        (attempt,) = answer["attempts"]
        error = {"code": "no_eligible_worker", "message": "nobody is left", "refusals": {}}
        last = {"attempt": 1, "prefill": None, "decode": None, "error": error}
        answer["attempts"] = [{**attempt, "table": None}, {**attempt, **last, "table": None}]
        await opened(chromium, house.url, answers={path: answer})
        await chromium.click(".decision")
        await chromium.until_text(".opened", "attempt 1", "What was chosen", "keeps no candidates")
        await chromium.until_text(".opened", "attempt 2", "No worker could take it: nobody is left")
        assert await chromium.complaints() == []


def sum_of(parts: str) -> float:
    """The sum of what the parts of a difference say."""
    numbers = re.findall(r"([+−])([\d.]+)", parts)
    return sum(float(number) * (1 if sign == "+" else -1) for sign, number in numbers)


async def test_the_parts_of_a_cost_difference_add_up_to_it(chromium: Browser) -> None:
    """Also where a worker's place is preferred, which multiplies its cost."""
    async with mock_server(fleet_file(PRICED)) as house:
        await send(house, 3, n=900)
        await opened(chromium, house.url)
        await asks(chromium, words(first=3, n=900))
        answer = await chromium.until_text("#answer", "preference")
    differences = re.findall(r"costs ([\d.,]+) ms more: (.*)", answer)
    assert len(differences) > 5
    for cost, parts in differences:
        assert sum_of(parts) == pytest.approx(float(cost.replace(",", "")), rel=0.02, abs=0.05), parts


async def test_the_ui_shows_where_a_prompt_would_go_and_why(chromium: Browser) -> None:
    async with mock_server(zoned_fleet()) as house:
        await send(house, 5)
        await opened(chromium, house.url)
        verdict = await asks(chromium, words(first=5, n=200))
        answer = await chromium.until_text("#answer", "Prefill", "Decode")
        assert house.system.service.requests.running == 0
        assert (await house.metrics()).value("handoffs_total") == 1, "a question sends nothing"
        await chromium.fill("#ask-taints", "dynamo.topology/zone=nowhere")
        await chromium.click("#ask-form button[type=submit]")
        nowhere = await chromium.until_text("#answer", "Nowhere.")
        await chromium.fill("#ask-taints", "two zones=3")
        complaints = await chromium.complaints()
    assert "to prefill, then worker" in verdict
    assert "KV is required in zone" in verdict
    assert answer.count("chosen: the lowest cost") == 2
    assert "ms more: " in answer, "the parts that make the difference"
    assert answer.count("domain_mismatch") == 2
    assert "taint_missing" in nowhere
    assert complaints == []


async def test_the_ui_works_with_the_keyboard_alone(chromium: Browser) -> None:
    focused = "() => `${document.activeElement.id} ${document.activeElement.className}`"
    outlined = "() => getComputedStyle(document.activeElement).outlineStyle"
    async with mock_server(zoned_fleet()) as house:
        for n in range(2):
            await send(house, n)
        await opened(chromium, house.url)
        await chromium.until_text("#decision-list", "chat-1")

        async def tab_to(what: str) -> None:
            for _ in range(60):
                await chromium.press("Tab")
                if await chromium.evaluate(f"() => document.activeElement.matches({json.dumps(what)})"):
                    return
            raise AssertionError(f"{what} is no stop of the tab key")

        await chromium.press("Tab")
        assert await chromium.evaluate(focused) == " skip"
        assert await chromium.evaluate(outlined) == "solid"
        await chromium.press("Enter")
        await tab_to(".worker")
        first = await chromium.evaluate("() => document.activeElement.innerText")
        assert await chromium.evaluate(outlined) == "solid"
        await tab_to(".decode .worker")
        await chromium.press("ArrowRight")
        second = await chromium.evaluate("() => document.activeElement.innerText")
        await chromium.press("Enter")
        await chromium.until("() => document.querySelector('dialog').open")
        await chromium.until_text("dialog", "Worker 3", "zone a", "decode")
        await polled(chromium)
        await chromium.press("Escape")
        await chromium.until("() => !document.querySelector('dialog').open")
        assert "#1" in first
        assert "#3" in second
        assert "#3" in await chromium.evaluate("() => document.activeElement.innerText"), (
            "the focus came back"
        )
        await tab_to("#hold")
        await tab_to(".decision")
        await chromium.press("Enter")
        await chromium.until_text(".opened", "cost ms")
        await tab_to("#prompt")
        await chromium.type("Where will this go?")
        await chromium.press("Control+Enter")
        await chromium.until_text("#answer", "To worker")
        await polled(chromium)
        assert (await chromium.evaluate(focused)).startswith("prompt"), "an update does not take the focus"


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_ui_follows_the_colour_scheme_with_readable_contrast(
    chromium: Browser, scheme: str
) -> None:
    async with mock_server(fleet_file(PRICED)) as house:
        for n in range(4):
            await send(house, n)
        await refused(house)
        await house.kill(2)
        await opened(chromium, house.url, scheme=scheme)
        await chromium.until_text("#decision-list", "chat-3")
        await asks(chromium, words(n=100))
        await chromium.click(".decision")
        await chromium.until_text(".opened", "cost ms")
        background = await chromium.evaluate("() => getComputedStyle(document.body).backgroundColor")
        faint = await chromium.evaluate(CONTRASTS)
    total = sum(int(part) for part in background.removeprefix("rgb(").removesuffix(")").split(","))
    assert total > 600 if scheme == "light" else total < 200
    assert faint == {}


@pytest.mark.parametrize("width", [1440, 800, 390, 360])
async def test_the_ui_fits_wide_and_narrow_windows(chromium: Browser, width: int) -> None:
    async with mock_server(fleet_file(PRICED)) as house:
        for n in range(4):
            await send(house, n, name=f"a-long-name-of-a-request-as-some-clients-send-them-{n:04}")
        await opened(chromium, house.url, width=width)
        await chromium.until_text("#decision-list", "a-long-name")
        await asks(chromium, words(n=100))
        await chromium.click(".decision")
        await chromium.until_text(".opened", "cost ms")
        page = await chromium.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
        outside = await chromium.evaluate(OUTSIDE)
    assert page[0] <= page[1]
    assert outside == []


async def test_the_ui_shows_a_lost_router_and_its_return(chromium: Browser) -> None:
    port = str(free_ports(1))
    async with fleet({"DYN_DISCOVERY_BACKEND": "auto"}) as processes:
        first = await processes.door("up", "--http-port", port)
        await opened(chromium, first.url)
        await chromium.until_text("#zones", "zone a", "zone b")
        await first.kill()
        await chromium.until_text("#state", "Not reachable since")
        await chromium.until_text("#warning", "does not answer")
        assert "#1" in await chromium.evaluate("document.querySelector('#zones').innerText"), (
            "what was known stays"
        )
        second = await processes.door("up", "--http-port", port)
        assert second.url == first.url
        await chromium.until(LIVE)
        await chromium.until("() => document.querySelector('#warning').hidden")


async def test_a_hidden_page_sends_no_requests(chromium: Browser) -> None:
    hide = """() => {
      Object.defineProperty(document, 'hidden', { value: %s, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    async with mock_server(zoned_fleet()) as house:
        await opened(chromium, house.url)
        await chromium.evaluate(hide % "true")
        await chromium.until(f"() => {SINCE_LAST_ASKED_MS} > 3000")  # three times as long as it pauses
        await send(house, 1, name="meanwhile")
        assert "meanwhile" not in await chromium.evaluate("document.querySelector('#decisions').innerText")
        await chromium.evaluate(hide % "false")
        await chromium.until_text("#decision-list", "meanwhile")


async def test_the_ui_asks_its_user_for_a_required_admin_token(chromium: Browser) -> None:
    settings = FrontendSettings(admin_token=SecretStr("s3cret"))
    async with mock_server(zoned_fleet(), frontend=settings) as house:
        await chromium.open(f"{house.url}/ui")
        await chromium.until_text("#state", "Needs the admin token")
        assert await chromium.evaluate("document.querySelectorAll('.worker').length") == 0
        await chromium.fill("#token", "wrong")
        await chromium.click("#token-form button")
        await chromium.until_text("#warning", "refuses the token")
        await chromium.fill("#token", "s3cret")
        await chromium.click("#token-form button")
        await chromium.until(LIVE)
        await chromium.until_text("#zones", "#1")
        assert "to prefill" in await asks(chromium, "hello")
        assert [address for address in await chromium.requests() if "s3cret" in address] == []
        assert await chromium.evaluate("() => localStorage.length + document.cookie.length") == 0


async def many(house: MockServer, n: int) -> dict[str, Any]:
    """An answer of ``/v1/fleet`` with ``n`` workers in four zones, one of which is in trouble."""
    answer: dict[str, Any] = (await house.http.get("/v1/fleet")).json()
    prefill, decode = answer["workers"][0], answer["workers"][1]
    answer["workers"] = [
        {
            **(prefill if at % 3 == 0 else decode),
            "worker_id": 9_007_199_254_740_993 + at,
            "domains": {"zone": f"z{at % 4}"},
            "alive": at != n - 1,
        }
        for at in range(n)
    ]
    return answer


async def test_a_thousand_workers_are_drawn_quickly_and_updated_in_place(
    chromium: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    async with mock_server(zoned_fleet()) as house:
        answers = {"/v1/fleet": await many(house, 1000)}
        await opened(chromium, house.url, answers=answers)
        await chromium.until_text("#totals", "1,000", "999 take requests")
        nodes = await chromium.evaluate("document.querySelectorAll('*').length")
        drawn = await chromium.evaluate("window.longTasksMs")
        text = await chromium.until_text("#zones", "1 of 250 need attention", "not alive")
        await chromium.evaluate("""() => {
            window.changes = 0;
            new MutationObserver((list) => (window.changes += list.length))
                .observe(document.querySelector('#zones'), { childList: true, subtree: true });
            window.longTasksMs.length = 0;
        }""")
        await polled(chromium, times=3)
        changes, updating = await chromium.evaluate("[window.changes, window.longTasksMs]")
        await chromium.click(".role button:not([hidden])")
        await chromium.until("() => document.querySelectorAll('.workers')[0].children.length > 40")
        complaints = await chromium.complaints()
    with capsys.disabled():
        print(
            f"\n1,000 workers: {nodes} nodes; long tasks, ms: {drawn} at first, {updating} in three updates"
        )
    assert nodes < NODES_MAX
    assert changes == 0, "what stays the same is not drawn again"
    assert not updating or max(updating) < 1000
    assert "#9007199254740997" in text, "a long id is exact"
    assert "#9007199254741992" in text, "trouble is never left out"
    assert complaints == []


async def test_names_from_the_fleet_are_text_and_never_markup(chromium: Browser) -> None:
    async with mock_server(zoned_fleet()) as house:
        answer = await many(house, 8)
        for worker in answer["workers"]:
            worker.update(domains={"zone": EVIL}, engine=EVIL, taints=[EVIL])
        await opened(chromium, house.url, answers={"/v1/fleet": answer})
        await chromium.until_text("#zones", EVIL)
        await chromium.click(".worker")
        await chromium.until_text("dialog", EVIL)
        assert await chromium.complaints() == []
        assert await chromium.evaluate("document.querySelectorAll('main img').length") == 0


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The folder of the pictures."""
    folder = Path(os.environ.get(PICTURES) or tmp_path)
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", FLEETS)
async def test_the_ui_screenshot_shows_a_fleet_under_load(
    chromium: Browser, pictures: Path, name: str, scheme: str
) -> None:
    picture = pictures / f"ui-{name}-{scheme}.png"
    async with mock_server(fleet_file(FLEETS[name])) as house:
        await opened(chromium, house.url, scheme=scheme, width=1280, height=1280)
        async with traffic(house, streams=12):
            count = "document.querySelector('#serving').innerText.match(/([\\d,]+)\\sfirst\\stokens/)?.[1]"
            await chromium.until(f"() => Number({count}) > {REQUESTS_SHOWN}")
            await chromium.click(".has-table .decision")
            await chromium.until_text("[aria-expanded=true] + .opened", "chosen: the lowest cost")
            await chromium.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
            await polled(chromium)
            await chromium.picture(picture)
        assert await chromium.complaints() == []
    assert picture.stat().st_size > 20_000


RULES = {
    "blocks": KvRouterConfig(router_cost="blocks"),
    "weighted": KvRouterConfig(router_cost="blocks", overlap_score_weight=2.5),
    "lmetric": KvRouterConfig(router_cost="lmetric"),
    "joint": KvRouterConfig(router_pd_selection=PdSelection.JOINT),
    "warm": KvRouterConfig(router_temperature=5.0),
    "random": KvRouterConfig(router_mode=RouterMode.RANDOM),
    "round-robin": KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN),
}


@pytest.mark.parametrize("rule", RULES)
async def test_the_ui_explains_every_routing_rule_by_its_costs(chromium: Browser, rule: str) -> None:
    async with mock_server(fleet_file(PRICED), router=RULES[rule]) as house:
        for n in range(3):
            await send(house, n, n=900)
        await opened(chromium, house.url)
        await chromium.until_text("#decision-list", "chat-2")
        await send(house, 3, n=900)
        verdict = await asks(chromium, words(first=1, n=900))
        answer = await chromium.until_text("#answer-tables", "chosen")
        await chromium.click(".has-table .decision")
        kept = await chromium.until_text("[aria-expanded=true] + .opened", "chosen")
        assert await chromium.complaints() == []
    assert "worker" in verdict
    for text in (answer, kept):
        assert not re.search(r"NaN|undefined|Infinity|null", text)
    if rule in ("random", "round-robin"):
        assert f"chosen by {rule}" in answer
        assert f"{rule} chose another one: costs are not weighed" in answer
    if rule == "joint":
        assert answer.count("chosen: the lowest cost in all") in (1, 2)
        assert re.search(r"costs [\d.]+ ms more in all with \d+/0", answer)
        assert re.search(r"costs [\d.]+ ms more in all, by itself", answer)
        assert "the request was refused" not in answer
    if rule in ("blocks", "weighted"):
        found = re.findall(r"costs ([\d.]+) blocks more: (.*)", answer)
        assert found
        for cost, parts in found:
            assert sum_of(parts) == pytest.approx(float(cost), rel=0.02, abs=0.05), parts


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"draining": True}, "This router is draining"),
        ({"discovery": {"reachable": False, "why": "no route"}}, "the fleet is frozen: no route"),
        ({"workers": [], "models": []}, "No worker has registered yet"),
    ],
    ids=["draining", "discovery", "empty"],
)
async def test_fleet_wide_problems_are_shown_on_the_page(
    chromium: Browser, change: dict[str, object], says: str
) -> None:
    async with mock_server(zoned_fleet()) as house:
        answer = {**(await house.http.get("/v1/fleet")).json(), **change}
        await opened(chromium, house.url, answers={"/v1/fleet": answer})
        await chromium.until_text("main", says)
        assert await chromium.complaints() == []
