"""Bodies that would become a hundred times their size: refused while others are served, and nothing is built.

A body is received and scanned: what it may hold beside its own length is for what the scan leaves to others.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.hostile.bystanders import Bystanders
from tests.hostile.meter import MIB, Meter
from tests.support.processes import Frontend, fleet

BODY_BYTES = 20_000_000
LONG_BODY_BYTES = 59_000_000
WIDE_BODY_BYTES = 15_000_000
"""Within the bound of text as it is written; with one wide character Python would hold four times that."""
LOOP_CPU_MAX_S_PER_MB = 0.02
"""Of the event loop. A quiet machine needs 0.003; to build the values took 0.1 to 0.4."""

CPU_MAX_S, CPU_MAX_S_PER_MB = 0.01, 0.0026
"""Of all threads. To receive a megabyte takes 0.0006, and to scan it to its end as much again."""

BLANKS_CPU_MAX_S_PER_MB = 0.0015
"""Of all threads: of blanks hardly more is done than to receive them. Decoders took 0.0018 to 0.0037."""

ROUNDS = 5
"""CPU time of all threads is counted in hundredths of a second."""

MEMORY_MAX = 1.5
"""The most that is held for a body, in its own length, beside KEPT_BYTES: it is received without a copy."""

KEPT_BYTES = 8 * MIB

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


def filled(head: bytes, item: bytes, tail: bytes, *, size_bytes: int = BODY_BYTES) -> bytes:
    """A body of about this size: ``item`` again and again between its two ends."""
    return head + item * ((size_bytes - len(head) - len(tail)) // len(item)) + tail


def chat(field: bytes, item: bytes, tail: bytes) -> bytes:
    return filled(b'{"model":"mock",' + MESSAGES + b"," + field, item, tail)


def said(item: bytes, tail: bytes, *, size_bytes: int = BODY_BYTES) -> bytes:
    head = b'{"model":"mock","messages":[{"role":"user","content":"'
    return filled(head, item, tail, size_bytes=size_bytes)


BLANKS = {
    "blanks before the body": (CHAT, filled(b"", b" ", b'{"model":"mock","n":2,' + MESSAGES + b"}"), None),
    "blanks behind the body": (CHAT, filled(b'{"model":"mock","n":2,' + MESSAGES + b"}", b" ", b""), None),
    "blanks in an object": (CHAT, chat(b'"nvext":{', b" ", b'"a":1}}'), "nvext"),
    "blanks before a message": (
        CHAT,
        filled(b'{"model":"mock","messages":[', b"\n", b'{"role":7,"content":"hi"}]}'),
        "messages",
    ),
    "blanks in a message": (
        CHAT,
        filled(b'{"model":"mock","n":2,"messages":[{', b"\t", b'"role":"user","content":"hi"}]}'),
        "messages[0]",
    ),
    "many short runs of blanks": (
        COMPLETION,
        filled(b'{"model":"mock","prompt":[', b" " * 60_000 + b"1,", b"1]}"),
        "prompt",
    ),
    "blanks before a list of lists": (
        COMPLETION,
        filled(b'{"model":"mock","prompt":[', b" ", b"[[1]]]}"),
        None,
    ),
    "blanks in a list of lists": (COMPLETION, filled(b'{"model":"mock","prompt":[[', b" ", b"[1]]]}"), None),
    "blanks behind a list": (COMPLETION, filled(b'{"model":"mock","prompt":[[1]', b" ", b"]}"), "prompt"),
}

BODIES = {
    "a number that is none": (
        CHAT,
        said(b"a", b'"}],"temperature":NaN}', size_bytes=LONG_BODY_BYTES),
        "temperature",
    ),
    **BLANKS,
    "blanks within the bounds": (
        CHAT,
        filled(
            b'{"model":"mock","messages":[' + b"{}," * 65,
            b" " * 60_000 + b"{},",
            b'{"role":7}]}',
            size_bytes=4_100_000,
        ),
        "messages[0].role",
    ),
    "empty messages": (CHAT, filled(b'{"model":"mock","messages":[', b"{},", b"{}]}"), "messages"),
    "empty prompts": (COMPLETION, filled(b'{"model":"mock","prompt":[', b"[],", b"[]]}"), "prompt"),
    "token ids": (COMPLETION, filled(b'{"model":"mock","prompt":[', b"1,", b"1]}"), "prompt"),
    "tools": (CHAT, chat(b'"tools":[', b"{},", b"{}]}"), "tools"),
    "stops": (CHAT, chat(b'"stop":[', b'"",', b'""]}'), "stop"),
    "biases": (CHAT, chat(b'"logit_bias":{', b'"1":1,', b'"1":1}}'), "logit_bias"),
    "taints": (
        CHAT,
        chat(b'"nvext":{"routing_constraints":{"required_taints":[', b'"a",', b'"a"]}}}'),
        "nvext.routing_constraints.required_taints",
    ),
    "a word that is none": (
        CHAT,
        chat(b'"nvext":{"router_config_override":{"router_mode":"', b"a", b'"}}}'),
        "nvext.router_config_override.router_mode",
    ),
    "lists inside each other": (CHAT, chat(b'"tools":', b"[", b""), None),
    "a number without end": (CHAT, chat(b'"seed":', b"1", b"}"), "seed"),
    "a name without end": (CHAT, chat(b'"metadata":{"', b"a", b'":1}}'), "metadata"),
    "escapes": (CHAT, said(b"\\u6f22", b'"}]}'), "messages"),
    "one wide character": (CHAT, said(b"a", '😀"}]}'.encode()), "messages"),
    "one wide character in a shorter text": (
        CHAT,
        said(b"a", '😀"}]}'.encode(), size_bytes=WIDE_BODY_BYTES),
        "messages",
    ),
    "one wide character within the bounds": (
        CHAT,
        said(b"a", '😀"}]}'.encode(), size_bytes=4_000_000),
        "messages",
    ),
    "one wide character in another field": (
        CHAT,
        filled(
            b'{"model":"mock",' + MESSAGES + b',"stop":"', b"a", '😀"}'.encode(), size_bytes=WIDE_BODY_BYTES
        ),
        "stop",
    ),
    "one wide character for nobody's model": (
        CHAT,
        filled(
            b'{"model":"nobody","messages":[{"role":"user","content":"',
            b"a",
            '😀"}]}'.encode(),
            size_bytes=4_000_000,
        ),
        "model",
    ),
    "letters": (CHAT, said(b"a", b'"}]}'), "messages"),
    "letters within the bounds and two answers": (
        CHAT,
        said(b"a", b'"}],"n":2}', size_bytes=990_000),
        "n",
    ),
    "calls in a string": (
        CHAT,
        filled(
            b'{"model":"mock","messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f",'
            b'"arguments":"{\\"a\\":[',
            b"[],",
            b'[]]}"}}]}]}',
        ),
        "messages",
    ),
}


async def test_a_body_that_is_refused_costs_nobody_anything() -> None:
    async with fleet({"KVROUTER_BODY_MAX_BYTES": str(64 * MIB)}) as here:
        await here.worker()
        frontend = await here.frontend()
        async with Bystanders(frontend):
            for kind, (path, body, param) in BODIES.items():
                cpu_s, held = await cost_of(frontend, path, body, param, kind)
                assert cpu_s < LOOP_CPU_MAX_S_PER_MB * len(body) / 1e6, (kind, cpu_s)
                assert held < MEMORY_MAX, (kind, held)


async def test_of_a_body_that_is_refused_all_threads_together_do_little() -> None:
    """With nobody else there, whose CPU time would count."""
    async with fleet({"KVROUTER_BODY_MAX_BYTES": str(64 * MIB)}) as here:
        await here.worker()
        frontend = await here.frontend()
        meter = Meter(frontend.pid)
        for kind, (path, body, _) in BODIES.items():
            before_s = meter.cpu_s()
            for _ in range(ROUNDS):
                reply = await frontend.http.post(path, content=body)
                assert reply.status_code in (400, 404), (kind, reply.status_code, reply.text)
            cpu_s = meter.cpu_s() - before_s
            most_s = CPU_MAX_S + CPU_MAX_S_PER_MB * len(body) / 1e6
            if kind in BLANKS:
                most_s = BLANKS_CPU_MAX_S_PER_MB * len(body) / 1e6
            assert cpu_s < ROUNDS * most_s, (kind, cpu_s)


@pytest.mark.parametrize("item", [b"\r\n\r\n", b"a\r\n\r\n", b"0\r\n\r\n"])
async def test_a_chunk_of_blank_lines_costs_nobody_anything(item: bytes) -> None:
    body = filled(b'{"model":"mock","messages":[', item, b"1]}")

    async def one_chunk() -> AsyncIterator[bytes]:
        yield body

    async with fleet({"KVROUTER_BODY_MAX_BYTES": str(64 * MIB)}) as here:
        await here.worker()
        frontend = await here.frontend()
        async with Bystanders(frontend):
            meter = Meter(frontend.pid)
            before_s = meter.loop_cpu_s()
            reply = await frontend.http.post(CHAT, content=one_chunk())
            assert reply.status_code == 400, reply.text
            cpu_s = meter.loop_cpu_s() - before_s
            assert cpu_s < LOOP_CPU_MAX_S_PER_MB * len(body) / 1e6, (item, cpu_s)


@pytest.mark.parametrize("command", ["frontend", "router"])
async def test_no_body_is_read_that_no_prompt_needs(command: str) -> None:
    """With settings as they come: the mock model's context needs a few megabytes."""
    path = CHAT if command == "frontend" else "/v1/route"
    async with fleet() as here:
        await here.worker()
        door = await here.door(command)
        meter = Meter(door.pid)
        meter.forget_peak()
        before_bytes = meter.resident_bytes()
        body = said(b"a", b'"}]}', size_bytes=LONG_BODY_BYTES)
        reply = await door.http.post(path, content=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert "KVROUTER_BODY_MAX_BYTES" in reply.text
        assert meter.peak_bytes() - before_bytes < len(body) / 2


async def cost_of(
    frontend: Frontend, path: str, body: bytes, param: str | None, kind: str
) -> tuple[float, float]:
    """CPU time of the event loop, in seconds, and memory, in lengths of the body, that its refusal takes."""
    meter = Meter(frontend.pid)
    before_s, before_bytes = meter.loop_cpu_s(), meter.resident_bytes()
    meter.forget_peak()
    reply = await frontend.http.post(path, content=body)
    assert reply.status_code in (400, 404), (kind, reply.status_code, reply.text)
    assert len(reply.content) < 2_000
    if param is not None:
        assert reply.json()["error"]["param"] == param, (kind, reply.text)
    await asyncio.sleep(0)
    held = (meter.peak_bytes() - before_bytes - KEPT_BYTES) / len(body)
    return meter.loop_cpu_s() - before_s, held
