"""How a small engine speaks as SGLang 0.5: pages, ``/generate`` and completions, events, errors."""

import json
from array import array
from collections.abc import Mapping
from typing import Any

from kvrouter.core.errors import KvrouterError
from kvrouter.core.events import HASH_BYTES
from kvrouter.core.ids import DpRank, RequestId
from kvrouter.core.requests import Bootstrap, EngineChunk, EngineRequest, Leg, Sampling
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.mock_engine.config import MockConfig
from tests.testing.engine_publisher import vllm_batch
from tests.testing.engine_requests import MODEL
from tests.testing.scripted_engine import event_of
from tests.testing.small_engine import R0, ParsedCall, SmallEngine, StoredBlocks
from tests.testing.small_engine_vllm import (
    VllmAnswer,
    check_length,
    check_max_tokens,
    finish_name,
    refusal_of,
)

FLUSHED = (
    b"Cache flushed. (When there are running or waiting requests, the operation will not be performed.)\n"
)
"""It says so either way; the status tells."""

_MODES = {Role.BOTH: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_LEGS = {Role.BOTH: Leg.AGGREGATED, Role.PREFILL: Leg.PREFILL, Role.DECODE: Leg.DECODE}


class SglangProtocol:
    """A :class:`~tests.testing.small_engine.Tongue`."""

    def __init__(self, context_tokens: int) -> None:
        self._context_tokens = context_tokens

    def page(self, path: str, engine: SmallEngine) -> bytes | None:
        match path:
            case "/v1/models":
                model = {"id": MODEL, "max_model_len": self._context_tokens}
                return json.dumps({"object": "list", "data": [model]}).encode()
            case "/server_info":
                return json.dumps(_server_info(engine)).encode()
            case "/v1/loads":
                return json.dumps({"loads": [_load(engine)]}).encode()
        return None

    async def commanded(self, path: str, engine: SmallEngine) -> tuple[int, bytes] | None:
        if path != "/flush_cache":
            return None
        return (200 if await engine.forget({"type": "AllBlocksCleared"}) else 400), FLUSHED

    def asked(self, path: str, _headers: Mapping[str, str], body: bytes, config: MockConfig) -> ParsedCall:
        said = json.loads(body)
        if path == "/generate":
            prompt, n_tokens = said["input_ids"], said["sampling_params"]["max_new_tokens"]
        else:
            prompt, n_tokens = said["prompt"], said.get("max_tokens", 16)
        check_max_tokens(n_tokens, "max_new_tokens", least=0)
        check_length(len(prompt), n_tokens, self._context_tokens)
        kind = _LEGS[config.role]
        request = EngineRequest(
            request_id=RequestId(said["rid"]),
            attempt=0,
            leg=kind,
            model=MODEL,
            token_ids=array("I", prompt),
            sampling=Sampling(max_tokens=1 if kind is Leg.PREFILL else n_tokens, temperature=0.0),
            dp_rank=DpRank(said.get("routed_dp_rank", 0)),
            bootstrap=_meeting(said),
            cache_namespace=said.get("cache_salt"),
        )
        answering = SglangAnswer(len(prompt)) if path == "/generate" else VllmAnswer(said, len(prompt))
        return ParsedCall(request, bool(said.get("stream")), answering)

    def refusal(self, error: KvrouterError) -> tuple[int, bytes]:
        return refusal_of(error)

    def stored(self, blocks: StoredBlocks, block_size: int) -> dict[str, object]:
        return {
            "type": "BlockStored",
            "block_hashes": [_signed(name) for name in blocks.names],
            "parent_block_hash": None if blocks.parent is None else _signed(blocks.parent),
            "token_ids": blocks.token_ids,
            "block_size": block_size,
            "lora_id": None,
            "medium": "GPU",
            "cache_salt": blocks.salt,
        }

    def removed(self, names: tuple[int, ...]) -> dict[str, object]:
        return {"type": "BlockRemoved", "block_hashes": [_signed(name) for name in names], "medium": "GPU"}

    def reported(self, events: list[dict[str, object]], dp_rank: DpRank) -> bytes | None:
        return vllm_batch(*events, dp_rank=dp_rank)

    def loaded(self, _load: LoadReport) -> None:
        """Its page of loads has the latest."""


class SglangAnswer:
    """The answer to one call of ``/generate``: every event has all tokens so far."""

    def __init__(self, n_prompt: int) -> None:
        self._n_prompt = n_prompt
        self._tokens: list[int] = []
        self._cached: int | None = None

    def piece(self, chunk: EngineChunk) -> bytes:
        events = [event_of(self._so_far(chunk))]
        if chunk.finish is not None:
            events.append(event_of("[DONE]"))
        return b"".join(events)

    def whole(self, chunk: EngineChunk) -> bytes:
        return json.dumps(self._so_far(chunk)).encode()

    def _so_far(self, chunk: EngineChunk) -> dict[str, Any]:
        self._tokens += chunk.token_ids
        if chunk.cached_tokens is not None:
            self._cached = chunk.cached_tokens
        return {
            "text": "".join(f" {token}" for token in self._tokens),
            "output_ids": self._tokens,
            "meta_info": {
                "finish_reason": None if chunk.finish is None else {"type": finish_name(chunk.finish)},
                "prompt_tokens": self._n_prompt,
                "completion_tokens": len(self._tokens),
                "cached_tokens": self._cached,
            },
        }


def _server_info(engine: SmallEngine) -> dict[str, object]:
    config, at = engine.config, engine.publishers[R0].at
    return {
        "page_size": config.block_size,
        "max_total_num_tokens": config.total_kv_blocks * config.block_size,
        "served_model_name": MODEL,
        "tokenizer_path": "tiny-model",
        "version": "0.5.23",
        "dp_size": 1,
        "enable_cache_report": True,
        "disaggregation_mode": _MODES[config.role],
        "disaggregation_bootstrap_port": config.bootstrap_port,
        "kv_events": {
            "endpoint_host": "127.0.0.1",
            "endpoint_port_base": _port(at.events),
            "replay_endpoint_port_base": _port(at.replay or ""),
            "topic": at.topic,
            "dp_size": 1,
        },
        "startup_time": engine.started_s,
    }


def _load(engine: SmallEngine) -> dict[str, object]:
    config, load = engine.config, engine.loads.get(R0)
    return {
        "dp_rank": 0,
        "num_running_reqs": 0 if load is None else load.running_requests,
        "num_waiting_reqs": 0 if load is None else load.waiting_requests,
        "num_used_tokens": 0 if load is None else load.active_blocks * config.block_size,
        "max_total_num_tokens": config.total_kv_blocks * config.block_size,
    }


def _meeting(said: Mapping[str, Any]) -> Bootstrap | None:
    if "bootstrap_room" not in said:
        return None
    return Bootstrap(said["bootstrap_host"], said["bootstrap_port"], said["bootstrap_room"])


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _signed(name: int) -> int:
    return int.from_bytes(name.to_bytes(HASH_BYTES, "big"), "big", signed=True)
