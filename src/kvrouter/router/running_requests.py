"""The running requests of one process: starts each one, and waits for them when the router shuts down."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.errors import ShuttingDown
from kvrouter.core.ids import ModelName
from kvrouter.core.requests import GenerateRequest
from kvrouter.router.generation import Generation
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.leg_outcomes import with_intake_id
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.stall_watch import StallTimes, StallWatch, Timeouts
from kvrouter.router.traffic import NO_ORIGIN, LegSpans, Origin
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.background import DueTimes
from kvrouter.transports.requests.port import RequestTransport


class Requests:
    """Starts requests of all models. ``model_of`` returns a model's router or raises."""

    def __init__(
        self,
        config: KvRouterConfig,
        transport: RequestTransport,
        instrumentation: ServiceInstrumentation,
        model_of: Callable[[ModelName], ModelRouter],
    ) -> None:
        self.traffic = instrumentation.traffic
        """Records the traffic; None where recording is off."""
        self.is_draining = False
        """Whether new requests are refused."""
        self._config = config
        self._transport = transport
        self._instrumentation = instrumentation
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
        self._whole_timeouts = replace(self._timeouts, first_token_s=config.request_timeout_s)
        """Without streaming the first token comes with the last: one limit holds."""
        self._stalls: StallTimes = DueTimes(StallWatch.check)

    def generate(
        self,
        request: GenerateRequest,
        *,
        received_s: float | None = None,
        origin: Origin = NO_ORIGIN,
        spans: LegSpans | None = None,
    ) -> Generation:
        """Return the request's answer as an iterator; nothing is decided before the first read.

        ``received_s``: when its last byte arrived, on the monotonic clock; its times are measured from then.
        ``origin`` is recorded with the traffic; ``spans`` makes the trace spans of its legs.
        """
        if self.is_draining:
            raise ShuttingDown("this router is shutting down and takes no new requests")
        model = self._model_of(request.model)
        is_streamed = request.call is None or request.call.stream
        generation = Generation(
            with_intake_id(request),
            model,
            self._transport,
            timeouts=self._timeouts if is_streamed else self._whole_timeouts,
            stalls=self._stalls,
            redispatches_max=self._config.retries_max,
            instrumentation=self._instrumentation,
            retry_bodies=self._retry_bodies,
            on_end=self._ended,
            received_s=received_s,
            origin=origin,
            spans=spans,
        )
        self._running.add(generation)
        self._idle.clear()
        self._instrumentation.request_begun(request.model)
        generation.keep_call()
        return generation

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests and wait for the running ones. Returns how many were cut off at the limit."""
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
        """Bytes of the client calls' bodies that are kept for retries."""
        return self._retry_bodies.bytes

    def _ended(self, generation: Generation) -> None:
        self._running.discard(generation)
        if not self._running:
            self._idle.set()
