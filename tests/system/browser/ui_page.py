"""What the tests of the web page at ``/ui`` share: fleets, traffic, and questions to the page."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.system.browser.driver import Browser
from tests.testing.mock_server import MODEL, MockServer, user, words

PLAIN = """
version: 1
models: [{name: mock, block_size: 16, context_length: 8192}]
workers:
  - {name: worker, role: both, replicas: 2, engine: {total_kv_blocks: 16384}}
"""
LIVE = "() => document.body.dataset.state === 'live'"
ENGINE = "{handoff: bootstrap, total_kv_blocks: 900}"
PRICED = f"""
version: 1
models: [{{name: mock, block_size: 16, context_length: 8192}}]
topology:
  levels: [zone, rack]
  links:
    within:
      zone: {{latency_s: 0.0005, bandwidth_bytes_per_s: 12.5e9, price_per_gb: 0}}
    across: {{latency_s: 0.002, bandwidth_bytes_per_s: 3.125e9, price_per_gb: 0.01}}
kv_transfer: {{domain: zone, enforcement: preferred, preferred_weight: 0.3}}
workers:
  - {{name: prefill-a, role: prefill, replicas: 2, domains: {{zone: a, rack: r1}}, engine: {ENGINE}}}
  - {{name: decode-a, role: decode, replicas: 3, domains: {{zone: a, rack: r2}}, engine: {ENGINE}}}
  - {{name: prefill-b, role: prefill, replicas: 2, domains: {{zone: b, rack: r3}}, engine: {ENGINE}}}
  - {{name: decode-b, role: decode, replicas: 2, domains: {{zone: b, rack: r4}}, engine: {ENGINE}}}
  - {{name: prefill-c, role: prefill, replicas: 1, domains: {{zone: c, rack: r5}}, engine: {ENGINE}}}
  - {{name: decode-c, role: decode, replicas: 3, domains: {{zone: c, rack: r6}}, engine: {ENGINE}}}
"""
CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((each) => {
      const part = each / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest(".skip")) continue;
    const [ink, back] = [light(getComputedStyle(node).color), light(behind(node))];
    const ratio = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
    if (ratio < 4.5) found[`${node.tagName} ${node.className} ${walker.currentNode.data.trim()}`] = ratio;
  }
  return found;
}"""
"""Texts that stand out from what is behind them by less than 4.5 to 1, as WCAG asks of them."""

OUTSIDE = """() => [...document.querySelectorAll('section, .zone, .worker')].filter((node) => {
  const { left, right } = node.getBoundingClientRect();
  return left < 0 || right > innerWidth;
}).map((node) => node.className || node.id)"""
"""What is outside of the window, to the left or the right."""


async def send(house: MockServer, first: int, *, n: int = 200, max_tokens: int = 4, name: str = "") -> None:
    """Send one chat and read its answer."""
    headers = {"x-request-id": name or f"chat-{first}"}
    await house.openai.chat.completions.create(
        model=MODEL, messages=user(words(first=first, n=n)), max_tokens=max_tokens, extra_headers=headers
    )


async def refused(house: MockServer) -> None:
    """Send a chat that no worker may take."""
    nowhere = {"routing_constraints": {"required_taints": ["gpu=none"]}}
    body = {"model": MODEL, "messages": user("hello"), "nvext": nowhere}
    assert (await house.http.post("/v1/chat/completions", json=body)).status_code == 503


@asynccontextmanager
async def traffic(house: MockServer, *, streams: int = 6) -> AsyncIterator[None]:
    """Chats that come as long as the block runs; many of them begin like others."""

    async def stream(number: int) -> None:
        draws = random.Random(number)
        while True:
            first, n, out = draws.randrange(10), draws.randrange(200, 1600), draws.randrange(40, 160)
            await send(house, first, n=n, max_tokens=out, name=f"chat-{draws.getrandbits(24):06x}")

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def opened(chromium: Browser, url: str, **how: Any) -> None:
    """Open the page and wait until it has shown the router's state."""
    await chromium.open(f"{url}/ui", **how)
    await chromium.until(LIVE)


async def asks(chromium: Browser, prompt: str) -> str:
    """Ask where a prompt would go; return the verdict."""
    await chromium.fill("#prompt", prompt)
    await chromium.click("#ask-form button[type=submit]")
    return await chromium.until_text("#verdict")


async def polled(chromium: Browser, *, times: int = 2) -> None:
    """Wait until the page has asked so many times more, and shown what came."""
    count = (
        "performance.getEntriesByType('resource').filter((each) => each.name.endsWith('/v1/fleet')).length"
    )
    before = await chromium.evaluate(count)
    await chromium.until(f"() => {count} > {before + times - 1}")
