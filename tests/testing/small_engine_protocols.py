"""How a small engine speaks as vLLM 0.32, SGLang 0.5 or TensorRT-LLM 1.3: pages, calls, events, errors."""

import json
from array import array
from collections.abc import Mapping
from typing import Any

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, KvrouterError
from kvrouter.core.events import HASH_BYTES
from kvrouter.core.ids import DpRank, RequestId
from kvrouter.core.requests import Bootstrap, EngineChunk, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.trtllm.introspect import CONFIG_METRIC, OWNER
from kvrouter.engines.vllm.calls import RANK_HEADER
from kvrouter.engines.vllm.introspect import CACHE_METRIC, RUNNING, STARTED_METRIC, USED, WAITING
from kvrouter.transports.requests.port import WorkerFull
from tests.testing.engine_publisher import Publisher, vllm_batch
from tests.testing.engine_requests import MODEL
from tests.testing.scripted_engine import event_of
from tests.testing.small_engine import R0, ParsedCall, SmallEngine, StoredBlocks, next_name
from tests.testing.trtllm_server import EVENTS, created, native, removed, stored

TOKENS_BY_DEFAULT = 16
ITERATIONS_MAX = 1000
FLUSHED = (
    b"Cache flushed. (When there are running or waiting requests, the operation will not be performed.)\n"
)
"""SGLang says so either way; the status tells."""

_SGLANG_MODES = {Role.BOTH: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_SGLANG_LEGS = {Role.BOTH: Leg.AGGREGATED, Role.PREFILL: Leg.PREFILL, Role.DECODE: Leg.DECODE}
_TRTLLM_LEGS = {"context_only": Leg.PREFILL, "generation_only": Leg.DECODE}


class _PublishingProtocol:
    """What vLLM and SGLang have in common: they publish events, and put errors in OpenAI's form."""

    def __init__(self, context_tokens: int) -> None:
        self._context_tokens = context_tokens

    def refusal(self, error: KvrouterError) -> tuple[int, bytes]:
        status = 400 if isinstance(error, InvalidRequest) else 503 if isinstance(error, WorkerFull) else 500
        reported = {"message": error.message, "type": "BadRequestError", "param": error.param, "code": status}
        return status, json.dumps({"error": reported}).encode()

    def reported(self, events: list[dict[str, object]], dp_rank: DpRank) -> bytes | None:
        return vllm_batch(*events, dp_rank=dp_rank)

    def loaded(self, _load: LoadReport) -> None:
        """Its pages have the latest."""


class VllmProtocol(_PublishingProtocol):
    """vLLM's :class:`~tests.testing.small_engine.EngineProtocol`."""

    def page(self, path: str, engine: SmallEngine) -> bytes | None:
        match path:
            case "/v1/models":
                about = {"root": "tiny-model", "parent": None, "max_model_len": self._context_tokens}
                return json.dumps({"object": "list", "data": [{"id": MODEL, **about}]}).encode()
            case "/version":
                return b'{"version":"0.32.0"}'
            case "/kv_event_sources":
                sources = {str(rank): _vllm_source(each) for rank, each in engine.publishers.items()}
                return json.dumps(sources).encode()
            case "/metrics":
                return _vllm_metrics(engine).encode()
        return None

    async def commanded(self, _path: str, _engine: SmallEngine) -> tuple[int, bytes] | None:
        return None

    def asked(self, path: str, headers: Mapping[str, str], body: bytes, config: MockConfig) -> ParsedCall:
        said = json.loads(body)
        n_tokens = said.get("max_tokens", TOKENS_BY_DEFAULT)
        check_max_tokens(n_tokens, "max_tokens", least=1)
        prompt = said["prompt"]
        check_length(len(prompt), 0, self._context_tokens)
        params = said.get("kv_transfer_params") or {}
        kind = Leg.AGGREGATED
        if params.get("do_remote_decode"):
            kind = Leg.PREFILL
        elif params.get("do_remote_prefill"):
            kind = Leg.DECODE
        request = EngineRequest(
            request_id=RequestId(next_name()),
            attempt=0,
            leg=kind,
            model=MODEL,
            token_ids=array("I", prompt),
            sampling=Sampling(
                max_tokens=min(n_tokens, self._context_tokens - len(prompt)),
                temperature=said.get("temperature", 1.0),
            ),
            dp_rank=DpRank(int(headers.get(RANK_HEADER, 0))),
            kv_transfer_params=params if kind is Leg.DECODE else None,
            cache_namespace=said.get("cache_salt"),
        )
        return ParsedCall(request, bool(said.get("stream")), VllmAnswer(said, len(prompt)))

    def stored(self, blocks: StoredBlocks, block_size: int) -> dict[str, object]:
        keys: list[list[str] | None] = [None] * len(blocks.names)
        if blocks.salt is not None and blocks.parent is None:
            keys[0] = [blocks.salt]
        return {
            "type": "BlockStored",
            "block_hashes": blocks.names,
            "parent_block_hash": blocks.parent,
            "token_ids": blocks.token_ids,
            "block_size": block_size,
            "lora_id": None,
            "medium": "GPU",
            "extra_keys": keys,
        }

    def removed(self, names: tuple[int, ...]) -> dict[str, object]:
        return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}


class VllmAnswer:
    """The answer to one call of ``/v1/completions``, as vLLM and others write it, and its call."""

    _cached: int | None = None

    def __init__(self, reported: Mapping[str, Any], n_prompt: int) -> None:
        self._reported = reported
        self._n_prompt = n_prompt
        self._n_tokens = 0

    def piece(self, chunk: EngineChunk) -> bytes:
        events: list[object] = []
        self._count(chunk)
        if chunk.token_ids or chunk.finish is not None:
            events.append({**self._head(), "choices": [self._choice(chunk)]})
        if chunk.finish is not None:
            if (self._reported.get("stream_options") or {}).get("include_usage"):
                events.append({**self._head(), "choices": [], "usage": self._usage()})
            events.append("[DONE]")
        return b"".join(map(event_of, events))

    def whole(self, chunk: EngineChunk) -> bytes:
        self._count(chunk)
        params = chunk.kv_transfer_params
        answer = {**self._head(), "choices": [self._choice(chunk)], "usage": self._usage()}
        return json.dumps({**answer, "kv_transfer_params": None if params is None else dict(params)}).encode()

    def _count(self, chunk: EngineChunk) -> None:
        self._n_tokens += len(chunk.token_ids)
        if chunk.cached_tokens is not None:
            self._cached = chunk.cached_tokens

    def _head(self) -> dict[str, object]:
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}

    def _choice(self, chunk: EngineChunk) -> dict[str, object]:
        finish = None if chunk.finish is None else finish_name(chunk.finish)
        choice: dict[str, object] = {
            "index": 0,
            "text": "".join(f" {token}" for token in chunk.token_ids),
            "logprobs": None,
            "finish_reason": finish,
        }
        if self._reported.get("return_token_ids"):
            choice["token_ids"] = chunk.token_ids
        return choice

    def _usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self._n_prompt,
            "completion_tokens": self._n_tokens,
            "total_tokens": self._n_prompt + self._n_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def _vllm_source(publisher: Publisher) -> dict[str, object]:
    at = publisher.at
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": at.events,
        "replay_endpoint": at.replay,
        "topic": at.topic,
    }


def _vllm_metrics(engine: SmallEngine) -> str:
    config = engine.config
    lines = [f"{STARTED_METRIC} {engine.started_s}"]
    for rank in engine.publishers:
        load = engine.loads.get(rank) or LoadReport(engine.rank, 0, config.total_kv_blocks)
        labels = f'engine="{rank}",model_name="{MODEL}"'
        about = f'block_size="{config.block_size}",enable_prefix_caching="True",engine="{rank}"'
        lines += [
            f'{CACHE_METRIC}{{{about},num_gpu_blocks="{config.total_kv_blocks}"}} 1.0',
            f"{RUNNING}{{{labels}}} {load.running_requests}",
            f"{WAITING}{{{labels}}} {load.waiting_requests}",
            f"{USED}{{{labels}}} {load.active_blocks / load.total_blocks}",
        ]
    return "\n".join(lines) + "\n"


class SglangProtocol(_PublishingProtocol):
    """SGLang's :class:`~tests.testing.small_engine.EngineProtocol`."""

    def page(self, path: str, engine: SmallEngine) -> bytes | None:
        match path:
            case "/v1/models":
                model = {"id": MODEL, "max_model_len": self._context_tokens}
                return json.dumps({"object": "list", "data": [model]}).encode()
            case "/server_info":
                return json.dumps(_sglang_server_info(engine)).encode()
            case "/v1/loads":
                return json.dumps({"loads": [_sglang_load(engine)]}).encode()
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
        kind = _SGLANG_LEGS[config.role]
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


def _sglang_server_info(engine: SmallEngine) -> dict[str, object]:
    config, at = engine.config, engine.publishers[R0].at
    return {
        "page_size": config.block_size,
        "max_total_num_tokens": config.total_kv_blocks * config.block_size,
        "served_model_name": MODEL,
        "tokenizer_path": "tiny-model",
        "version": "0.5.23",
        "dp_size": 1,
        "enable_cache_report": True,
        "disaggregation_mode": _SGLANG_MODES[config.role],
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


def _sglang_load(engine: SmallEngine) -> dict[str, object]:
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


class TrtllmProtocol:
    """TensorRT-LLM's :class:`~tests.testing.small_engine.EngineProtocol`."""

    def __init__(self, context_tokens: int) -> None:
        self._context_tokens = context_tokens
        self._untold: list[dict[str, object]] = [native(0, created())]
        self._n_events = 1
        self._iterations: list[LoadReport] = []

    def page(self, path: str, engine: SmallEngine) -> bytes | None:
        match path:
            case "/health":
                return b""
            case "/version":
                return b'{"version":"1.3.0"}'
            case "/v1/models":
                model = {"id": MODEL, "object": "model", "owned_by": OWNER}
                return json.dumps({"object": "list", "data": [model]}).encode()
            case "/health_generate":
                self.loaded(
                    LoadReport(engine.rank, active_blocks=0, total_blocks=engine.config.total_kv_blocks)
                )
                return b""
            case "/metrics":
                reported, self._iterations = self._iterations, []
                return json.dumps([_trtllm_iteration(load, engine.config) for load in reported]).encode()
            case "/prometheus/metrics":
                return f'{CONFIG_METRIC}{{max_model_len="{self._context_tokens}"}} 1.0\n'.encode()
        return None

    async def commanded(self, path: str, _engine: SmallEngine) -> tuple[int, bytes] | None:
        if path != EVENTS:
            return None
        reported, self._untold = self._untold, []
        return 200, json.dumps(reported).encode()

    def asked(self, path: str, _headers: Mapping[str, str], body: bytes, config: MockConfig) -> ParsedCall:
        said = json.loads(body)
        n_tokens = said.get("max_tokens", TOKENS_BY_DEFAULT)
        check_max_tokens(n_tokens, "max_tokens", least=1)
        prompt = said["prompt"]
        if len(prompt) + n_tokens > self._context_tokens:
            raise ContextLengthExceeded(
                f"The sum of prompt length ({float(len(prompt))}) and query length (0) max_tokens "
                f"({n_tokens}) should not exceed max_seq_len ({self._context_tokens})"
            )
        fetch = said.get("disaggregated_params") or {}
        kind = _TRTLLM_LEGS.get(fetch.get("request_type", ""), Leg.AGGREGATED)
        request = EngineRequest(
            request_id=RequestId(next_name()),
            attempt=0,
            leg=kind,
            model=MODEL,
            token_ids=array("I", prompt),
            sampling=Sampling(
                max_tokens=1 if kind is Leg.PREFILL else n_tokens, temperature=said.get("temperature", 1.0)
            ),
            kv_transfer_params=json.loads(fetch["encoded_opaque_state"]) if kind is Leg.DECODE else None,
        )
        return ParsedCall(request, bool(said.get("stream")), TrtllmAnswer(said, len(prompt)))

    def refusal(self, error: KvrouterError) -> tuple[int, bytes]:
        if isinstance(error, WorkerFull):
            return 503, b'{"object":"error","message":"Service unavailable.","code":503}'
        reported = {
            "object": "error",
            "message": error.message,
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        }
        return (400 if isinstance(error, InvalidRequest) else 500), json.dumps(reported).encode()

    def stored(self, blocks: StoredBlocks, block_size: int) -> dict[str, object]:
        tokens = blocks.token_ids
        runs = [tokens[at : at + block_size] for at in range(0, len(tokens), block_size)]
        return stored(*zip(blocks.names, runs, strict=True), parent=blocks.parent)

    def removed(self, names: tuple[int, ...]) -> dict[str, object]:
        return removed(*names)

    def reported(self, events: list[dict[str, object]], _dp_rank: DpRank) -> bytes | None:
        for event in events:
            self._untold.append(native(self._n_events, event))
            self._n_events += 1
        return None

    def loaded(self, load: LoadReport) -> None:
        self._iterations = [*self._iterations[-ITERATIONS_MAX:], load]


class TrtllmAnswer(VllmAnswer):
    """The answer to one call, as TensorRT-LLM writes it."""

    _cached = 0

    def whole(self, chunk: EngineChunk) -> bytes:
        self._count(chunk)
        choice = self._choice(chunk)
        if chunk.kv_transfer_params is not None:
            choice["disaggregated_params"] = {
                "request_type": "context_only",
                "first_gen_tokens": chunk.token_ids,
                "ctx_request_id": 1,
                "encoded_opaque_state": json.dumps(dict(chunk.kv_transfer_params)),
            }
        return json.dumps({**self._head(), "choices": [choice], "usage": self._usage()}).encode()

    def _head(self) -> dict[str, object]:
        return {**super()._head(), "usage": None}

    def _choice(self, chunk: EngineChunk) -> dict[str, object]:
        tells_text = self._reported.get("detokenize", True)
        return {
            "index": 0,
            "text": "".join(f" {token}" for token in chunk.token_ids) if tells_text else "",
            "token_ids": None if tells_text else chunk.token_ids,
            "logprobs": None,
            "finish_reason": None if chunk.finish is None else finish_name(chunk.finish),
            "stop_reason": None,
        }


def _trtllm_iteration(load: LoadReport, config: MockConfig) -> dict[str, object]:
    return {
        "numActiveRequests": load.running_requests,
        "numQueuedRequests": load.waiting_requests,
        "kvCacheStats": {
            "tokensPerBlock": config.block_size,
            "maxNumBlocks": load.total_blocks,
            "usedNumBlocks": load.active_blocks,
        },
    }


def finish_name(finish: FinishReason) -> str:
    """What an engine calls it."""
    return "abort" if finish is FinishReason.CANCELLED else finish.value


def check_max_tokens(n_tokens: int, field: str, *, least: int) -> None:
    """Raise InvalidRequest, as engines do."""
    if n_tokens < least:
        raise InvalidRequest(f"{field} must be at least {least}, got {n_tokens}.", param=field)


def check_length(n_prompt: int, n_tokens: int, context_tokens: int) -> None:
    """Raise ContextLengthExceeded, as engines do."""
    if n_prompt + n_tokens > context_tokens:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{n_tokens} output tokens and your prompt contains {n_prompt} input tokens.",
            param="input_tokens",
        )
