"""A Hugging Face hub on this host: one repository of a tokenizer, as the hub's own client asks for it."""

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

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
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        hub.url = f"http://{host}:{port}"
        yield hub
    finally:
        await runner.cleanup()
