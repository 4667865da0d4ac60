"""A real SGLang server on CPU."""

import json
import os
from pathlib import Path

from tests.system.engines.install import HERE, engines_dir
from tests.system.engines.real_engine import MODEL, RealEngine
from tests.testing.sglang_cache import flush_cache

PAGE_SIZE = 16

_ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
}


class SglangServer(RealEngine):
    """Its ports are those of its calls, its KV events and their replay."""

    kind = "sglang"
    block_size = PAGE_SIZE
    n_ports = 3

    async def start(
        self,
        *,
        n_tokens: int = 4096,
        context_length: int = 2048,
        buffer_steps: int = 10_000,
        model: Path | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        """Start it and return once it answers; ``n_tokens`` is the room of its cache, and ``model`` the
        folder of another model than the tiny one.
        """
        home = engines_dir()
        command = [
            *(str(home / "venv" / "bin" / "python"), str(HERE / "sglang_launch.py")),
            *("--model-path", str(model or home / "model"), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self._ports[0]), "--device", "cpu"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--disable-cuda-graph", "--disable-overlap-schedule"),
            *("--page-size", str(PAGE_SIZE), "--max-total-tokens", str(n_tokens)),
            *("--context-length", str(context_length), "--enable-cache-report"),
            *("--kv-events-config", json.dumps(self._events_config(buffer_steps)), *flags),
        ]
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")},
            **_ENVIRON,
            "PYTHONPATH": str(home / "sglang"),
        }
        await self._run(command, environ)

    def _events_config(self, buffer_steps: int) -> dict[str, object]:
        return {
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{self._ports[1]}",
            "replay_endpoint": f"tcp://*:{self._ports[2]}",
            "buffer_steps": buffer_steps,
        }

    async def forget(self) -> None:
        """Empty its cache; it tells so at once."""
        await flush_cache(self.http)
