"""How a small engine speaks as TensorRT-LLM 1.3: pages, completions, events that are asked for, errors."""

import json
from array import array
from collections.abc import Mapping
from typing import Any

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, KvrouterError
from kvrouter.core.ids import DpRank, RequestId
from kvrouter.core.requests import EngineChunk, EngineRequest, Leg, Sampling
from kvrouter.core.workers import LoadReport
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.trtllm.introspect import CONFIG_METRIC, OWNER
from kvrouter.transports.requests.port import WorkerFull
from tests.testing.engine_requests import MODEL
from tests.testing.scripted_engine import event_of
from tests.testing.small_engine import ParsedCall, SmallEngine, StoredBlocks, next_name
from tests.testing.small_engine_vllm import check_max_tokens, finish_name
from tests.testing.trtllm_server import EVENTS, created, native, removed, stored

TOKENS_BY_DEFAULT = 16
ITERATIONS_MAX = 1000

_LEGS = {"context_only": Leg.PREFILL, "generation_only": Leg.DECODE}


class TrtllmProtocol:
    """A :class:`~tests.testing.small_engine.Tongue`."""

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
                return json.dumps([_iteration(load, engine.config) for load in reported]).encode()
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
        kind = _LEGS.get(fetch.get("request_type", ""), Leg.AGGREGATED)
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


class TrtllmAnswer:
    """The answer to one call; ``reported`` is the call."""

    def __init__(self, reported: Mapping[str, Any], n_prompt: int) -> None:
        self._reported = reported
        self._n_prompt = n_prompt
        self._n_tokens = 0
        self._cached = 0

    def piece(self, chunk: EngineChunk) -> bytes:
        self._count(chunk)
        events: list[object] = []
        if chunk.token_ids or chunk.finish is not None:
            events.append({**self._head(), "choices": [self._choice(chunk)], "usage": None})
        if chunk.finish is not None:
            if (self._reported.get("stream_options") or {}).get("include_usage"):
                events.append({**self._head(), "choices": [], "usage": self._usage()})
            events.append("[DONE]")
        return b"".join(map(event_of, events))

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

    def _count(self, chunk: EngineChunk) -> None:
        self._n_tokens += len(chunk.token_ids)
        self._cached = self._cached if chunk.cached_tokens is None else chunk.cached_tokens

    def _head(self) -> dict[str, object]:
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}

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

    def _usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self._n_prompt,
            "total_tokens": self._n_prompt + self._n_tokens,
            "completion_tokens": self._n_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def _iteration(load: LoadReport, config: MockConfig) -> dict[str, object]:
    return {
        "numActiveRequests": load.running_requests,
        "numQueuedRequests": load.waiting_requests,
        "kvCacheStats": {
            "tokensPerBlock": config.block_size,
            "maxNumBlocks": load.total_blocks,
            "usedNumBlocks": load.active_blocks,
        },
    }
