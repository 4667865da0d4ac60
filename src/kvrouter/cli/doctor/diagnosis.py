"""Asks a router and its engines, and makes all checks of their answers."""

import asyncio
import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec

from kvrouter.api.client import AskFailed, RouterClient
from kvrouter.api.fleet_schema import Fleet, Worker
from kvrouter.api.health_schema import ModelList
from kvrouter.cli.doctor import (
    engine_checks,
    kv_event_checks,
    link_checks,
    load_checks,
    place_checks,
    router_checks,
    token_checks,
    worker_checks,
)
from kvrouter.cli.doctor.findings import (
    CacheShares,
    Check,
    Compared,
    Finding,
    NotEnough,
    NotMade,
    Passed,
    Problem,
    Report,
    Severity,
    Unmade,
)
from kvrouter.cli.doctor.flags import DoctorOptions
from kvrouter.cli.doctor.reading import (
    COUNTERS,
    GAUGES,
    Accepting,
    Counts,
    EngineReading,
    OtherRouter,
    Reading,
    TokenProbe,
)
from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.hosts import bracketed
from kvrouter.core.http_client import HttpClient, connection_failure
from kvrouter.core.ids import WorkerId
from kvrouter.core.json import FLEET_TIMES, Unreadable, parsed
from kvrouter.core.workers import Role
from kvrouter.engines.attach import AttachEngine, AttachSpec
from kvrouter.engines.openai.metrics import Samples, read_metrics
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.registry import ENGINES
from kvrouter.transports.requests.port import WorkerUnreachable

CHECKS: Sequence[Check] = (
    *router_checks.CHECKS,
    *worker_checks.CHECKS,
    *place_checks.CHECKS,
    *engine_checks.CHECKS,
    *token_checks.CHECKS,
    *kv_event_checks.CHECKS,
    *link_checks.CHECKS,
    *load_checks.CHECKS,
)
"""Every check, in the order of reports."""

CLOCK_ASKED_WITHIN_S = 1.0
"""A slower answer gives no information on a clock."""

ASKED_AT_ONCE = 32
"""So many engines are asked at a time."""

LISTENING = ("tcp", "http", "https")
"""The schemes of addresses at which a worker listens itself;"""

IN_PROCESS = "memory"
"""and that of workers in the router's own process."""

PROBE = "The quick brown fox: naïve façade, 12345 + 6.789e-3\n\n\tif (x != y) { return; }  東京 – done."
"""A text on which tokenizers differ: words, numbers, blanks, code, other scripts."""


class _QueryNvext(msgspec.Struct, frozen=True):
    token_ids: Sequence[int]


class _QueryAnswer(msgspec.Struct, frozen=True):
    nvext: _QueryNvext


class _TokenizeAnswer(msgspec.Struct, frozen=True):
    tokens: Sequence[int]


async def diagnose(
    router: RouterClient, others: Sequence[RouterClient] = (), options: DoctorOptions | None = None
) -> Report:
    """Ask a router, its engines, and ``others`` of the same fleet; return the report of all checks.

    Raises KvrouterError if the router could not be asked.
    """
    return examine(await gather(router, others, options or DoctorOptions()))


def examine(reading: Reading) -> Report:
    """Make every check; the worst findings come first."""
    findings: list[Finding] = []
    passed: list[Passed] = []
    unmade: list[Unmade] = []
    not_enough: list[Unmade] = []
    for check in CHECKS:
        outcomes = list(check.make(reading))
        compared = "; ".join(outcome.what for outcome in outcomes if isinstance(outcome, Compared))
        for outcome in outcomes:
            if isinstance(outcome, NotMade):
                unmade.append(Unmade(check.name, *outcome))
            elif isinstance(outcome, NotEnough):
                not_enough.append(Unmade(check.name, *outcome))
            elif isinstance(outcome, Problem):
                findings.append(Finding(check.name, *outcome, compared=compared))
        if all(isinstance(outcome, Compared) for outcome in outcomes):
            passed.append(Passed(check.name, check.passes, compared))
    order = list(Severity)
    findings.sort(key=lambda finding: order.index(finding.severity))
    cache: list[CacheShares] = kv_event_checks.shares(reading)
    return Report(reading.url, reading.over_s, findings, passed, unmade, not_enough, cache)


async def gather(router: RouterClient, others: Sequence[RouterClient], options: DoctorOptions) -> Reading:
    """Return one reading of all that is asked. Raises KvrouterError where ``router`` does not answer."""
    before: Samples = {}
    if options.over_s is not None:
        before = _samples(router.url, await asyncio.to_thread(router.metrics), COUNTERS)
        await asyncio.sleep(options.over_s)
    asked_s = time.time()
    fleet = _decoded(router.url, await asyncio.to_thread(router.fleet), Fleet)
    answered_s = time.time()
    is_prompt = answered_s - asked_s <= CLOCK_ASKED_WITHIN_S
    router_ahead_s = None
    if fleet.time_s is not None and is_prompt:
        router_ahead_s = fleet.time_s - (asked_s + answered_s) / 2.0
    page, models, others_read, accepting = await asyncio.gather(
        asyncio.to_thread(router.metrics),
        asyncio.to_thread(router.models),
        asyncio.gather(*map(_other, others)),
        asyncio.gather(*map(_accepting, (router, *others))),
    )
    reading = Reading(
        url=router.url,
        fleet=fleet,
        served=frozenset(model.id for model in _decoded(router.url, models, ModelList).data),
        counts=Counts(_samples(router.url, page, COUNTERS), before),
        gauges=Counts(_samples(router.url, page, GAUGES)),
        over_s=options.over_s,
        engines_asked=options.engines,
        others=others_read,
        accepting=accepting,
    )
    if not options.engines:
        return reading
    at_once = asyncio.Semaphore(ASKED_AT_ONCE)

    async def engine_of(worker: Worker, url: str) -> EngineReading:
        async with at_once:
            return await _engine(worker, url, router.url, router_ahead_s, timeout_s=options.timeout_s)

    found = await asyncio.gather(
        *(engine_of(worker, worker.engine_url) for worker in fleet.workers if worker.engine_url)
    )
    reading = replace(reading, engines={engine.worker_id: engine for engine in found})
    return replace(reading, probes=await _probes(router, reading, at_once, timeout_s=options.timeout_s))


def _samples(url: str, page: bytes, names: Sequence[str]) -> Samples:
    try:
        return read_metrics(page, names)
    except ProtocolError as error:
        raise ProtocolError(f"{url}/metrics is no router's page", param="metrics") from error


async def _other(router: RouterClient) -> OtherRouter:
    try:
        return OtherRouter(router.url, _decoded(router.url, await asyncio.to_thread(router.fleet), Fleet))
    except KvrouterError as error:
        return OtherRouter(router.url, None, error.message)


async def _accepting(router: RouterClient) -> Accepting:
    """Ask a router what its load balancer asks."""
    try:
        await asyncio.to_thread(router.accepting)
    except AskFailed as error:
        why = error.message.removeprefix(f"{router.url}: ")
        return Accepting(router.url, is_asked=error.status == 503, why_not=why)
    return Accepting(router.url)


# Engines


async def _engine(
    worker: Worker, url: str, router_url: str, router_ahead_s: float | None, *, timeout_s: float
) -> EngineReading:
    """Ask one engine for its values, as its worker did when it attached, and for its time."""
    reading = EngineReading(worker_id=worker.worker_id)
    if worker.engine_silent:
        return replace(reading, why="it does not answer its own worker")
    try:
        url = reached_at(url, worker.address, router_url)
        async with asyncio.timeout(timeout_s):
            clock_ahead_s = await _clock_ahead_s(url)
            if clock_ahead_s is not None and router_ahead_s is not None:
                reading = replace(reading, clock_ahead_s=clock_ahead_s - router_ahead_s)
            return await _described(worker, url, reading)
    except KvrouterError as error:
        return replace(reading, why=error.message)
    except TimeoutError:
        return replace(reading, why=f"{url}: no answer in {timeout_s:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return replace(reading, why=f"{url}: {connection_failure(error)}")


async def _described(worker: Worker, url: str, reading: EngineReading) -> EngineReading:
    """Ask the engine for its values. The version of some kinds is not in the registry's values: a second
    reader of their pages would take it from the worker.
    """
    kind = (worker.engine or "").partition(" ")[0]
    if kind not in ENGINES or worker.role not in list(Role):
        return reading
    attach = cast("AttachEngine", import_module(f"{ENGINES[kind]}.attach").attach)
    attached = await attach(
        AttachSpec(kind=kind, url=url, worker_id=WorkerId(worker.worker_id), role=Role(worker.role))
    )
    await attached.engine.stop()
    return replace(
        reading,
        version=attached.version,
        model=attached.model,
        block_size=attached.block_size,
        warnings=attached.warnings,
    )


async def _clock_ahead_s(url: str) -> float | None:
    """Return how far an engine's clock is ahead of this one, by its ``Date``, in whole seconds; None without
    a readable one, or if its answer took too long to know when it was written.
    """
    async with HttpClient() as client:
        asked_s = time.time()
        async with await client.request("GET", f"{url}/version") as answer:
            date = answer.headers.get("date")
            answered_s = time.time()
    if date is None or answered_s - asked_s > CLOCK_ASKED_WITHIN_S:
        return None
    try:
        its_s = parsedate_to_datetime(date).timestamp() + 0.5
    except (ValueError, OverflowError):
        return None
    return its_s - (asked_s + answered_s) / 2.0


def reached_at(engine_url: str, worker_address: str, router_url: str) -> str:
    """Return the URL from here of an engine that its worker reaches by a local name, such as localhost: at
    the worker's host, which its address names if it listens itself; a worker in the router's process or host
    is at the router's.

    Raises WorkerUnreachable if that host is unknown.
    """
    parts = urlsplit(engine_url.rstrip("/"))
    if not _is_loopback(parts.hostname or ""):
        return urlunsplit(parts)
    address, router_host = urlsplit(worker_address), urlsplit(router_url).hostname or ""
    host = address.hostname if address.scheme in LISTENING else router_host
    if address.scheme not in (*LISTENING, IN_PROCESS) and not _is_loopback(router_host):
        raise WorkerUnreachable(f"{engine_url} is an address on the worker's own host, which is not known")
    host = router_host if host is None or _is_loopback(host) else host
    if _is_loopback(host):
        return urlunsplit(parts)
    port = f":{parts.port}" if parts.port is not None else ""
    return urlunsplit(parts._replace(netloc=f"{bracketed(host)}{port}"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Tokens


async def _probes(
    router: RouterClient, reading: Reading, at_once: asyncio.Semaphore, *, timeout_s: float
) -> list[TokenProbe]:
    """Tokenize a text and a chat by the router and by every engine that takes calls as they are."""
    asked: list[asyncio.Task[TokenProbe]] = []
    found: list[TokenProbe] = []

    async def probed(worker: Worker, probe: TokenProbe) -> TokenProbe:
        async with at_once:
            return await _probed(router, worker, reading.engine_of(worker), probe, timeout_s=timeout_s)

    async with asyncio.TaskGroup() as group:
        for model in reading.fleet.models:
            able = [
                worker
                for worker in reading.fleet.workers_of(model)
                if worker.takes_calls and worker.alive and not worker.engine_silent
            ]
            for is_chat in (False, True) if able else ():
                try:
                    own = await _router_tokens(router, model.model, is_chat=is_chat)
                except KvrouterError as error:
                    found.append(TokenProbe(model.model, None, is_chat, None, None, error.message))
                    continue
                for worker in able:
                    probe = TokenProbe(model.model, worker.worker_id, is_chat, own, None)
                    asked.append(group.create_task(probed(worker, probe)))
    return [*found, *(task.result() for task in asked)]


async def _router_tokens(router: RouterClient, model: str, *, is_chat: bool) -> Sequence[int]:
    """Ask the router for a prompt's tokens, by a call that is not sent to any engine."""
    body = {
        **_text(model, is_chat=is_chat),
        "max_tokens": 1,
        "nvext": {"annotations": ["query_instance_id:"]},
    }
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    answer = await asyncio.to_thread(router.post, path, body)
    return _decoded(router.url, answer, _QueryAnswer).nvext.token_ids


async def _probed(
    router: RouterClient, worker: Worker, engine: EngineReading | None, probe: TokenProbe, *, timeout_s: float
) -> TokenProbe:
    """Ask an engine for its tokens: at its own address where it answers there, else through the router."""
    try:
        if engine is not None and engine.model is not None and worker.engine_url:
            url = reached_at(worker.engine_url, worker.address, router.url)
            answer = await _asked_directly(
                url, _text(engine.model, is_chat=probe.is_chat), timeout_s=timeout_s
            )
        elif worker.role != Role.PREFILL:
            body = {**_text(worker.model, is_chat=probe.is_chat), "nvext": {"worker_id": worker.worker_id}}
            answer = await asyncio.to_thread(router.post, "/tokenize", body)
        else:
            return replace(
                probe, why="it is not reached from here, and routers send prefill workers no such call"
            )
        return replace(probe, engine=_decoded("/tokenize", answer, _TokenizeAnswer).tokens)
    except KvrouterError as error:
        return replace(probe, why=error.message)


async def _asked_directly(url: str, body: Mapping[str, object], *, timeout_s: float) -> bytes:
    server = EngineServer(url)
    await server.open()
    try:
        async with asyncio.timeout(timeout_s):
            return await server.ask("/tokenize", msgspec.json.encode(body))
    except TimeoutError as error:
        raise WorkerUnreachable(f"{url}: no answer in {timeout_s:g} s") from error
    finally:
        await server.close()


def _text(model: str, *, is_chat: bool) -> dict[str, object]:
    if is_chat:
        return {"model": model, "messages": [{"role": "user", "content": PROBE}]}
    return {"model": model, "prompt": PROBE}


Answer = TypeVar("Answer")


def _decoded(where: str, answer: bytes, kind: type[Answer]) -> Answer:
    """Return what came. Raises ProtocolError for what another program answered."""
    try:
        return parsed(msgspec.json.Decoder(kind), answer, times=FLEET_TIMES)
    except Unreadable as error:
        raise ProtocolError(f"{where}: the answer is not as expected: {error}") from error
