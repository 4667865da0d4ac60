"""Whatever byte of an answer is changed on its way, between an engine and kvrouter or behind it, is found."""

import re
from dataclasses import replace

from tests.system.differential.calls import Call, all_calls
from tests.system.differential.run import both_ways, explained
from tests.system.differential.vllm_answers import Answer, Script
from tests.system.differential.wire import NOT_COMPARED, Unreadable, parsed

EACH = 13
"""Every so manieth call; a prime, so that every kind of call is among them."""

POSITIONS = 60
"""How many bytes of one answer are changed, one at a time, where it has as many."""

_LINE = re.compile(rb"(?P<name>[^:\r\n]+): ?(?P<value>[^\r\n]*)\r\n")
_ASKED_BY_ROUTER = re.compile(
    rb'"(?:prompt_)?token_ids":\[[^\]]*\]|data: [^\n]*"(?:choices":\[\]|delta":\{\}),[^\n]*\n\n'
)
"""What is in a stream because kvrouter asked for it: clients never see it."""


def _flipped(data: bytes, at: int) -> bytes:
    """Another byte there; another one also where case does not count."""
    return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]


def _not_compared(raw: bytes) -> set[int]:
    """The bytes of headers that are those of a connection, or of a moment."""
    head = raw[: raw.index(b"\r\n\r\n") + 2]
    begin = head.index(b"\r\n") + 2
    found: set[int] = set()
    for line in _LINE.finditer(head, begin):
        if line["name"].decode().lower() in NOT_COMPARED:
            found.update(range(line.start(), line.end()))
    return found


def _spread(n: int) -> range:
    return range(0, n, max(1, n // POSITIONS))


async def test_a_byte_changed_after_kvrouter_is_detected() -> None:
    n_changed = 0
    async with both_ways() as ways:
        for call in all_calls()[::EACH]:
            alone = await ways.alone(call)
            raw, seen = await ways.through(call)
            if explained(call, alone, seen)[1]:
                continue
            spared = _not_compared(raw)
            for at in _spread(len(raw)):
                if at in spared:
                    continue
                n_changed += 1
                try:
                    changed = parsed(_flipped(raw, at), call.method)
                except Unreadable:
                    continue
                others = explained(call, alone, replace(seen, answer=changed))[1]
                assert others, f"{call.name}: byte {at} of {raw[max(0, at - 20) : at + 20]!r}"
    assert n_changed > 1500


async def test_a_byte_changed_before_kvrouter_is_detected() -> None:
    n_changed = 0
    async with both_ways() as ways:
        for call in all_calls()[::EACH]:
            alone = await ways.alone(call)
            _, seen = await ways.through(call)
            if not alone.answer.body or not seen.asked or explained(call, alone, seen)[1]:
                continue
            for share in (0.1, 0.5, 0.9):
                changed = replace(call, script=_changed_at(call, share))
                _, seen = await ways.through(changed)
                others = explained(call, alone, seen)[1]
                assert others, f"{call.name}: {share} of its answer"
                n_changed += 1
    assert n_changed > 50


def _changed_at(call: Call, share: float) -> Script:
    def script(answer: Answer) -> Answer:
        told = call.script(answer)
        spared = {at for found in _ASKED_BY_ROUTER.finditer(told.body) for at in range(*found.span())}
        places = [at for at in range(len(told.body)) if at not in spared]
        if not places:
            return told
        return replace(told, pieces=(_flipped(told.body, places[int(share * len(places))]),))

    return script
