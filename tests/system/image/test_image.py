"""The image as built: what it holds, as whom it runs, and that it serves."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.repo.test_lock import lock
from tests.system.image.install import IMAGE, buildah
from tests.testing.processes import ENDS_WITHIN_S, READY_WITHIN_S


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    name = subprocess.run(buildah("from", IMAGE), capture_output=True, text=True, check=True).stdout.strip()
    yield name
    subprocess.run(buildah("rm", name), capture_output=True, check=True)


def in_it(container: str, *command: str) -> list[str]:
    return buildah("run", "--isolation", "chroot", container, "--", *command)


def written(container: str, *command: str) -> str:
    return subprocess.run(in_it(container, *command), capture_output=True, text=True, check=True).stdout


def test_the_image_has_exactly_the_locked_packages_and_kvrouter(container: str) -> None:
    listing = (
        "from importlib.metadata import distributions as d; print(*(f'{e.name}=={e.version}' for e in d()))"
    )
    found = dict(each.split("==") for each in written(container, "python", "-c", listing).split())
    version = found.pop("kvrouter")
    named = {re.sub(r"[-_.]+", "-", name).lower(): locked for name, locked in found.items()}
    assert named == {name: entry.version for name, entry in lock("image.txt").items()}
    assert written(container, "kvrouter", "--version") == f"kvrouter {version}\n"


def test_the_image_runs_unprivileged_without_write_access(container: str) -> None:
    script = "import os; print(os.getuid(), os.getgid(), os.access('/opt/kvrouter', os.W_OK))"
    assert written(container, "python", "-c", script).split() == ["65532", "65532", "False"]
    config = json.loads(subprocess.run(buildah("inspect", IMAGE), capture_output=True, check=True).stdout)
    assert config["OCIv1"]["config"]["Entrypoint"] == ["kvrouter"]


def test_the_image_serves_a_chat(container: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with subprocess.Popen(in_it(container, "kvrouter", "up", "--http-port", str(port))) as served:
        try:
            call = {"model": "mock", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
            answer = posted(f"http://127.0.0.1:{port}/v1/chat/completions", call)
            assert answer.json()["usage"]["completion_tokens"] == 3
        finally:
            served.terminate()
            served.wait(ENDS_WITHIN_S)


def posted(url: str, call: object) -> httpx.Response:
    """The answer, once the process listens."""
    until_s = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            return httpx.post(url, json=call, timeout=READY_WITHIN_S).raise_for_status()
        except httpx.HTTPError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)
