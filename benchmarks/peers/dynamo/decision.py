"""The whole decision: ``SelectionService``, its index filled through ``/dump``, its load by reservations."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from benchmarks.measure import settle, time_awaits
from benchmarks.peers.dynamo.core import Core, Json, SelectionService, load_core, make_publisher
from benchmarks.side import Facts, Params
from benchmarks.workload import BLOCK_SIZE, DecisionLoad, hashes_of

MODEL = "bench"
SAMPLED_PROMPTS = 8


class Deciding:
    """``decide, list`` and ``decide, book and free, list``, from tokens in a list."""

    def __init__(self, params: Params) -> None:
        self._load = DecisionLoad(**params)
        self._core: Core = load_core()
        self._service: SelectionService = self._core.SelectionService(indexer_threads=4)
        self._events = make_publisher()
        self._next = 0

    async def prepare(self) -> Facts:
        """Workers that listen to one silent publisher, then held blocks, then running requests."""
        port = self._events.bind_to_random_port("tcp://127.0.0.1")
        for worker in range(self._load.n_workers):
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": MODEL,
                    "block_size": BLOCK_SIZE,
                    "endpoint": f"http://127.0.0.1:9/{worker}",
                    "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                    "total_kv_blocks": 1_000_000,
                    "max_num_batched_tokens": 8192,
                }
            )
        with _answering(self._dump()) as url:
            if not await self._service.recover_indexer_from_peers([url]):
                raise RuntimeError("the selector did not take the dump")
        for number, running in enumerate(self._load.running()):
            await self._service.create_reservation(
                {
                    "model_name": MODEL,
                    "selection_id": f"running-{number}",
                    "worker_id": running.worker,
                    "dp_rank": 0,
                    "token_ids": running.tokens.tolist(),
                    "effective_prefill_tokens": running.prefill_tokens,
                }
            )
        settle()
        return {"overlap": await self._overlap(), "load": self._loads()}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        first, self._next = self._next, self._next + n_calls

        def request(i: int) -> Json:
            return self.request(first + i)

        if variant == "decide, list":
            return await time_awaits(request, self._service.select, n_calls)
        if variant == "decide, book and free, list":
            return await time_awaits(request, self.place_and_release, n_calls)
        raise KeyError(variant)

    async def close(self) -> None:
        self._service.shutdown()
        self._events.close()

    async def place_and_release(self, request: Json) -> None:
        """Decide, book, and free what was booked."""
        await self._service.select_and_reserve(request)
        await self._service.free_reservation(str(request["selection_id"]))

    def request(self, number: int) -> Json:
        """Return request ``number``."""
        return {
            "model_name": MODEL,
            "selection_id": f"bench-{number}",
            "token_ids": self._load.prompt(number).tolist(),
        }

    def _dump(self) -> bytes:
        """What a peer would answer: every held block, as events."""
        hash_tokens = self._core.compute_block_hash_for_seq
        prefixes = [
            hash_tokens(self._load.prefix(prefix).tolist(), BLOCK_SIZE)
            for prefix in range(self._load.n_prefixes)
        ]
        events = []
        for held in self._load.held():
            names = hashes_of(self._load.names(held))
            events.append(_stored(held.worker, names, prefixes[held.prompt][: held.n_blocks]))
        events.extend(
            _stored(run.worker, hashes_of(run.engine_hashes), hashes_of(run.block_hashes))
            for run in self._load.others()
        )
        return json.dumps({f"{MODEL}:default": {"block_size": BLOCK_SIZE, "events": events}}).encode()

    async def _overlap(self) -> list[list[int]]:
        found = []
        for number in range(SAMPLED_PROMPTS):
            request = self.request(number)
            answer = await self._service.overlap_scores(request)
            blocks = {worker["worker_id"]: worker["device_blocks"] for worker in answer["workers"]}
            found.append([blocks.get(worker, 0) for worker in range(self._load.n_workers)])
        return found

    def _loads(self) -> list[list[int]]:
        (model,) = self._service.loads()
        loads = {
            load["worker_id"]: [load["potential_prefill_tokens"], load["potential_decode_blocks"]]
            for load in model["loads"]
        }
        return [loads[worker] for worker in range(self._load.n_workers)]


def _stored(worker: int, names: Sequence[int], own: Sequence[int]) -> Json:
    blocks = [
        {"block_hash": name, "tokens_hash": block, "mm_extra_info": None}
        for name, block in zip(names, own, strict=True)
    ]
    stored = {"parent_hash": None, "start_position": None, "blocks": blocks}
    return {
        "worker_id": worker,
        "storage_tier": "device",
        "residency_domain": "worker",
        "event": {"event_id": 0, "data": {"stored": stored}, "dp_rank": 0},
    }


@contextmanager
def _answering(body: bytes) -> Iterator[str]:
    """Serve ``body`` to every GET on a port of its own; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
