"""Answers of our own HTTP routes, kept byte for byte as golden files under ``tests/data/http-api``.

``KVROUTER_WRITE_GOLDEN=1 pytest tests/system/scenario/test_http_api_answers.py`` writes the files anew.
"""

import asyncio
import difflib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvrouter.settings.setting import installed_version

FOLDER = Path(__file__).parents[1] / "data" / "http-api"
WRITE = "KVROUTER_WRITE_GOLDEN"
LIMIT_S = 60.0

UNSHOWN = ("date",)
"""Headers that say the time."""

NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
TIMES = (
    "time_s",
    "decided_at",
    "created",
    "stale_s",
    "silent_s",
    "clock_ahead_s",
    "since_s",
    "window_s",
    "span_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "ttft_ms",
)
"""What differs from run to run in every scene: numbers by the names of their fields."""


@dataclass(frozen=True, slots=True)
class GoldenAnswers:
    """The answers of one scene. ``volatile``: more fields whose numbers differ from run to run. ``polled``:
    fields that are null until an engine is polled for the first time; they are shown as null.
    """

    address: tuple[str, int]
    volatile: tuple[str, ...] = ()
    polled: tuple[str, ...] = ()

    async def ask(
        self, method: str, target: str, body: object = None, *, shows_body: bool = True, **headers: str
    ) -> str:
        """Send a request as it is written here; return the answer as a golden file has it. ``body`` is JSON,
        or bytes as they are.
        """
        sent = b""
        lines = [f"{method} {target} HTTP/1.1", "connection: close"]
        if "host" not in headers:
            lines.append(f"host: {self.address[0]}")
        if body is not None:
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
            lines += ["content-type: application/json", f"content-length: {len(sent)}"]
        headers_sent = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += headers_sent
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(*self.address)
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + sent)
            answer = await reader.read()
            writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        asked = [f"> {method} {target}", *(f"> {line}" for line in headers_sent)]
        if sent:
            asked.append(f"> {sent.decode('latin-1')}")
        shown = [*asked, *self._head_shown(head.decode("latin-1")), ""]
        return "\n".join([*shown, self._body_shown(content) if shows_body else f"({bool(content)})", "", ""])

    def _head_shown(self, head: str) -> list[str]:
        status, *lines = head.split("\r\n")
        kept = []
        for line in lines:
            name, _, value = line.partition(": ")
            if name.lower() == "content-length" and value != "0":
                value = "<n>"
            elif name.lower() == "x-request-id" and re.fullmatch("[0-9a-f]{32}", value):
                value = "<id>"
            elif name.lower() == "etag":
                value = "<etag>"
            if name.lower() not in UNSHOWN:
                kept.append(f"{name}: {value}")
        return [status, *kept]

    def _body_shown(self, content: bytes) -> str:
        """A body without what differs from run to run, with each field on a line of its own."""
        text = content.decode()
        text = text.replace(f'"{installed_version()}"', '"<version>"')
        for name in (*TIMES, *self.volatile):
            text = re.sub(rf'("{name}":){NUMBER}(?=[,}}\]])', r"\1<number>", text)
        for name in self.polled:
            text = re.sub(rf'("{name}":)\{{[^{{}}]*\}}', r"\1null", text)
        text = re.sub(r'("index":\{"blocks":\{[^}]*\},"bytes":)[0-9]+', r"\1<number>", text)
        text = re.sub(r'("at":)"[0-9T:-]+Z"', r'\1"<time>"', text)
        text = re.sub(r'("request_id":)"[0-9a-f]{32}"', r'\1"<id>"', text)
        text = re.sub(r"127\.0\.0\.1:[0-9]+", "127.0.0.1:<port>", text)
        text = re.sub(r"(memory://[0-9]+)/[0-9]+", r"\1/<incarnation>", text)
        return re.sub(r'(?<=[{,\]])(?="[^"]*":)|(?<=[\[,])(?=\{)', "\n", text)


def check(scene: str, answers: list[str]) -> None:
    """Compare the answers of a scene with its golden file; write that instead where :data:`WRITE` is set."""
    path = FOLDER / f"{scene}.txt"
    text = "".join(answers)
    if os.environ.get(WRITE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    kept = path.read_text("utf-8")
    changes = difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "answered", lineterm="")
    assert text == kept, "\n".join(changes)
