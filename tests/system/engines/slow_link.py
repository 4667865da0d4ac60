"""A link between real vLLM engines that becomes slow, and well again: what the router learns and does.

    python -m tests.system.engines.slow_link        # writes benchmarks/choice/results/vllm-slow-link.json

One engine prefills and two decode; NIXL carries the KV over TCP, and tc holds each link to a rate. It needs
root that may make network namespaces, and the engines of ``python -m tests.system.engines.install``.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.http_replay.machine import ROOT, Commit, Machine, this_commit, this_machine
from tests.system.engines.calls import companion, stopped, until_feeds
from tests.system.engines.install import NIXL, VLLM
from tests.system.engines.real_engine import MODEL
from tests.system.engines.shaped_network import KV_DEVICE, ShapedNetwork, shaped_network
from tests.system.engines.vllm_server import VllmServer
from tests.testing.processes import Fleet, Frontend, fleet

RESULT = ROOT / "benchmarks" / "choice" / "results" / "vllm-slow-link.json"

PREFILL, NEAR, FAR = 1, 2, 3
"""Worker ids; the link to FAR becomes slow."""

STATIONS = {PREFILL: "p", NEAR: "near", FAR: "far"}
ZONES = {PREFILL: "p", NEAR: "a", FAR: "b"}
CORES = {PREFILL: 0, NEAR: 1, FAR: 1}

WELL_MBIT = 100.0
"""A transfer takes 40 to 150 ms: next to that the moments of engines that share two cores are small."""

SLOW_MBIT = 5.0
BYTES_PER_MBIT = 125_000
LINK = {"latency_s": 0.0, "bandwidth_bytes_per_s": WELL_MBIT * BYTES_PER_MBIT}
LINKS = {"within": {"zone": LINK}, "across": LINK}
"""What the router is given of links: how fast they are while they are well."""

FLAGS = ("--router-links", msgspec.json.encode(LINKS).decode())
PATIENT = {"KVROUTER_DEAD_AFTER_S": "30", "KVROUTER_HELLO_WITHIN_S": "30"}
"""Settings of all processes: next to three engines on a busy machine one may be silent for seconds."""

BY_TIME = ("--router-cost", "time", *FLAGS)

FAR_LINK = f"zone={ZONES[PREFILL]} to zone={ZONES[FAR]}"
"""What the router calls the link to the far engine."""

PROMPT_TOKENS = (1000, 1500, 2200, 3000, 3600)
AT_A_TIME = 3
ANSWER_TOKENS = 4
LOOKED_AT_S = 0.5
WARM_UP = 6
REQUESTS = 60
WELL_WITHIN_S = 420.0
"""Every two minutes halve what is known of a link that carries nothing: after this it is tried again."""


class Answer(msgspec.Struct, frozen=True):
    """One request: when its answer came (Unix time), who decoded it, and how long its first token took."""

    at_s: float
    status: int
    decode_worker: int
    ttft_s: float
    error: str = ""
    """What was answered instead."""

    @property
    def is_whole(self) -> bool:
        """Whether it was answered."""
        return self.status == httpx.codes.OK and not self.error


class Fetched(msgspec.Struct, frozen=True):
    """What one engine fetched in a phase, by its own count."""

    transfers: int
    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float | None:
        """How fast KV travelled; None where it carried none."""
        return self.bytes / self.seconds if self.seconds > 0.0 else None


class Phase(msgspec.Struct, frozen=True):
    """Requests while the far link has one rate."""

    name: str
    far_mbit: float
    requests: int
    answered: int
    errors: list[str]
    """What the others were answered."""
    seconds: float
    far_share: float
    """Of the answers, those that the engine behind the far link decoded."""
    far_share_second_half: float
    ttft_ms_mean: float
    ttft_ms_median: float
    ttft_ms_p90: float
    ttft_ms_median_near: float | None
    ttft_ms_median_far: float | None
    engine_bytes_per_s: dict[str, float | None]
    """By engines' own counts in this phase."""
    engine_transfers: dict[str, int]
    learned: list[dict[str, Any]]
    """``links.learned`` of ``/v1/fleet`` at the end of the phase."""
    engine_sums: dict[str, Any] | None
    """``links.engines`` there."""


class Learned(msgspec.Struct, frozen=True):
    """What a frontend did that learns of links: while both are well, one is slow, and both are well again."""

    well: Phase
    slow: Phase
    well_again: Phase
    slow_metric: float
    """The highest ``kvrouter_link_slow`` of the far link in the slow phase: it may be well for a moment."""
    slow_after_s: float | None
    """From the moment when the link became slow to ``link_slow``."""
    slow_after_answers: int
    """Answers of the engine behind it meanwhile."""
    tried_again_after_s: float | None
    """From the moment when it was well again to the next answer of the engine behind it."""
    well_after_s: float | None
    """From that moment to ``link_well``."""
    log: list[str]
    """What the frontend's log said of links."""


class Outcome(msgspec.Struct, frozen=True):
    """All of it."""

    measured_at: str
    commit: Commit
    machine: Machine
    engines: str
    well_mbit: float
    slow_mbit: float
    prompt_tokens: tuple[int, ...]
    at_a_time: int
    kv_bytes_per_token: float
    blocks: tuple[Phase, Phase]
    """By --router-cost blocks, which learns nothing: both links well, and one slow."""
    time: Learned
    """By --router-cost time."""


class SlowLink:
    """The engines, their network, and the requests of a frontend's clients."""

    def __init__(self, network: ShapedNetwork, engines: Mapping[int, VllmServer]) -> None:
        self.network = network
        self.engines = engines
        self.far_mbit = WELL_MBIT
        self._numbers = count(1)

    async def set_far(self, rate_mbit: float) -> None:
        """The link to the far engine has this rate from now on."""
        self.far_mbit = rate_mbit
        await self.network.shape(STATIONS[FAR], rate_mbit)

    async def ask(self, frontend: Frontend) -> Answer:
        """Send a prompt that nobody has sent before, and read the answer."""
        number = next(self._numbers)
        body = {
            "model": MODEL,
            "prompt": prompt_of(number, PROMPT_TOKENS[number % len(PROMPT_TOKENS)]),
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        sent_s, first_s, error = time.monotonic(), None, ""
        async with frontend.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if first_s is None and line.startswith("data: {"):
                    first_s = time.monotonic()
                if '"error"' in line:
                    error = line
            now_s = time.monotonic()
            return Answer(
                at_s=time.time(),
                status=answer.status_code,
                decode_worker=int(answer.headers.get("x-kvrouter-decode-worker", 0)),
                ttft_s=(first_s or now_s) - sent_s,
                error=error,
            )

    async def ask_many(self, frontend: Frontend, n: int) -> list[Answer]:
        """So many of them, a few at a time, in the order of their answers."""
        left = iter(range(n))
        answers: list[Answer] = []

        async def client() -> None:
            for _ in left:
                answers.append(await self.ask(frontend))

        await asyncio.gather(*(client() for _ in range(AT_A_TIME)))
        return answers

    async def phase(self, name: str, frontend: Frontend, n: int) -> tuple[Phase, list[Answer]]:
        """So many requests, and what came of them."""
        before = {worker: await self.fetched(worker) for worker in (NEAR, FAR)}
        begun_s = time.monotonic()
        answers = await self.ask_many(frontend, n)
        seconds = time.monotonic() - begun_s
        after = {worker: await self.fetched(worker) for worker in (NEAR, FAR)}
        moved = {
            STATIONS[worker]: Fetched(
                after[worker].transfers - before[worker].transfers,
                after[worker].bytes - before[worker].bytes,
                after[worker].seconds - before[worker].seconds,
            )
            for worker in (NEAR, FAR)
        }
        ttft_ms = [1000 * answer.ttft_s for answer in answers]
        links = await links_of(frontend)
        return (
            Phase(
                name=name,
                far_mbit=self.far_mbit,
                requests=n,
                answered=sum(answer.is_whole for answer in answers),
                errors=[answer.error for answer in answers if not answer.is_whole],
                seconds=round(seconds, 1),
                far_share=round(far_share(answers), 3),
                far_share_second_half=round(far_share(answers[n // 2 :]), 3),
                ttft_ms_mean=round(statistics.mean(ttft_ms), 1),
                ttft_ms_median=round(statistics.median(ttft_ms), 1),
                ttft_ms_p90=round(statistics.quantiles(ttft_ms, n=10)[-1], 1),
                ttft_ms_median_near=_median_ms(answers, NEAR),
                ttft_ms_median_far=_median_ms(answers, FAR),
                engine_bytes_per_s={name: each.bytes_per_s for name, each in moved.items()},
                engine_transfers={name: each.transfers for name, each in moved.items()},
                learned=[] if links is None else links["learned"],
                engine_sums=None if links is None else links["engines"],
            ),
            answers,
        )

    async def fetched(self, worker: int) -> Fetched:
        """What a decode engine has fetched, by its own metrics."""
        page = await self._page(worker)
        return Fetched(
            int(_sample(page, "vllm:nixl_bytes_transferred_count")),
            int(_sample(page, "vllm:nixl_bytes_transferred_sum")),
            _sample(page, "vllm:nixl_xfer_time_seconds_sum"),
        )

    async def kv_bytes_per_token(self) -> float:
        """Bytes of KV of a prompt's token, by the near engine's metrics."""
        page = await self._page(NEAR)
        (tokens,) = (
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith("vllm:prompt_tokens_by_source_total") and "external_kv_transfer" in line
        )
        return (await self.fetched(NEAR)).bytes / tokens

    async def _page(self, worker: int) -> str:
        return (await self.engines[worker].http.get("/metrics")).raise_for_status().text


def prompt_of(number: int, n_tokens: int) -> list[int]:
    """Token ids that no other number begins with."""
    return [10 + (number * 7919 + place * 31 + place * place * number) % 1900 for place in range(n_tokens)]


def far_share(answers: list[Answer]) -> float:
    """The share of answers that the far engine decoded."""
    return sum(answer.decode_worker == FAR for answer in answers) / max(1, len(answers))


async def links_of(frontend: Frontend) -> dict[str, Any] | None:
    """What the frontend knows of links; None where it learns nothing of them."""
    (model,) = (await frontend.fleet())["models"]
    found: dict[str, Any] | None = model["links"]
    return found


@asynccontextmanager
async def slow_link(folder: Path) -> AsyncIterator[SlowLink]:
    """The engines, each at its station of a shaped network; all of it ends at the end."""
    async with shaped_network(*STATIONS.values()) as network:
        for worker in (NEAR, FAR):
            await network.shape(STATIONS[worker], WELL_MBIT)
        places = {worker: network.stations[name] for worker, name in STATIONS.items()}
        engines = {
            worker: VllmServer(
                folder, STATIONS[worker], core=CORES[worker], host=place.host, prefix=place.prefix
            )
            for worker, place in places.items()
        }
        async with stopped(engines):
            await asyncio.gather(
                *(
                    engine.start(
                        n_blocks=1200,
                        context_length=4096,
                        kv_transfer={
                            "kv_connector": "NixlConnector",
                            "kv_role": "kv_producer" if worker == PREFILL else "kv_consumer",
                            "kv_buffer_device": "cpu",
                            "kv_load_failure_policy": "fail",
                        },
                        kv_host=places[worker].kv_host,
                        kv_device=KV_DEVICE,
                    )
                    for worker, engine in engines.items()
                )
            )
            yield SlowLink(network, engines)


async def attach(here: SlowLink, kvrouter: Fleet) -> None:
    """Start the engines' workers, each in a zone of its own."""
    for worker, engine in here.engines.items():
        role = "prefill" if worker == PREFILL else "decode"
        await companion(kvrouter, engine, worker, "--role", role, "--domain", f"zone={ZONES[worker]}")


async def frontend_of(here: SlowLink, kvrouter: Fleet, *flags: str) -> Frontend:
    """A frontend that knows the engines."""
    frontend = await kvrouter.frontend(*flags)
    await until_feeds(frontend, dict.fromkeys(here.engines, "live"))
    return frontend


async def learn(here: SlowLink, kvrouter: Fleet) -> Learned:
    """A frontend under --router-cost time, while the far link is well, slow, and well again."""
    frontend = await frontend_of(here, kvrouter, *BY_TIME)
    await here.set_far(WELL_MBIT)
    await here.ask_many(frontend, WARM_UP)
    well, _ = await here.phase("well", frontend, REQUESTS)
    slow_from_s = time.time()
    await here.set_far(SLOW_MBIT)
    phase = asyncio.create_task(here.phase("slow", frontend, REQUESTS))
    slow_metric = 0.0
    while not phase.done():
        slow_metric = max(slow_metric, (await frontend.metrics()).total("link_slow", link=FAR_LINK))
        await asyncio.wait((phase,), timeout=LOOKED_AT_S)
    slow, answers = await phase
    slow_at_s = _said(frontend, "link_slow", slow_from_s)
    well_from_s = time.time()
    await here.set_far(WELL_MBIT)
    tried_at_s = well_at_s = None
    while well_at_s is None and time.time() < well_from_s + WELL_WITHIN_S:
        tries = [a.at_s for a in await here.ask_many(frontend, WARM_UP) if a.decode_worker == FAR]
        tried_at_s = tried_at_s or min(tries, default=None)
        well_at_s = _said(frontend, "link_well", well_from_s)
    well_again, _ = await here.phase("well again", frontend, REQUESTS)
    return Learned(
        well=well,
        slow=slow,
        well_again=well_again,
        slow_metric=slow_metric,
        slow_after_s=_since(slow_from_s, slow_at_s),
        slow_after_answers=sum(
            answer.decode_worker == FAR and slow_at_s is not None and answer.at_s <= slow_at_s
            for answer in answers
        ),
        tried_again_after_s=_since(well_from_s, tried_at_s),
        well_after_s=_since(well_from_s, well_at_s),
        log=[line for line in frontend.lines().splitlines() if " link_" in line],
    )


async def learn_nothing(here: SlowLink, kvrouter: Fleet) -> tuple[Phase, Phase]:
    """A frontend under --router-cost blocks, while the far link is well and slow."""
    frontend = await frontend_of(here, kvrouter, *FLAGS)
    await here.set_far(WELL_MBIT)
    await here.ask_many(frontend, WARM_UP)
    well, _ = await here.phase("well", frontend, REQUESTS)
    await here.set_far(SLOW_MBIT)
    slow, _ = await here.phase("slow", frontend, REQUESTS)
    await frontend.stop()
    return well, slow


async def measure(folder: Path) -> Outcome:
    """Measure all of it."""
    async with slow_link(folder) as here, fleet(PATIENT) as kvrouter:
        await attach(here, kvrouter)
        blocks = await learn_nothing(here, kvrouter)
        learned = await learn(here, kvrouter)
        return Outcome(
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=this_commit(),
            machine=this_machine(),
            engines=f"vLLM {VLLM} on CPU, NIXL {NIXL} over TCP",
            well_mbit=WELL_MBIT,
            slow_mbit=SLOW_MBIT,
            prompt_tokens=PROMPT_TOKENS,
            at_a_time=AT_A_TIME,
            kv_bytes_per_token=round(await here.kv_bytes_per_token(), 1),
            blocks=blocks,
            time=learned,
        )


def main() -> None:
    """Write what was measured."""
    parser = argparse.ArgumentParser(description="Measure a slow link between real engines; takes minutes.")
    parser.add_argument("-o", "--output", type=Path, default=RESULT, help="where to write it")
    output: Path = parser.parse_args().output
    with tempfile.TemporaryDirectory(prefix="kvrouter-slow-link-") as folder:
        outcome = asyncio.run(measure(Path(folder)))
    output.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n")
    print(f"slow link: written to {output}")


def _said(frontend: Frontend, event: str, since_s: float) -> float | None:
    """When the frontend's log first said so of the far link; None where it did not."""
    for line in frontend.lines().splitlines():
        if f" {event} " in line and f'link="{FAR_LINK}"' in line:
            at_s = datetime.fromisoformat(line.split()[0]).timestamp()
            if at_s >= since_s:
                return at_s
    return None


def _since(begun_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - begun_s, 1)


def _median_ms(answers: list[Answer], worker: int) -> float | None:
    found = [1000 * answer.ttft_s for answer in answers if answer.decode_worker == worker]
    return round(statistics.median(found), 1) if found else None


def _sample(page: str, name: str) -> float:
    (value,) = (float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))
    return value


if __name__ == "__main__":
    main()
