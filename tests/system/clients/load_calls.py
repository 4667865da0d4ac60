"""Short runs of load generators: aiperf and inference-perf, each in its own Python.

    python load_calls.py URL MODEL FOLDER TOKENIZER

``TOKENIZER`` is a folder with a tokenizer: both count tokens themselves, and would else download one. Prints
what ``calls.py`` prints.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL, MODEL, FOLDER, TOKENIZER = sys.argv[1:]
REQUESTS = 8
RUN_S = 280.0


def run(command: list[str], **environment: str) -> None:
    """Run a program to its end. Raises RuntimeError with its last words."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:])


def aiperf(folder: Path) -> None:
    """Chats, streamed; it reads the metrics of the server too."""
    program = str(Path(FOLDER, "aiperf", "bin", "aiperf"))
    run(
        [
            *(program, "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", TOKENIZER, "--request-count", str(REQUESTS), "--concurrency", "2"),
            *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
            *("--artifact-dir", str(folder), "--ui-type", "none", "--random-seed", "1"),
        ]
    )


def aiperf_chats(folder: Path) -> None:
    aiperf(folder)
    said: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text("utf-8"))
    if said["request_count"]["avg"] != REQUESTS or said["error_summary"]:
        raise ValueError(f"{said['request_count']} {said['error_summary']}")


def aiperf_metrics(folder: Path) -> None:
    """Of the run before."""
    page = (folder / "server_metrics_export.json").read_text("utf-8")
    if "kvrouter_requests" not in page:
        raise ValueError("no metric of kvrouter in what it read of the server")


def inference_perf(folder: Path, api: str, *, streams: bool) -> None:
    prompts = {
        "num_groups": 2,
        "num_prompts_per_group": REQUESTS // 2,
        "system_prompt_len": 32,
        "question_len": 16,
        "output_len": 8,
    }
    config = {
        "api": {"type": api, "streaming": streams},
        "data": {"type": "shared_prefix", "shared_prefix": prompts},
        "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": 4, "duration": REQUESTS // 4}]},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": URL, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": TOKENIZER},
        "storage": {"local_storage": {"path": str(folder / "report")}},
    }
    (folder / "config.yaml").write_text(json.dumps(config), "utf-8")  # JSON is YAML
    program = str(Path(FOLDER, "inference-perf", "bin", "inference-perf"))
    run([program, "--config_file", str(folder / "config.yaml")], HF_HUB_OFFLINE="1")
    summary = (folder / "report" / "summary_lifecycle_metrics.json").read_text("utf-8")
    said: dict[str, Any] = json.loads(summary)
    if said["successes"]["count"] != REQUESTS or said["failures"]["count"]:
        raise ValueError(f"{said['successes']['count']} of {REQUESTS}; {said['failures']}")


CALLS: list[tuple[str, str, Callable[[Path], None]]] = [
    ("aiperf", "chat, streamed", aiperf_chats),
    ("aiperf", "metrics of the server", aiperf_metrics),
    ("inference-perf", "chat, streamed", lambda folder: inference_perf(folder, "chat", streams=True)),
    ("inference-perf", "completions", lambda folder: inference_perf(folder, "completion", streams=False)),
]

with tempfile.TemporaryDirectory() as results:
    for client, what, call in CALLS:
        place = Path(results, client if client == "aiperf" else f"{client} {what}")
        place.mkdir(exist_ok=True)
        failed = None
        try:
            call(place)
        except Exception as error:  # noqa: BLE001 - the table has whatever it is
            failed = f"{type(error).__name__}: {error}"
        print(json.dumps({"client": client, "what": what, "failed": failed}), flush=True)
