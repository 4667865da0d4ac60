"""A request between the frontend and an engine, and its answer."""

from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvrouter.core.constraints import Pin, RouterConfigOverride, RoutingConstraints
from kvrouter.core.engine_answer import EngineAnswer, Headers
from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId

if TYPE_CHECKING:
    TokenBuffer = array[int]
else:  # the array type takes no parameter at run time before Python 3.12
    TokenBuffer = array
"""Token ids as ``array('I')``: unsigned 32 bits, the form that is hashed without a copy."""

KvTransferParams = Mapping[str, object]
"""A worker's description of where its KV waits for another; opaque to the router, passed on unchanged."""


class Leg(StrEnum):
    """The part of a request that one engine runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class FinishReason(StrEnum):
    """Why an engine ended its answer; ``STOP`` covers end-of-sequence and stop strings."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class KvLoss(StrEnum):
    """Why a decode engine could not fetch the KV of its leg. The reporting engine itself is healthy."""

    UNREACHABLE = "unreachable"
    """The address where the KV waits does not answer."""
    BROKEN = "broken"
    """The connection, or the engine that held the KV, was lost before or during the transfer."""
    TIMEOUT = "timeout"
    """The KV did not arrive in time."""
    UNKNOWN = "unknown"
    """The engine there does not hold KV for this leg: it never did, dropped it, or gave it to another leg."""
    REFUSED = "refused"
    """The handshake of the two engines failed: they are of versions or configurations that do not fit."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters. ``resumable``: whether another worker can continue with the same tokens."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    guided: str | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    @property
    def resumable(self) -> bool:
        """Whether an answer can continue on another engine without state of the first one: greedy or
        unseeded, no penalties over earlier output, no grammar state, no logprobs.
        """
        greedy_or_unseeded = self.temperature == 0.0 or self.seed is None
        no_penalty = (
            self.frequency_penalty == 0.0 and self.presence_penalty == 0.0 and self.repetition_penalty == 1.0
        )
        return greedy_or_unseeded and no_penalty and self.logprobs is None and self.guided is None


class Bootstrap(msgspec.Struct, frozen=True):
    """The rendezvous of a bootstrap handoff, given to both legs; room % dp_size == dp_rank."""

    host: str
    port: int
    room: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens counted once per request, however many workers served it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class CallRoute(StrEnum):
    """HTTP routes of engines; the values are their paths. The router parses calls and answers of the first
    two, OpenAI's routes for generation; those of the others pass unchanged.
    """

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    CLASSIFY_V1 = "/v1/classify"
    SCORE = "/score"
    SCORE_V1 = "/v1/score"
    RERANK = "/rerank"
    RERANK_V1 = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"
    MODERATIONS = "/v1/moderations"
    TOKENIZE = "/tokenize"
    TOKENIZE_V1 = "/v1/tokenize"
    DETOKENIZE = "/detokenize"
    DETOKENIZE_V1 = "/v1/detokenize"
    TRANSCRIPTIONS = "/v1/audio/transcriptions"
    TRANSLATIONS = "/v1/audio/translations"
    CHATS = "/v1/chat/completions/batch"
    GENERATIVE_SCORING = "/generative_scoring"
    EMBED_V2 = "/v2/embed"
    GENERATE = "/generate"
    ENCODE = "/encode"
    PARSE_FUNCTION_CALL = "/parse_function_call"
    SEPARATE_REASONING = "/separate_reasoning"

    @property
    def is_passed(self) -> bool:
        """Whether its calls and answers pass unchanged, without being parsed."""
        return self is not CallRoute.CHAT and self is not CallRoute.COMPLETION

    @property
    def generates(self) -> str | None:
        """The short name of a route that generates text from a prompt; None for the others."""
        return _GENERATES.get(self)


_GENERATES: Mapping[CallRoute, str] = {
    CallRoute.CHAT: "chat",
    CallRoute.COMPLETION: "completions",
    CallRoute.RESPONSES: "responses",
    CallRoute.MESSAGES: "messages",
}


class ClientForm(msgspec.Struct, frozen=True):
    """Metadata of a form body: its ``content_type``, with the boundary of its parts, and the byte range of
    the model's name; None when the form does not name a model.
    """

    content_type: str
    model_at: tuple[int, int] | None


class ClientCall(msgspec.Struct):
    """A client's call as it was received: ``body`` is the JSON of ``route`` without the router's own fields;
    with a ``form``, the unchanged form.

    ``resumable``: whether its answer is one plain text, which another worker could continue.
    The router empties ``body``, which may be long, once it no longer keeps it for a retry.
    """

    route: CallRoute
    body: bytes
    stream: bool
    resumable: bool
    form: ClientForm | None = None


HeaderText = Annotated[str, msgspec.Meta(pattern=r"\A[\t -~]*\Z")]
"""A header value that any HTTP client and server accept."""


class TraceContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """The distributed trace of a call, in W3C's form: the values of the headers of these names, empty when
    absent. A ``tracestate`` needs a ``traceparent``; ``baggage`` needs neither.
    """

    traceparent: HeaderText = ""
    tracestate: HeaderText = ""
    baggage: HeaderText = ""
    trace_id: HeaderText = ""
    """The trace id of ``traceparent``: 32 hexadecimal digits. Log lines and metrics have it."""

    def headers(self) -> dict[str, str]:
        """Return the headers with which an engine continues the trace."""
        names = ("traceparent", "tracestate", "baggage")
        return {name: value for name in names if (value := getattr(self, name))}


NO_TRACE = TraceContext()


class EngineRequest(msgspec.Struct, frozen=True):
    """One leg of one attempt, as a worker receives it.

    ``token_ids`` is the prompt, followed by the tokens already generated elsewhere when ``resumed_tokens`` is
    above 0: those are context, not output; ``sampling.max_tokens`` counts the remaining tokens.
    ``request_id`` is the client's, who may give one id to two requests; together with ``intake``, the
    router's own id of the request, it is unique. ``time_left_s`` is how long the caller still waits, counted
    from when it sent this message, so that clocks are not compared; None for no limit. ``call`` is the
    client's original call, for engines that accept it; its answer comes as :attr:`EngineChunk.raw`, unless
    ``resumed_tokens`` is above 0. The engine continues ``trace``.
    """

    request_id: RequestId
    attempt: int
    leg: Leg
    model: ModelName
    token_ids: TokenBuffer
    sampling: Sampling
    dp_rank: DpRank = DpRank(0)
    resumed_tokens: int = 0
    bootstrap: Bootstrap | None = None
    kv_transfer_params: KvTransferParams | None = None
    prefill_worker_id: WorkerId | None = None
    lora_name: str | None = None
    cache_namespace: str | None = None
    time_left_s: float | None = None
    intake: str = ""
    call: ClientCall | None = None
    trace: TraceContext = NO_TRACE

    @property
    def engine_key(self) -> str:
        """The request id that the engine gets: unique over all requests and their attempts."""
        return f"{self.request_id}-{self.intake}#{self.attempt}"


class EngineChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of an engine's answer: any number of tokens, and on the last chunk the reason why it ended.

    ``cached_tokens`` comes with the first chunk: the prompt tokens that the engine found in its cache.
    ``kv_transfer_params`` ends a synchronous prefill leg. ``kv_lost`` comes with the finish ``ERROR`` of a
    decode leg that failed only because it could not fetch its prefill worker's KV. ``kv_bytes`` comes once,
    from an engine that reports it: the bytes of KV that it fetched for this leg. ``failure`` comes with
    ``kv_lost`` when the engine answered with an error.

    ``raw`` is a part of the answer to a :class:`ClientCall` in the engine's own bytes, which the client gets
    unchanged; ``token_ids`` are then its tokens if the engine reports them, and ``text_chars`` its number of
    characters of text. Without ``text_chars`` the answer cannot be resumed from here. ``cached_tokens`` may
    then come last. ``comments`` are an event stream's comments before ``raw``: the client gets them, but a
    chunk with nothing else does not belong to the answer. ``unread`` is why ``raw`` could not be parsed
    completely. ``headers`` come with the first ``raw``: the headers of the engine's answer that the client
    gets. ``prompt_tokens`` and ``completion_tokens`` are the engine's counts of the prompt and of its answer
    so far; None when it does not report them.
    """

    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    kv_transfer_params: KvTransferParams | None = None
    error: str | None = None
    kv_lost: KvLoss | None = None
    raw: bytes = b""
    text_chars: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    kv_bytes: int | None = None
    failure: EngineAnswer | None = None
    headers: Headers = ()
    comments: bytes = b""
    unread: str | None = None

    @property
    def is_comment(self) -> bool:
        """Whether it has comments and no part of an answer."""
        return bool(self.comments) and not self.raw and not self.token_ids and self.finish is None


def merge_chunks(chunks: Sequence[EngineChunk]) -> EngineChunk:
    """Merge consecutive chunks of one leg, at least one. Facts of the prompt come from the first chunk that
    has them, the count of the answer's tokens from the last chunk that has one, the finish and its details
    from the last chunk.
    """
    last = chunks[-1]
    answers = [chunk for chunk in chunks if not chunk.is_comment]
    chars = [chunk.text_chars for chunk in answers if chunk.text_chars is not None]
    written = b"".join(chunk.comments + chunk.raw for chunk in chunks)
    counts = [chunk.completion_tokens for chunk in chunks if chunk.completion_tokens is not None]
    return EngineChunk(
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        finish=last.finish,
        cached_tokens=next((c.cached_tokens for c in chunks if c.cached_tokens is not None), None),
        kv_transfer_params=last.kv_transfer_params,
        error=last.error,
        kv_lost=last.kv_lost,
        failure=last.failure,
        raw=written if answers else b"",
        text_chars=sum(chars) if answers and len(chars) == len(answers) else None,
        prompt_tokens=next((c.prompt_tokens for c in chunks if c.prompt_tokens is not None), None),
        completion_tokens=counts[-1] if counts else None,
        kv_bytes=next((c.kv_bytes for c in chunks if c.kv_bytes is not None), None),
        comments=b"" if answers else written,
        unread=next((c.unread for c in chunks if c.unread is not None), None),
        headers=next((chunk.headers for chunk in chunks if chunk.headers), ()),
    )


class ServiceLevel(msgspec.Struct, frozen=True):
    """How urgent a request is.

    A waiting request of a higher ``strict_priority`` always goes first; among equals, a request counts as if
    it had come ``priority_s`` seconds earlier, or later below 0. ``ttft_slo_s``: the time to the first token,
    in seconds from the arrival, within which the answer is of use; None for that of the router's settings.
    """

    strict_priority: int = 0
    priority_s: float = 0.0
    ttft_slo_s: float | None = None

    @property
    def is_critical(self) -> bool:
        """Whether it has a strict priority, so that it is refused last."""
        return self.strict_priority > 0


DEFAULT_LEVEL = ServiceLevel()
"""The service level of a request that states none."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """One request of a client, validated and tokenized: the request preparer's output, the router's input.

    ``intake`` is the router's own id of the request, set when it accepts it: random, so unique over routers.
    With ``has_media`` some of ``token_ids`` are placeholders for media: engines report no blocks with them.
    When the prompt's tokens are unknown, ``token_ids`` is empty and ``isl_tokens_estimate`` estimates their
    number. ``text_ids`` is then its text, a number for each four bytes, so that prompts that begin alike have
    the same blocks; without a text it shares no block with any other.
    ``context_tokens``: the tokens of the prompt and of the requested answer, 1 for an answer of open length;
    only a worker whose context holds them may take the request. 0 when unknown.
    An ``aggregated`` request is served by one worker even if there are prefill workers: it cannot be split.
    ``client`` distinguishes clients; 0 when unknown.
    ``shape``: the kind of call from which an engine builds this prompt; empty when no engine does.
    """

    request_id: RequestId
    model: ModelName
    token_ids: TokenBuffer
    sampling: Sampling
    constraints: RoutingConstraints = RoutingConstraints()
    override: RouterConfigOverride = RouterConfigOverride()
    pin: Pin | None = None
    prefill_pin: Pin | None = None
    lora_name: str | None = None
    cache_namespace: str | None = None
    intake: str = ""
    call: ClientCall | None = None
    has_media: bool = False
    context_tokens: int = 0
    aggregated: bool = False
    shape: str = ""
    trace: TraceContext = NO_TRACE
    client: int = 0
    isl_tokens_estimate: int = 0
    text_ids: TokenBuffer | None = None
    service_level: ServiceLevel = DEFAULT_LEVEL

    @property
    def is_guess(self) -> bool:
        """Whether engines report not all blocks of the prompt by the names that it has here."""
        return self.has_media or self.text_ids is not None

    @property
    def is_prompt_unknown(self) -> bool:
        """Whether the prompt's tokens are unknown here, and their number is an estimate."""
        return self.isl_tokens_estimate > 0

    @property
    def isl_tokens(self) -> int:
        """The number of tokens of the prompt, known or estimated."""
        return self.isl_tokens_estimate or len(self.token_ids)
