"""A model's tokenizer by the name of its Hugging Face repository, from a hub on this host and its cache."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from kvrouter.text.source import DOWNLOAD_MAX_BYTES, MOCK_FOLDER
from tests.testing.asyncio_servers import port_of, serving
from tests.testing.processes import fleet, run_kvrouter
from tests.testing.tokenizer_files import write_tiktoken

REPOSITORY = "acme/small"
FILES = {path.name: path.read_bytes() for path in MOCK_FOLDER.iterdir() if path.name.endswith(".json")}
WEIGHTS = {"model.safetensors": b"weights"}
FLEET = """\
version: 1
models: [{{name: m, tokenizer: {tokenizer}}}]
workers: [{{name: w}}]
"""


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class LocalHub:
    """``url`` is what ``HF_ENDPOINT`` is to be; ``asked`` has the paths that clients asked for."""

    repository: str
    files: Mapping[str, bytes]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    claimed_bytes: int | None = None
    """What the hub says that each file has, instead of the truth."""

    async def _info(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.match_info["name"] != self.repository:
            return web.json_response(
                {"error": "Repository not found"}, status=404, headers={"X-Error-Code": "RepoNotFound"}
            )
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        return web.json_response(
            {
                "_id": "1",
                "id": self.repository,
                "modelId": self.repository,
                "sha": COMMIT,
                "siblings": siblings,
            }
        )

    async def _tree(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return web.json_response(
            [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data) if self.claimed_bytes is None else self.claimed_bytes,
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in self.files.items()
            ]
        )

    async def _file(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        data = self.files.get(request.match_info["file"])
        if data is None or request.match_info["name"] != self.repository:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if request.method == "HEAD":
            size = len(data) if self.claimed_bytes is None else self.claimed_bytes
            return web.Response(headers={**headers, "Content-Length": str(size)})
        return web.Response(body=data, headers=headers)


@asynccontextmanager
async def local_hub(
    repository: str, files: Mapping[str, bytes], *, claimed_bytes: int | None = None
) -> AsyncIterator[LocalHub]:
    """Serve ``repository`` with these files on a free port."""
    hub = LocalHub(repository, files, claimed_bytes=claimed_bytes)
    app = web.Application()
    app.router.add_get("/api/models/{name:[^/]+/[^/]+}/revision/{revision}", hub._info)
    app.router.add_get("/api/models/{name:[^/]+/[^/]+}/tree/{revision}", hub._tree)
    app.router.add_get("/{name:[^/]+/[^/]+}/resolve/{revision}/{file:.+}", hub._file)
    async with serving(app) as server:
        hub.url = f"http://127.0.0.1:{port_of(server)}"
        yield hub


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody whose Hugging Face cache is empty."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_HOME": str(tmp_path / "hf"),
    }


async def check(
    path: Path, tokenizer: str, environ: Mapping[str, str], hub: LocalHub | None, **more: str
) -> tuple[int, str]:
    """Run ``kvrouter fleet check``; return its exit code and what it printed."""
    await asyncio.to_thread(path.write_text, FLEET.format(tokenizer=tokenizer))
    endpoint = {} if hub is None else {"HF_ENDPOINT": hub.url}
    return await run_kvrouter("fleet", "check", str(path), environ={**environ, **endpoint, **more})


async def test_a_repository_is_downloaded_once_and_without_its_weights(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    path = tmp_path / "fleet.yaml"
    async with local_hub(REPOSITORY, {**FILES, **WEIGHTS}) as hub:
        assert await check(path, REPOSITORY, environ, hub) == (
            0,
            f"{path}: good: 1 worker for m, no transfer policy\n",
        )
        assert any(name.endswith("/tokenizer.json") for name in hub.asked)
        assert not any("safetensors" in name for name in hub.asked)
        hub.asked.clear()
        assert (await check(path, REPOSITORY, environ, hub))[0] == 0
        assert (await check(path, REPOSITORY, environ, hub, HF_HUB_OFFLINE="1"))[0] == 0
        assert hub.asked == []


async def test_a_repository_with_a_tiktoken_tokenizer_is_downloaded(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_tiktoken(source)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    files |= {"chat_template.jinja": b"plain", "additional_chat_templates/tool_use.jinja": b"tools"}
    path = tmp_path / "fleet.yaml"
    async with local_hub(REPOSITORY, files | WEIGHTS) as hub:
        code, reported = await check(path, REPOSITORY, environ, hub)
        assert code == 0, reported
        assert not any("safetensors" in name for name in hub.asked)
        assert any(name.endswith("/additional_chat_templates/tool_use.jinja") for name in hub.asked)
    code, reported = await check(path, REPOSITORY, environ, None, HF_HUB_OFFLINE="1")
    assert code == 0, reported


async def test_a_missing_or_invalid_repository_is_reported_with_its_line(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    path = tmp_path / "fleet.yaml"
    at = f"kvrouter: {path}:2: models[0].tokenizer: "
    async with local_hub(REPOSITORY, FILES) as hub:
        code, reported = await check(path, "acme/other", environ, hub)
        assert code == 2
        assert reported.startswith(f"{at}acme/other is no folder here, and cannot be downloaded")
        code, reported = await check(path, REPOSITORY, environ, hub, HF_HUB_OFFLINE="1")
        assert code == 2
        assert reported.startswith(f"{at}{REPOSITORY} is no folder here and not in the Hugging Face cache")
    async with local_hub(REPOSITORY, WEIGHTS) as hub:
        code, reported = await check(path, REPOSITORY, environ, hub)
        assert (code, reported) == (2, f"{at}{REPOSITORY}: the repository has no tokenizer.json\n")


async def test_a_too_large_repository_is_refused(tmp_path: Path, environ: dict[str, str]) -> None:
    path = tmp_path / "fleet.yaml"
    async with local_hub(REPOSITORY, FILES, claimed_bytes=DOWNLOAD_MAX_BYTES) as hub:
        code, reported = await check(path, REPOSITORY, environ, hub)
    assert code == 2
    assert f"and ≤ {DOWNLOAD_MAX_BYTES} are read" in reported


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer.json": b"{}"}, "is not a tokenizer"),
        ({**FILES, "tokenizer_config.json": b"["}, "cannot read"),
        ({**FILES, "chat_template.jinja": b"{% for %}"}, "template"),
    ],
)
async def test_a_folder_with_invalid_tokenizer_files_is_refused(
    files: Mapping[str, bytes], said: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    code, reported = await check(tmp_path / "fleet.yaml", str(folder), environ, None)
    assert (code, said in reported) == (2, True), reported


async def test_a_frontend_loads_the_repository_that_a_worker_announces(environ: dict[str, str]) -> None:
    async with local_hub(REPOSITORY, FILES) as hub, fleet({**environ, "HF_ENDPOINT": hub.url}) as here:
        await here.worker("--tokenizer", REPOSITORY)
        frontend = await here.frontend()
        body = {"model": "mock", "prompt": "one two", "max_tokens": 2}
        for _ in range(600):
            reply = await frontend.http.post("/v1/completions", json=body)
            if reply.status_code == 200:
                break
            await asyncio.sleep(0.05)
        assert reply.status_code == 200, reply.text
