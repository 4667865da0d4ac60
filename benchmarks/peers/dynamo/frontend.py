"""Dynamo's own frontend before its own mock engines: files for discovery, tcp for requests."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frontend.processes import Server, gateway, in_background
from kvrouter.text.source import MOCK_FOLDER
from tests.testing.processes import free_ports

WORKERS = 2
BLOCK_SIZE = 16
CONTEXT_TOKENS = 131_072
STEP_MS = {1: 6.0, 32: 7.0, 256: 15.0}
"""What a decode step of its mock engines takes with so many streams, by their formula: about."""


@dataclass(frozen=True, slots=True)
class DynamoFrontend:
    """``python`` is the interpreter that has ``ai-dynamo`` and its runtime."""

    python: Path
    name: str = "dynamo frontend"

    @contextmanager
    def start(self, tick_s: float, streams: int) -> Iterator[Server]:
        """Run it before two engines that bring ``streams`` streams a token about every ``tick_s`` seconds.

        Their tokenizer is the folder that ours has.
        """
        with tempfile.TemporaryDirectory(prefix="kvrouter-bench-dynamo-") as folder:
            model, store = Path(folder) / "model", Path(folder) / "store"
            shutil.copytree(MOCK_FOLDER, model)
            (model / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
            environ = {"DYN_FILE_KV": str(store)}
            planes = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
            mocker = (
                *(
                    str(self.python),
                    "-m",
                    "dynamo.mocker",
                    "--model-path",
                    str(model),
                    "--model-name",
                    "mock",
                ),
                *("--num-workers", str(WORKERS), "--block-size", str(BLOCK_SIZE)),
                *("--decode-speedup-ratio", f"{STEP_MS[streams] / 1000 / tick_s:.3f}"),
                *planes,
            )
            port = free_ports(1)
            frontend = (
                *(str(self.python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1"),
                *("--http-port", str(port), "--router-mode", "kv", *planes),
            )
            with in_background(mocker, environ), gateway(self.name, frontend, port, environ) as server:
                yield server


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": CONTEXT_TOKENS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "eos_token_id": 0,
}
