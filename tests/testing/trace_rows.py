"""Small traces of every format that replay reads."""

import json
from copy import deepcopy
from typing import Any

Rows = list[dict[str, Any]]


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def mooncake(at_ms: float, tokens: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": ids}


def dialogue(session: str, tokens: int, ids: list[int], **times: float) -> dict[str, Any]:
    """A row of Mooncake's with a session; ``times`` are its timestamp and its delay."""
    return {"session_id": session, "input_length": tokens, "output_length": 5, "hash_ids": ids, **times}


def by_other_names(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Mooncake's with the other names of its fields that Dynamo reads."""
    names = {
        "input_length": "input_tokens",
        "output_length": "output_tokens",
        "timestamp": "created_time",
        "delay": "delay_ms",
    }
    return {names.get(name, name): value for name, value in row.items()}


def waiting(name: str, *wait_for: str, ids: tuple[int, ...] = (1,), **more: object) -> dict[str, Any]:
    """A row of dynamo.agentic_mooncake without a header, whose prompt has so many blocks of 512 tokens."""
    others = {"wait_for": list(wait_for)} if wait_for else {}
    lengths = {"input_length": 512 * len(ids), "output_length": 4, "hash_ids": list(ids)}
    return {"request_id": name, "session_id": "s", **lengths, **others, **more}


HEADER: dict[str, Any] = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 64,
    "hash_id_scope": "local",
    "source": {"format": "by hand", "digest": "none"},
}


def node(
    name: str,
    not_before_ms: float,
    *dependencies: dict[str, Any],
    ids: tuple[int, ...] = (1,),
    **more: object,
) -> dict[str, Any]:
    """A row of dynamo.agentic_mooncake, version 2, whose prompt has so many blocks of 64 tokens."""
    return {
        "request_id": name,
        "play_id": "p",
        "session_id": "s",
        "model": "m",
        "input_length": 64 * len(ids),
        "output_length": 4,
        "hash_ids": list(ids),
        "not_before_ms": not_before_ms,
        "dependencies": list(dependencies),
        **more,
    }


def dependency(name: str, delay_ms: float = 0.0, trigger: str = "completion") -> dict[str, Any]:
    return {"request_id": name, "trigger": trigger, "delay_ms": delay_ms, "relation": "join"}


SESSIONS: Rows = [
    {
        "id": "one",
        "block_size": 64,
        "requests": [
            {"t": 0.0, "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 0.0},
            {"t": 3.0, "requests": [{"t": 0.5, "in": 64, "out": 2, "hash_ids": [9]}]},
            {"t": 30.0, "in": 200, "out": 0, "hash_ids": [1, 2, 3, 4], "think_time": 4.0},
        ],
    },
    {"id": "two", "block_size": 64, "requests": [{"t": 0.0, "in": 64, "out": 5, "hash_ids": [1]}]},
]

DYNAMO: Rows = [
    {"event_type": "request_payload", "request_id": "x"},
    {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "agent_context": {"session_id": "s"},
        "request": {
            "output_tokens": 2,
            "request_received_ms": 2_000,
            "total_time_ms": 10,
            "replay": {"trace_block_size": 4, "input_length": 8, "input_sequence_hashes": [401, 402]},
        },
    },
    {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "agent_context": {"session_id": "s"},
        "request": {
            "output_tokens": 2,
            "request_received_ms": 1_000,
            "total_time_ms": 100,
            "replay": {"trace_block_size": 4, "input_length": 6, "input_sequence_hashes": [401]},
        },
    },
]

BURSTGPT = b"""Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
12,ChatGPT,300,40,340,Conversation log
15,ChatGPT,0,0,0,Conversation log
15.5,ChatGPT,70,0,70,API log
40,ChatGPT,128,9,137,Conversation log
"""

VLLM_BENCH: dict[str, Any] = {
    "backend": "vllm",
    "request_rate": "inf",
    "total_input_tokens": 500,
    "request_throughput": 1.5,
    "input_lens": [300, 70, 130],
    "output_lens": [40, 0, 9],
    "start_times": [1_000.5, 1_000.25, 1_004.0],
    "ttfts": [0.5, 0.0, 0.25],
    "itls": [[0.01], [], [0.02]],
    "generated_texts": ["a", "", "b"],
    "errors": ["", "refused", ""],
}
"""A result of ``vllm bench serve --save-detailed``."""

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"

AZURE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


GOOD = mooncake(0, 700, [7, 8])


def session(*requests: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"id": "x", "block_size": 64, "requests": list(requests), **more}


def turn(t: float, ids: tuple[int, ...] = (1,), **more: object) -> dict[str, Any]:
    return {"t": t, "type": "s", "in": 64 * len(ids), "out": 1, "hash_ids": list(ids), **more}


def sub_agent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "a", "requests": list(requests)}


def in_envelope(record: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": 3_000, "event": record}


def ended(received_ms: float, session_id: str = "", **more: object) -> dict[str, Any]:
    record = deepcopy(DYNAMO[1])
    record["agent_context"]["session_id"] = session_id
    record["request"] |= {"request_received_ms": received_ms, **more}
    return record


GENERATOR = {"requests": 3, "rate_per_s": 5.0, "input": {"mean": 500}, "output": {"mean": 9}}
