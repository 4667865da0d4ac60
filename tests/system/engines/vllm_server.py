"""A real vLLM server on CPU."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.system.engines.install import NIXL_WAIT, engines_dir, previous_dir
from tests.system.engines.real_engine import MODEL, RealEngine

BLOCK_SIZE = 32
"""The smallest block of vLLM on CPUs."""

ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "",
    "UCX_TLS": "tcp,self",
}

WAITING = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", NIXL_WAIT: "10000"}
"""Lets NIXL's thread wait, and the model run without a process of its own, which polls for a second after
each step.
"""


def nixl(role: str) -> dict[str, object]:
    """What makes an engine hand KV over, as ``kv_producer`` or ``kv_consumer``."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }


class VllmServer(RealEngine):
    """Its ports are those of its calls, its KV events, their replay and the handoffs. With no core of its own
    its threads wait instead of poll.
    """

    kind = "vllm"
    block_size = BLOCK_SIZE
    n_ports = 4

    async def start(
        self,
        *,
        n_blocks: int = 200,
        context_length: int = 2048,
        kv_events: bool = True,
        buffer_steps: int = 10_000,
        hash_seed: str = "0",
        kv_transfer: Mapping[str, object] | None = None,
        kv_host: str = "127.0.0.1",
        kv_device: str = "lo",
        model: Path | None = None,
        is_previous: bool = False,
        flags: tuple[str, ...] = (),
    ) -> None:
        """Start it and return once it answers. KV travels over ``kv_device``, which has ``kv_host``.
        ``model``: the folder of another model than the tiny one. ``is_previous``: of the version before.
        """
        home = engines_dir()
        command = [
            *(str(home / "venv" / "bin" / "vllm"), "serve", str(model or home / "model")),
            *("--served-model-name", MODEL, "--host", self.host, "--port", str(self._ports[0])),
            *("--dtype", "bfloat16", "--max-model-len", str(context_length)),
            *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(n_blocks)),
            *("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--prefix-caching-hash-algo", "sha256_cbor", *flags),
        ]
        if self._core is None:
            command += ["--distributed-executor-backend", "uni"]
        if kv_events:
            command += ["--kv-events-config", json.dumps(self._events_config(buffer_steps))]
        if kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(kv_transfer)]
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            **ENVIRON,
            **(WAITING if self._core is None else {}),
            **({"PYTHONPATH": str(previous_dir(home))} if is_previous else {}),
            "PYTHONHASHSEED": hash_seed,
            "VLLM_RPC_BASE_PATH": str(self._folder),
            "UCX_NET_DEVICES": kv_device,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": kv_host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._ports[3]),
        }
        await self._run(command, environ)

    def _events_config(self, buffer_steps: int) -> dict[str, object]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{self._ports[1]}",
            "replay_endpoint": f"tcp://*:{self._ports[2]}",
            "buffer_steps": buffer_steps,
        }

    async def forget(self) -> None:
        """Empty its cache, and let it tell so: it does with its next step."""
        (await self.http.post("/reset_prefix_cache")).raise_for_status()
        await self.complete([9, 9, 9], max_tokens=1)
