"""The requests that run in one process: they begin here, and a router that leaves waits for their ends."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.errors import ShuttingDown
from kvrouter.core.ids import ModelName
from kvrouter.core.requests import GenerateRequest
from kvrouter.router.generation import Generation
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.legs import with_intake_id
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.stall_watch import Timeouts
from kvrouter.router.traffic import NO_ORIGIN, LegSpans, Origin
from kvrouter.settings.router import KvRouterConfig
from kvrouter.transports.requests.port import RequestTransport


class Requests:
    """Takes requests for every model, which ``model_of`` finds or refuses."""

    def __init__(
        self,
        config: KvRouterConfig,
        plane: RequestTransport,
        observed: ServiceInstrumentation,
        model_of: Callable[[ModelName], ModelRouter],
    ) -> None:
        self.traffic = observed.traffic
        """What records the traffic; None where nobody asked for that."""
        self.is_draining = False
        """Whether new requests are refused."""
        self._config = config
        self._plane = plane
        self._observed = observed
        self._model_of = model_of
        self._running: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._retry_bodies = ByteBudget(config.retry_bodies_max_bytes)
        first_token_s = config.ttft_timeout_s or config.request_timeout_s
        self._timeouts = Timeouts(
            prefill_s=first_token_s,
            first_token_s=first_token_s,
            between_tokens_s=config.stall_timeout_s,
            request_s=config.request_timeout_s,
        )

    def generate(
        self,
        request: GenerateRequest,
        *,
        received_s: float | None = None,
        origin: Origin = NO_ORIGIN,
        spans: LegSpans | None = None,
    ) -> Generation:
        """Return the request's answer, to be read; nothing is decided before the first read.

        ``received_s``: when its last byte came, on the monotonic clock; times are counted from then on.
        ``origin`` is what a recording of the traffic says of the call; ``spans`` hears of its legs.
        """
        if self.is_draining:
            raise ShuttingDown("this router is shutting down and takes no new requests")
        model = self._model_of(request.model)
        generation = Generation(
            with_intake_id(request),
            model,
            self._plane,
            timeouts=self._timeouts_with(request),
            redispatches_max=self._config.retries_max,
            observed=self._observed,
            retry_bodies=self._retry_bodies,
            on_end=self._ended,
            received_s=received_s,
            origin=origin,
            spans=spans,
        )
        self._running.add(generation)
        self._idle.clear()
        self._observed.request_begun(request.model)
        generation.keep_call()
        return generation

    async def drain(self, limit_s: float) -> int:
        """Take no new requests; wait for the running ones. Returns how many were cut at the limit."""
        self.is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        cut = list(self._running)
        for generation in cut:
            generation.abort(ShuttingDown("this router shut down before the answer was complete"))
        return len(cut)

    @property
    def running(self) -> int:
        """How many requests are running."""
        return len(self._running)

    @property
    def retry_body_bytes(self) -> int:
        """What the bodies of client calls hold that are kept to be sent again."""
        return self._retry_bodies.bytes

    def _timeouts_with(self, request: GenerateRequest) -> Timeouts:
        """An engine that answers at once says nothing before its last token; its prefill leg has but one."""
        if request.call is None or request.call.stream:
            return self._timeouts
        return replace(self._timeouts, first_token_s=self._timeouts.request_s)

    def _ended(self, generation: Generation) -> None:
        self._running.discard(generation)
        if not self._running:
            self._idle.set()
