"""A real browser that a test drives: ``drive.mjs`` is the other end."""

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.system.browser.install import HERE, browser_dir, node, program

ANSWERS_WITHIN_S = 60.0
"""Far above what a busy machine needs for one command; what never comes true in a page ends sooner."""

LINE_BYTES = 32 << 20


class Browser:
    """One window at a time. A script is an expression, or a function, of the page."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def open(
        self,
        url: str,
        *,
        scheme: str = "light",
        width: int = 1280,
        height: int = 900,
        answers: Mapping[str, object] | None = None,
    ) -> None:
        """Open a page in a new window without a past. ``answers`` are given in place of its server's, by
        path.
        """
        # as text, because JavaScript's numbers are not exact for long ids
        texts = {path: json.dumps(answer) for path, answer in (answers or {}).items()}
        status = await self._do("open", url=url, scheme=scheme, width=width, height=height, answers=texts)
        assert status == 200

    async def evaluate(self, script: str) -> Any:
        """What a script returns."""
        return await self._do("evaluate", script=script)

    async def until(self, script: str) -> Any:
        """Wait until a script returns something that is true, and return that."""
        return await self._do("until", script=script)

    async def until_text(self, selector: str, *texts: str) -> str:
        """Wait until an element has a text with all of these in it; return it."""
        wanted = json.dumps(texts)
        node_text = f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"
        found = await self.until(
            f"() => {{ const text = {node_text}; "
            f"return {wanted}.every((each) => text.includes(each)) && text; }}"
        )
        return str(found)

    async def click(self, selector: str) -> None:
        await self._do("click", selector=selector)

    async def fill(self, selector: str, text: str) -> None:
        await self._do("fill", selector=selector, text=text)

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self._do("press", key=key)

    async def type(self, text: str) -> None:
        await self._do("type", text=text)

    async def size(self, width: int, height: int) -> None:
        await self._do("size", width=width, height=height)

    async def picture(self, path: Path) -> None:
        """Take a picture of what the window shows."""
        await self._do("picture", path=str(path))

    async def complaints(self) -> list[str]:
        """What the page wrote to its console."""
        return list((await self._do("noted"))["complaints"])

    async def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        return list((await self._do("noted"))["requests"])

    async def _do(self, name: str, **given: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, **given}).encode() + b"\n")
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            line = await self._process.stdout.readline()
        assert line, "the browser ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A browser, and its end. Raises NotInstalled."""
    command = [node(), str(HERE / "drive.mjs"), str(browser_dir()), str(program())]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES)
    try:
        yield Browser(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
