"""A model's folder that somebody else wrote: its chat template may hang nothing and fill nothing."""

import shutil
from math import inf

from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.template_budget import BYTES_MIN
from tests.system.hostile.meter import MIB, Meter
from tests.testing.hostile_templates import TEMPLATES
from tests.testing.processes import Frontend, eventually, fleet

NEVER_COMPILES = {
    "a call block",
    "blocks that show themselves",
    "deep ifs",
    "deep parentheses",
    "own text in loops",
}
"""Forms that cannot stand next to others in one template, or are as long as all others."""

HELD_MAX_BYTES = BYTES_MIN + 32 * MIB
"""At the peak of each chat, more than before the first one: a template that is given a few bytes may make
BYTES_MIN, and the allocator keeps some of what earlier ones made.
"""

CPU_S_MAX = 0.15
"""Of a whole request: 50 ms are the template's, and the process does other things too. A slow machine may be
interrupted in one; a template that is given more takes more each time.
"""
TRIES = 5

OK, REFUSED, OVER_BOUNDS = 200, 400, 500


async def test_a_hostile_template_fails_only_its_own_request() -> None:
    names = [name for name in TEMPLATES if name not in NEVER_COMPILES]
    async with fleet() as processes:
        folder = processes.folder / "model"
        shutil.copytree(MOCK_FOLDER, folder)
        branches = "".join(
            f'{{% elif messages[0].content == "{number}" %}}{TEMPLATES[name]}'
            for number, name in enumerate(names)
        )
        (folder / "chat_template.jinja").write_text(
            "{% if false %}" + branches + "{% else %}hello{% endif %}"
        )
        await processes.worker()
        door = await processes.frontend("--model-path", f"mock={folder}")
        await eventually(lambda: says(door, "hello", OK))
        meter = Meter(door.pid)
        before_bytes = meter.resident_bytes()
        for number, name in enumerate(names):
            taken_s: list[float] = []
            while min(taken_s, default=inf) > CPU_S_MAX:
                assert len(taken_s) < TRIES, (name, taken_s)
                before_s = meter.cpu_s()
                meter.forget_peak()
                answer = await chat(door, str(number))
                taken_s.append(meter.cpu_s() - before_s)
                assert answer in {OK, REFUSED, OVER_BOUNDS}, (name, answer)
                assert meter.peak_bytes() - before_bytes <= HELD_MAX_BYTES, name
        assert await says(door, "hello", OK)


async def chat(door: Frontend, content: str) -> int:
    body = {"model": "mock", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    answer = await door.http.post("/v1/chat/completions", json=body)
    if answer.status_code == OVER_BOUNDS:
        error = answer.json()["error"]
        assert error["code"] == "chat_template_over_bounds"
        assert "goes over its bounds" in error["message"]
    return answer.status_code


async def says(door: Frontend, content: str, status: int) -> bool:
    return await chat(door, content) == status
