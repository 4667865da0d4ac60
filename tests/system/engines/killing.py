"""Two real engines, one of which is killed in mid-answer."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from tests.system.engines.calls import Recorded, attached, chat_body, lines_of
from tests.system.engines.real_engine import MODEL, RealEngine
from tests.testing.processes import Fleet, Frontend

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
ANSWER_TOKENS = 600
KILL_AT_CHARS = 400
QUESTION = "Tell a story of blocks that fill up, one after the other. "


@dataclass
class Killing:
    """Two engines that are alive, and a frontend before them."""

    engines: Mapping[int, RealEngine]
    frontend: Frontend

    async def whole(self, body: dict[str, object], path: str = CHAT) -> Recorded:
        """The answer of an engine that is asked directly."""
        reported = Recorded()
        async for _, line in lines_of(self.engines[1].http, path, body):
            reported.take(line)
        return reported

    async def killed(self, body: dict[str, object], at_chars: int, path: str = CHAT) -> Recorded:
        """The answer through the frontend, whose engine is killed once so many characters have come."""
        reported, is_killed = Recorded(), False
        async for answer, line in lines_of(self.frontend.http, path, body):
            reported.take(line)
            if len(reported.text) >= at_chars and not is_killed:
                is_killed = True
                await self.engines[int(answer.headers["x-kvrouter-decode-worker"])].kill()
        assert is_killed
        return reported


async def killing(engines: Mapping[int, RealEngine], kvrouter: Fleet) -> Killing:
    """Start those that do not run, and attach both."""
    await asyncio.gather(*(engine.start() for engine in engines.values() if not engine.is_running))
    return Killing(engines, await attached(kvrouter, engines))


def long_chat(**body: object) -> dict[str, object]:
    """The body of a chat with a long answer."""
    return chat_body(QUESTION, max_tokens=ANSWER_TOKENS, ignore_eos=True, **body)


def long_completion(**body: object) -> dict[str, object]:
    """The body of a completion with a long answer."""
    return {
        "model": MODEL,
        "prompt": QUESTION,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        **body,
    }
