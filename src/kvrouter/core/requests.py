"""A request as it travels from the frontend to an engine, and its answer."""

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
"""What a prefill worker says about where its KV waits; opaque to the router, passed on unchanged."""


class Leg(StrEnum):
    """Which part of a request an engine is asked for."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class FinishReason(StrEnum):
    """Why an engine ended; ``STOP`` covers end-of-sequence and stop strings."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class KvLoss(StrEnum):
    """Why the KV that a decode leg came for could not be fetched. The engine that says so did its part."""

    UNREACHABLE = "unreachable"
    """Nobody answers where the KV should wait."""
    BROKEN = "broken"
    """The way to it, or the engine that held it, was lost while it waited or travelled."""
    TIMEOUT = "timeout"
    """It did not come in time."""
    UNKNOWN = "unknown"
    """The engine there has no such KV for this leg: never, no longer, or for another."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn. ``resumable``: whether another worker can go on with the same tokens."""

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
        """True when nothing in the engine's memory of this request is needed to go on: greedy or unseeded,
        no penalties over earlier output, no grammar state, no logprobs.
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
    """Routes of engines that calls go to; the values are their paths. The first two are OpenAI's for
    generation, which are understood here; of the others calls and answers pass as they are.
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
        """Whether neither calls nor answers of it are understood here."""
        return self is not CallRoute.CHAT and self is not CallRoute.COMPLETION


class ClientForm(msgspec.Struct, frozen=True):
    """What is known of a body that is a form: its ``content_type``, with the boundary of its parts, and where
    in it the name of the model begins and ends, None where it names none.
    """

    content_type: str
    model_at: tuple[int, int] | None


class ClientCall(msgspec.Struct):
    """A call as the client wrote it: ``body`` is the JSON of ``route``, without what is for the router alone;
    where there is a ``form``, that form as it came.

    ``resumable``: whether its answer is plain text, one of it, that another worker could go on with.
    The router empties ``body``, which may be long, when it keeps it for no retry any more.
    """

    route: CallRoute
    body: bytes
    stream: bool
    resumable: bool
    form: ClientForm | None = None


HeaderText = Annotated[str, msgspec.Meta(pattern=r"\A[\t -~]*\Z")]
"""What any HTTP client and server take as a header's value."""


class TraceContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """The distributed trace that a call belongs to, in W3C's form: the values of the headers of these names,
    empty where there is none. A ``tracestate`` needs a ``traceparent``; ``baggage`` needs neither.
    """

    traceparent: HeaderText = ""
    tracestate: HeaderText = ""
    baggage: HeaderText = ""
    trace_id: HeaderText = ""
    """That of ``traceparent``: 32 hexadecimal digits. Log lines and metrics have it."""

    def headers(self) -> dict[str, str]:
        """Return the headers by which an engine goes on with the trace."""
        names = ("traceparent", "tracestate", "baggage")
        return {name: value for name in names if (value := getattr(self, name))}


NO_TRACE = TraceContext()


class EngineRequest(msgspec.Struct, frozen=True):
    """One leg of one attempt, as a worker receives it.

    ``token_ids`` is the prompt, followed by the tokens already generated elsewhere when ``resumed_tokens`` is
    above 0: those are context, not output; ``sampling.max_tokens`` counts what is still wanted.
    ``request_id`` is the client's, who may give one id to two requests; with ``intake``, the router's own
    name for it, it is nobody else's.
    ``time_left_s`` is how long the caller still waits, counted from the moment it sent this: no two clocks
    are compared. None: as long as it takes. ``call`` is what the client wrote, for engines that take that;
    its answer comes as :attr:`EngineChunk.raw`, unless ``resumed_tokens`` is above 0. An engine is given
    ``trace``, to go on with it.
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
        """What an engine calls this leg: unique over all requests, and over the attempts of each."""
        return f"{self.request_id}-{self.intake}#{self.attempt}"


class EngineChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine sends back: any number of tokens, and on the last chunk why it ended.

    ``cached_tokens`` comes with the first chunk: how many prompt tokens the engine found in its own cache.
    ``kv_transfer_params`` ends a synchronous prefill leg. ``kv_lost`` comes with the finish ``ERROR`` of a
    decode leg that failed for want of its prefill worker's KV, and for nothing else. ``kv_bytes`` comes once,
    from an engine that reports it: how many bytes of KV it fetched for this leg. ``failure`` comes with
    ``kv_lost`` where the engine answered with an error.

    ``raw`` is the answer to a :class:`ClientCall` in the engine's own bytes, for the client as they are;
    ``token_ids`` are then the tokens in them where the engine reports them, and ``text_chars`` how many
    characters of text. Without ``text_chars`` nobody could go on from here. ``cached_tokens`` may then come
    last.
    ``comments`` are an event stream's comments, ahead of ``raw``: the client gets them, and a chunk that has
    nothing else is no part of the answer. ``unread`` is why not everything in ``raw`` could be read.
    ``headers`` come with the first of ``raw``: those of the engine's answer that the client gets.
    ``prompt_tokens`` is how many tokens the engine counts in the prompt, and ``completion_tokens`` in its
    answer so far, where it reports that.
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
        """Whether it has comments and brings nothing of an answer."""
        return bool(self.comments) and not self.raw and not self.token_ids and self.finish is None


def merge_chunks(chunks: Sequence[EngineChunk]) -> EngineChunk:
    """Return consecutive chunks of one leg, at least one, as one: what is reported of the prompt is taken
    from the first chunk that has it, a count of the answer's tokens from the last chunk that has one, an end
    and what belongs to it from the last chunk.
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


class GenerateRequest(msgspec.Struct, frozen=True):
    """One request of a client, validated and tokenized: what the request preparer hands to the router.

    ``intake`` is the router's own name for it, once it took it in: random, so that no other router has it.
    With ``has_media`` some of ``token_ids`` stand for what is no text: no engine reports blocks with them.
    Where the prompt's tokens are not known here ``token_ids`` is empty, and ``isl_tokens_estimate`` says how
    many there may be: such a prompt shares no block with any other.
    ``context_tokens``: prompt and answer as the client asks for them, a single token where it leaves the
    length of the answer open; only a worker whose context holds them may take it. 0: nothing is known of it.
    One that is ``whole`` is served by one worker, though others prefill: nobody here can divide it.
    ``client`` distinguishes who asks from others; 0: not known.
    ``shape``: of what kind the call is that an engine makes this prompt of; empty where no engine does.
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
    whole: bool = False
    shape: str = ""
    trace: TraceContext = NO_TRACE
    client: int = 0
    isl_tokens_estimate: int = 0

    @property
    def is_prompt_unknown(self) -> bool:
        """Whether the tokens of the prompt are not known here, and their number is estimated."""
        return self.isl_tokens_estimate > 0

    @property
    def isl_tokens(self) -> int:
        """How many tokens the prompt has, or may have."""
        return self.isl_tokens_estimate or len(self.token_ids)
