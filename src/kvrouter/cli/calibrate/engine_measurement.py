"""Requests sent to a live engine: a client's observation of each, and the engine's metrics on them."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvrouter.cli.timed_stream import Clock, CompletionFailed, closed_loop, send_completion
from kvrouter.core.errors import KvrouterError
from kvrouter.engines.openai.request_times import (
    RUNNING,
    TIMES,
    RequestTimes,
    read_request_times,
    read_running,
    times_between,
)
from kvrouter.engines.openai.server import EngineServer
from kvrouter.sim.calibrate.client_run import ClientRequest
from kvrouter.sim.calibrate.engine_load import EngineLoad, LoadPhase, LoadRequest
from kvrouter.text.model import mock_words

ROUND_TRIPS = 5
"""The fastest of this many small requests gives the round trip to the engine."""

OTHERS = "others use it, and their load would be measured too"

SETTLE_TRIES = 20
SETTLE_PAUSE_S = 0.05
"""How often, and with what pause, the metrics are read until they count a request that has ended."""


class MeasurementFailed(KvrouterError):
    """The engine did not answer a request as one that can be measured does."""

    code = "measurement_failed"


class Measurement(NamedTuple):
    """The measured requests in the order in which they were sent, and the metrics of all of them.

    ``times`` are sums over those requests; ``cached_tokens`` of their prompts were in the engine's cache.
    """

    requests: tuple[ClientRequest, ...]
    times: RequestTimes
    round_trip_s: float
    cached_tokens: int


async def measure_engine(
    server: EngineServer,
    model: str,
    load: EngineLoad,
    *,
    limit_s: float,
    on_request: Callable[[int], None] = lambda _: None,
    clock: Clock = time.monotonic,
) -> Measurement:
    """Send ``load``, and return the measurement, by ``clock``; ``on_request`` is called with the number of
    ended requests.

    Each request, its connection included, may take ``limit_s``. Raises MeasurementFailed, which names the URL
    and the server's message, for the first request that fails, and if the engine served others meanwhile.
    """
    sender = _Sender(server, model, limit_s, clock)
    before = await _settled(server, None, 0)
    for request in load.warm_up:
        await sender.send(request)
    began = before = await _settled(server, before, len(load.warm_up))
    await _check_idle(server)
    sender.cached_tokens = 0
    round_trip_s = await _round_trip_s(server, clock)
    measured: list[ClientRequest] = []
    for phase in load.phases:
        for batch in _batches(phase):
            sent = await _sent_phase(sender, batch, len(measured), on_request)
            after = await _settled(server, before, len(sent))
            _check_alone(server, times_between(before, after), len(sent))
            measured += _with_times(sent, times_between(before, after))
            before = after
    await _check_idle(server)
    return Measurement(tuple(measured), times_between(began, before), round_trip_s, sender.cached_tokens)


def _batches(phase: LoadPhase) -> Iterator[LoadPhase]:
    """Yield a phase, or each of its requests where these run one at a time: so often metrics are read."""
    if phase.concurrency > 1:
        yield phase
    else:
        for request in phase.requests:
            yield LoadPhase(1, (request,))


def _check_alone(server: EngineServer, times: RequestTimes, n_sent: int) -> None:
    """Raise MeasurementFailed where more requests ended than were sent from here."""
    if times.queue is not None and times.queue.count > n_sent:
        raise MeasurementFailed(
            f"{server.url}: served {times.queue.count} requests, of which {n_sent} came from here: {OTHERS}"
        )


async def _check_idle(server: EngineServer) -> None:
    """Raise MeasurementFailed if requests run that were not sent from here."""
    for _ in range(SETTLE_TRIES):
        page = await server.metrics(RUNNING)
        n_running = None if page is None else read_running(page)
        if not n_running:
            return
        await asyncio.sleep(SETTLE_PAUSE_S)
    raise MeasurementFailed(f"{server.url}: has {n_running} requests that were not sent from here: {OTHERS}")


async def _sent_phase(
    sender: "_Sender", phase: LoadPhase, n_before: int, on_request: Callable[[int], None]
) -> list[ClientRequest]:
    """Send the next request of a phase as one ends; return all, in the order in which they were sent.

    ``n_before`` requests had ended before it.
    """
    ended: list[ClientRequest] = []

    async def send(request: LoadRequest) -> None:
        ended.append(await sender.send(request))
        on_request(n_before + len(ended))

    await closed_loop(phase.requests, send, concurrency=phase.concurrency)
    return sorted(ended, key=lambda request: request.sent_s)


def _with_times(requests: Sequence[ClientRequest], times: RequestTimes) -> list[ClientRequest]:
    """Add the engine's own times of the only request that ended between two pages; of several, the share of
    their TTFT that was neither queue nor prefill.
    """
    queue, prefill, n = times.queue, times.prefill, len(requests)
    if queue is None or prefill is None or queue.count != n or prefill.count != n or prefill.seconds <= 0.0:
        return list(requests)
    if n == 1:
        queue_s, prefill_s = max(0.0, queue.seconds), prefill.seconds
        return [request._replace(queue_s=queue_s, prefill_s=prefill_s) for request in requests]
    ttft_s = sum(request.first_s - request.sent_s for request in requests)
    share = max(0.0, 1.0 - (queue.seconds + prefill.seconds) / ttft_s)
    return [request._replace(way_share=share) for request in requests]


async def _settled(server: EngineServer, before: RequestTimes | None, n_ended: int) -> RequestTimes:
    """Return the metrics once they count ``n_ended`` requests more than ``before``, or after a second."""
    for _ in range(SETTLE_TRIES):
        page = await server.metrics(TIMES)
        times = RequestTimes(None, None, None, None) if page is None else read_request_times(page)
        if before is None or before.queue is None or times.queue is None:
            return times
        if times.queue.count - before.queue.count >= n_ended:
            return times
        await asyncio.sleep(SETTLE_PAUSE_S)
    return times


async def _round_trip_s(server: EngineServer, clock: Clock) -> float:
    """Return the time of the fastest of a few small requests."""
    took: list[float] = []
    for _ in range(ROUND_TRIPS):
        began = clock()
        await server.look("/v1/models")
        took.append(clock() - began)
    return min(took)


class _Sender:
    """Sends requests with prompts that no request had before."""

    def __init__(self, server: EngineServer, model: str, limit_s: float, clock: Clock) -> None:
        self.cached_tokens = 0
        self._server = server
        self._model = model
        self._limit_s = limit_s
        self._clock = clock
        self._words = mock_words()
        self._draws = np.random.default_rng()  # no seed: a second run must not find the first one's blocks
        self._sent_words = 0
        self._sent_tokens = 0

    async def send(self, request: LoadRequest) -> ClientRequest:
        """Send one request and read its stream. Raises MeasurementFailed."""
        tokens_per_word = self._sent_tokens / self._sent_words if self._sent_words else 1.0
        n_words = max(1, round(request.prompt_tokens / tokens_per_word))
        fields = {
            "model": self._model,
            "prompt": self._text(n_words),
            "max_tokens": request.answer_tokens,
        }
        try:
            answer = await send_completion(self._server, fields, limit_s=self._limit_s, clock=self._clock)
        except CompletionFailed as error:
            raise MeasurementFailed(error.message) from error
        self._sent_words += n_words
        self._sent_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens or 0
        return ClientRequest(
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.output_tokens,
            sent_s=answer.sent_s,
            first_s=answer.first_s,
            last_s=answer.last_s,
            queue_s=None if answer.own is None else answer.own.queue_s,
            prefill_s=None if answer.own is None else answer.own.prefill_s,
        )

    def _text(self, n_words: int) -> str:
        return "".join(f" {self._words[at]}" for at in self._draws.integers(len(self._words), size=n_words))
