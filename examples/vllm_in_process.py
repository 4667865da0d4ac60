"""vLLM in the worker's own process: its AsyncLLM answers, its KV events are published, and it is registered.

It runs where vLLM and kvrouter are installed, and takes vLLM's own flags; kvrouter's settings come from the
environment::

    DYN_DISCOVERY_BACKEND=file python examples/vllm_in_process.py --model /models/my-model
    kvrouter frontend --discovery file
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import KVEventsConfig, ModelConfig, VllmConfig
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from kvrouter import ModelInput, ModelType, register_llm
from kvrouter.app.worker_transports import open_worker_transports
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Sampling
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.engines.kv_events.engine_events import EngineTraits
from kvrouter.engines.kv_events.listener import EngineListener, EventsAt
from kvrouter.engines.vllm.events import decode
from kvrouter.settings.sources import load_settings
from kvrouter.transports.requests.port import StreamBroken
from kvrouter.worker import KvPublisher, new_incarnation

WORKER_ID = WorkerId(1)
RANK = DpRank(0)
HEARTBEAT_S = 5.0
DRAIN_LIMIT_S = 30.0

FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}


def sampling_params(sampling: Sampling) -> SamplingParams:
    """What vLLM is asked for: tokens alone, as they come. Text is made at the frontend."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


class Answer:
    """vLLM's answer to one leg, chunk by chunk."""

    def __init__(self, llm: AsyncLLM, request: EngineRequest) -> None:
        self._llm = llm
        self._request_id = request.engine_key
        prompt = tokens_input(list(request.token_ids), cache_salt=request.cache_namespace)
        self._outputs: AsyncIterator[RequestOutput] = llm.generate(
            prompt, sampling_params(request.sampling), self._request_id
        )
        self._is_first = True
        self._aborting: asyncio.Task[None] | None = None

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> EngineChunk:
        if self._aborting is not None and self._is_first:  # it was never asked for
            return EngineChunk(finish=FinishReason.CANCELLED)
        try:
            output = await anext(self._outputs)
        except EngineDeadError as error:
            raise StreamBroken(f"vLLM is gone: {error}") from error
        (sample,) = output.outputs
        cached_tokens = output.num_cached_tokens if self._is_first else None
        self._is_first = False
        finish = (
            None if sample.finish_reason is None else FINISHES.get(sample.finish_reason, FinishReason.ERROR)
        )
        return EngineChunk(token_ids=tuple(sample.token_ids), finish=finish, cached_tokens=cached_tokens)

    def cancel(self, reason: str) -> None:  # noqa: ARG002 - vLLM takes no reason
        """The reader left: vLLM stops, and frees what the request holds."""
        if self._aborting is None:
            self._aborting = asyncio.get_running_loop().create_task(self._llm.abort(self._request_id))


class VllmEngine:
    """Takes the legs that routers send."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def submit(self, request: EngineRequest) -> Answer:
        """Take a leg; vLLM is asked with the first read."""
        return Answer(self._llm, request)


class Loads:
    """What vLLM counts after each step, for the publisher; one of vLLM's own loggers of statistics."""

    publisher: KvPublisher | None = None

    def __init__(self, config: VllmConfig, engine_index: int = 0) -> None:
        self._config = config
        self._engine_index = engine_index

    def record(self, scheduler_stats: SchedulerStats | None, *_args: object, **_kwargs: object) -> None:
        """Publish the load; only the latest report matters."""
        total_blocks = self._config.cache_config.num_gpu_blocks
        if scheduler_stats is None or Loads.publisher is None or not total_blocks:
            return
        Loads.publisher.publish_load(
            active_blocks=round(scheduler_stats.kv_cache_usage * total_blocks),
            total_blocks=total_blocks,
            running_requests=scheduler_stats.num_running_reqs,
            waiting_requests=scheduler_stats.num_waiting_reqs,
            dp_rank=DpRank(self._engine_index),
        )

    def log_engine_initialized(self) -> None:
        """Nothing is reported before the first step."""

    def log(self) -> None:
        """Nothing is written."""

    def record_sleep_state(self, *_args: object) -> None:
        """The caller that puts an engine to sleep takes it out of the fleet."""


@asynccontextmanager
async def in_fleet(llm: AsyncLLM, events_at: EventsAt) -> AsyncIterator[str]:
    """Serve, publish, register: inside, routers use the engine. Gives the name of its model."""
    model, cache = llm.vllm_config.model_config, llm.vllm_config.cache_config
    settings = load_settings(flags={}, environ=os.environ).settings
    async with open_worker_transports(
        settings, component="backend", has_local_indexer=False, publishes_kv_events=True
    ) as transports:
        incarnation = new_incarnation()
        publisher = KvPublisher(
            transports.events, worker_id=WORKER_ID, epoch=incarnation, block_size=cache.block_size
        )
        transports.recovery.serve_recovery(WORKER_ID, publisher)
        listener = EngineListener(
            events_at,
            decode,
            EngineTraits(block_size=cache.block_size, dp_rank=RANK),
            on_events=publisher.publish,
            on_change=print,
        )
        listener.start()
        Loads.publisher = publisher
        address = transports.requests.address_of(WORKER_ID, incarnation)
        registration = transports.requests.serve(address, VllmEngine(llm))
        await registration.served()
        card = await register_llm(
            transports.discovery,
            worker_id=WORKER_ID,
            model=served_name(model),
            model_input=ModelInput.Tokens,
            model_type=ModelType.Chat | ModelType.Completions,
            address=address,
            block_size=cache.block_size,
            context_length=model.max_model_len,
            namespace=settings.planes.namespace,
            event_source=transports.events.source,
            tokenizer=tokenizer_of(model),
            runtime_config=ModelRuntimeConfig(total_kv_blocks=cache.num_gpu_blocks),
            incarnation=incarnation,
        )
        beating = asyncio.create_task(beat(publisher))
        try:
            yield card.model
        finally:
            await transports.discovery.withdraw(card.worker_id, card.incarnation)
            await registration.wait_idle(DRAIN_LIMIT_S)
            registration.leave("the program ends")
            beating.cancel()
            Loads.publisher = None
            listener.stop()
            publisher.close()


async def beat(publisher: KvPublisher) -> None:
    """Let routers notice when the last events were lost on their way."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        publisher.heartbeat([RANK])


def served_name(model: ModelConfig) -> str:
    """What clients call the model."""
    name = model.served_model_name
    return name if isinstance(name, str) else name[0]


def tokenizer_of(model: ModelConfig) -> str | None:
    """The folder for frontends on this host, where vLLM loaded the model from one."""
    folder = Path(model.tokenizer)
    return str(folder.resolve()) if folder.is_dir() else None


async def main(args: AsyncEngineArgs) -> None:
    """Load the model, and serve until a signal to stop."""
    with tempfile.TemporaryDirectory(prefix="vllm-events-") as sockets:
        events_at = EventsAt(f"ipc://{sockets}/events", f"ipc://{sockets}/replay")
        args.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=events_at.events,
            replay_endpoint=events_at.replay,
        )
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[Loads])
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        try:
            async with in_fleet(llm, events_at) as model:
                print(f"vLLM serves {model} in the fleet", flush=True)
                await stopping.wait()
        finally:
            llm.shutdown()


if __name__ == "__main__":
    flags = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
    asyncio.run(main(AsyncEngineArgs.from_cli_args(flags)))
