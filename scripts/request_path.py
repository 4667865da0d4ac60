"""Print which files a prompt's way runs through: from HTTP's first byte to its sent leg.

    python -m scripts.request_path

A frontend serves here, and a worker in its own process, over tcp. A file counts when one of its frames was
executed between the first byte of a chat completion and the write that sends its leg, in any thread of the
frontend. The first request warms up; of three more, those files count that all of them ran through: what
runs in the background, such as discovery, may be met by one of them.
"""

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

import aiohttp
import uvloop

import kvrouter
from kvrouter.cli.frontend.run import frontend
from kvrouter.core.ids import ModelName
from kvrouter.settings.sources import load_settings

HOME = Path(kvrouter.__file__).parent
FIRST_BYTE = ("frontend/http/protocol.py", "data_received")
OPENED = ("transports/requests/session.py", "open")
SENT = ("transports/requests/tcp/pipe.py", "flush")
READY_LIMIT_S = 60.0


class RequestPath:
    """Counts files with an executed frame between the first byte and the sent leg."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.is_armed = False
        self.is_done = False
        self._has_begun = False
        self._is_opened = False

    def again(self) -> None:
        """Begin to count another request."""
        self.files = {}
        self._has_begun = self._is_opened = self.is_done = False
        self.is_armed = True

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """A :func:`sys.setprofile` function."""
        if self.is_done or not self.is_armed:
            return
        path = frame.f_code.co_filename
        if not path.startswith(f"{HOME}/"):
            return
        name = path[len(str(HOME)) + 1 :]
        if event == "call":
            if (name, frame.f_code.co_name) == FIRST_BYTE:
                self._has_begun = True
            if self._has_begun:
                self.files[name] = None
            self._is_opened |= (name, frame.f_code.co_name) == OPENED
        elif event == "return" and self._is_opened and (name, frame.f_code.co_name) == SENT:
            self.is_done = True


async def walk(folder: str) -> RequestPath:
    """Return the path that three chat completions have in common, after one that warms up."""
    flags = {
        "frontend.http_host": "127.0.0.1",
        "frontend.http_port": "0",
        "planes.discovery": "file",
        "planes.discovery_dir": folder,
    }
    settings = load_settings(flags=flags, environ={}).settings
    path = RequestPath()
    threading.setprofile(path)  # for the threads that tokenize: they start with the frontend
    async with frontend(settings, {}) as app, aiohttp.ClientSession() as client:
        host, port = app.address
        url = f"http://{host}:{port}"
        model = await served_model(client, url)
        sys.setprofile(path)
        body = {"model": model, "messages": [{"role": "user", "content": "hello " * 64}], "max_tokens": 4}
        common: dict[str, None] | None = None
        for is_counted in (False, True, True, True):
            if is_counted:
                path.again()
            async with client.post(f"{url}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                await response.read()
            if is_counted:
                common = {name: None for name in path.files if common is None or name in common}
        sys.setprofile(None)
        path.files = common or {}
    threading.setprofile(None)
    return path


async def served_model(client: aiohttp.ClientSession, url: str) -> ModelName:
    """Wait until a model is served. Raises TimeoutError after READY_LIMIT_S seconds."""
    end = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < end:
        async with client.get(f"{url}/v1/models") as response:
            models = (await response.json())["data"]
        if models:
            return ModelName(models[0]["id"])
        await asyncio.sleep(0.1)
    raise TimeoutError("no worker registered")


def main() -> None:
    """Run a worker and a frontend, and print the files."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvrouter.cli", "worker", "mock"]
        command += ["--discovery", "file", "--discovery-dir", folder, "--log-level", "error"]
        worker = subprocess.Popen(command)
        try:
            path = uvloop.run(walk(folder))
        finally:
            worker.terminate()
            worker.wait()
    for name in path.files:
        print(name)
    print(f"{len(path.files)} files from HTTP's first byte to the sent leg")


if __name__ == "__main__":
    main()
