"""How a small engine speaks as vLLM 0.32: its pages, its completions, its events, its errors."""

import json
from array import array
from collections.abc import Mapping
from typing import Any

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, KvrouterError
from kvrouter.core.ids import DpRank, RequestId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.core.workers import LoadReport
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.vllm.calls import RANK_HEADER
from kvrouter.engines.vllm.introspect import CACHE_METRIC, RUNNING, STARTED_METRIC, USED, WAITING
from kvrouter.transports.requests.port import WorkerFull
from tests.testing.engine_publisher import Publisher, vllm_batch
from tests.testing.engine_requests import MODEL
from tests.testing.scripted_engine import event_of
from tests.testing.small_engine import ParsedCall, SmallEngine, StoredBlocks, next_name

TOKENS_BY_DEFAULT = 16


class VllmProtocol:
    """A :class:`~tests.testing.small_engine.Tongue`."""

    def __init__(self, context_tokens: int) -> None:
        self._context_tokens = context_tokens

    def page(self, path: str, engine: SmallEngine) -> bytes | None:
        match path:
            case "/v1/models":
                about = {"root": "tiny-model", "parent": None, "max_model_len": self._context_tokens}
                return json.dumps({"object": "list", "data": [{"id": MODEL, **about}]}).encode()
            case "/version":
                return b'{"version":"0.32.0"}'
            case "/kv_event_sources":
                sources = {str(rank): _source(each) for rank, each in engine.publishers.items()}
                return json.dumps(sources).encode()
            case "/metrics":
                return _metrics(engine).encode()
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

    def refusal(self, error: KvrouterError) -> tuple[int, bytes]:
        return refusal_of(error)

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

    def reported(self, events: list[dict[str, object]], dp_rank: DpRank) -> bytes | None:
        return vllm_batch(*events, dp_rank=dp_rank)

    def loaded(self, _load: LoadReport) -> None:
        """Its metrics page has the latest."""


class VllmAnswer:
    """The answer to one call of ``/v1/completions``, as vLLM and others write it, and its call."""

    def __init__(self, reported: Mapping[str, Any], n_prompt: int) -> None:
        self._reported = reported
        self._n_prompt = n_prompt
        self._n_tokens = 0
        self._cached: int | None = None

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


def refusal_of(error: KvrouterError) -> tuple[int, bytes]:
    """The status and body of an error in OpenAI's form."""
    status = 400 if isinstance(error, InvalidRequest) else 503 if isinstance(error, WorkerFull) else 500
    reported = {"message": error.message, "type": "BadRequestError", "param": error.param, "code": status}
    return status, json.dumps({"error": reported}).encode()


def _source(publisher: Publisher) -> dict[str, object]:
    at = publisher.at
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": at.events,
        "replay_endpoint": at.replay,
        "topic": at.topic,
    }


def _metrics(engine: SmallEngine) -> str:
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
