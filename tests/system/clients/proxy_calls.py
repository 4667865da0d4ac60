"""Calls through LiteLLM's proxy in front of kvrouter, by OpenAI's package; run by the clients' own Python.

    python proxy_calls.py URL MODEL FOLDER

Starts the proxy of ``FOLDER`` with a configuration, as its users do, and prints what ``calls.py`` prints.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

URL, MODEL, FOLDER = sys.argv[1:]
KEY = f"sk-{secrets.token_hex(32)}"
CHAT: Any = [{"role": "user", "content": "Where is my cache?"}]
STARTS_WITHIN_S = 240.0

CONFIG = f"""
model_list:
  - model_name: served
    litellm_params: {{model: openai/{MODEL}, api_base: "{URL}/v1", api_key: none}}
  - model_name: absent
    litellm_params: {{model: openai/absent, api_base: "{URL}/v1", api_key: none}}
general_settings: {{master_key: {KEY}}}
router_settings: {{num_retries: 0, disable_cooldowns: true}}
"""


@contextmanager
def proxy() -> Iterator[openai.OpenAI]:
    """The proxy's process, ready, and a client of it."""
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "config.yaml"), Path(folder, "log")
        config.write_text(CONFIG, "utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [str(Path(FOLDER, "proxy", "bin", "litellm")), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else prices are downloaded
        with (
            log.open("w") as lines,
            subprocess.Popen(command, stdout=lines, stderr=subprocess.STDOUT, env=environment) as running,
        ):
            try:
                wait_ready(running, f"http://127.0.0.1:{port}/health/liveliness", log)
                yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
            finally:
                running.terminate()


def wait_ready(running: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    until_s = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < until_s and running.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise RuntimeError(f"LiteLLM's proxy did not start: {log.read_text('utf-8', 'replace')[-2000:]}")


def whole_chat(client: openai.OpenAI) -> object:
    answer = client.chat.completions.create(model="served", messages=CHAT, max_tokens=8)
    return answer.choices[0].message.content


def streamed_chat(client: openai.OpenAI) -> object:
    events = client.chat.completions.create(model="served", messages=CHAT, max_tokens=8, stream=True)
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def whole_response(client: openai.OpenAI) -> object:
    answer = client.responses.create(model="served", input="Where is my cache?", max_output_tokens=16)
    return answer.output_text


def status_of_errors(client: openai.OpenAI) -> object:
    """A model that kvrouter does not know, and a value that it or its engine refuses."""
    statuses = []
    for model, max_tokens in (("absent", 8), ("served", -1)):
        try:
            client.chat.completions.create(model=model, messages=CHAT, max_tokens=max_tokens)
        except openai.APIStatusError as error:
            statuses.append(error.status_code)
    if statuses != [404, 400]:
        raise ValueError(f"not 404 and 400: {statuses}")
    return statuses


CALLS: list[tuple[str, Callable[[openai.OpenAI], object]]] = [
    ("chat", whole_chat),
    ("chat, streamed", streamed_chat),
    ("responses", whole_response),
    ("status of errors", status_of_errors),
]

with proxy() as through:
    for what, call in CALLS:
        try:
            failed = None if call(through) else "an empty answer"
        except Exception as error:  # noqa: BLE001 - the table has whatever it is
            failed = f"{type(error).__name__}: {error}"
        print(json.dumps({"client": "LiteLLM's proxy", "what": what, "failed": failed}), flush=True)
