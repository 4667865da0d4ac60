"""A real vLLM server as a process of its own, on CPU, with the tiny model."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.engines.install import VARIABLE, engines_dir
from tests.support.processes import free_ports

READY_WITHIN_S = 300.0
ENDS_WITHIN_S = 60.0
MODEL = "tiny"
BLOCK_SIZE = 32
"""The smallest block of vLLM on CPUs."""

_ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
}


class VllmServer:
    """One server. ``core`` pins it: its threads poll, and two on one core starve each other."""

    def __init__(self, folder: Path, name: str, *, core: int) -> None:
        self.name = name
        self._folder = folder
        self._core = core
        first = free_ports(4)
        self._port, self._events, self._replay, self._side = range(first, first + 4)
        self._process: Process | None = None
        self.http = httpx.AsyncClient(base_url=self.url, timeout=120.0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(
        self,
        *,
        n_blocks: int = 200,
        context_length: int = 2048,
        kv_events: bool = True,
        buffer_steps: int = 10_000,
        hash_seed: str = "0",
        kv_transfer: Mapping[str, object] | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        """Start it and return once it answers."""
        home = engines_dir()
        assert (home / "model.installed").is_file(), f"make test-engines installs the engines ({VARIABLE})"
        command = [
            *("taskset", "--cpu-list", str(self._core)),
            *(str(home / "venv" / "bin" / "vllm"), "serve", str(home / "model")),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "bfloat16", "--max-model-len", str(context_length)),
            *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(n_blocks)),
            *("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--prefix-caching-hash-algo", "sha256_cbor", *flags),
        ]
        if kv_events:
            command += ["--kv-events-config", json.dumps(self._events_config(buffer_steps))]
        if kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(kv_transfer)]
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            **_ENVIRON,
            "PYTHONHASHSEED": hash_seed,
            "VLLM_RPC_BASE_PATH": str(self._folder),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side),
        }
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        async with asyncio.timeout(READY_WITHIN_S):
            while not await self._answers():
                assert self._process.returncode is None, self.log.read_text(errors="replace")[-4000:]
                await asyncio.sleep(0.25)  # nothing but its answer tells that it is there

    def _events_config(self, buffer_steps: int) -> dict[str, object]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{self._events}",
            "replay_endpoint": f"tcp://*:{self._replay}",
            "buffer_steps": buffer_steps,
        }

    async def _answers(self) -> bool:
        try:
            return (await self.http.get("/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def ask(self, path: str, **body: object) -> Any:
        """Send a call that is not streamed; return its answer."""
        answer = await self.http.post(path, json={"model": MODEL, **body})
        return answer.raise_for_status().json()

    async def complete(self, prompt: str | list[int], **body: object) -> Any:
        """A greedy completion."""
        return await self.ask("/v1/completions", prompt=prompt, temperature=0, **body)

    async def reset_prefix_cache(self) -> None:
        """Empty its cache; it tells so with its next step."""
        (await self.http.post("/reset_prefix_cache")).raise_for_status()

    async def kill(self) -> None:
        """End all of its processes at once, as by ``kill -9``."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """End it in good order, and what remains of it."""
        await self._end(signal.SIGTERM)
        await self.http.aclose()

    async def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        if process.returncode is None:
            os.killpg(process.pid, how)
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
