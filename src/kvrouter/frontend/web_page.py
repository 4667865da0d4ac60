"""The web page at ``/ui``: static files of this package, without data, served without a token."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from kvrouter.frontend.errors import UnknownPath
from kvrouter.frontend.http.response import ResponseHeaders
from kvrouter.frontend.page_route import Page, PageRequest, PublicRoute, Route

PAGE = "index.html"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content types by file suffix; files with another suffix are not served."""

POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
"""Scripts, styles and data come from the router alone, and no other page may frame this one: it holds the
admin token of the user who entered it.
"""

HEADERS: ResponseHeaders = (
    (b"cache-control", b"no-cache"),  # browsers revalidate their copy
    (b"referrer-policy", b"no-referrer"),
)


@dataclass(frozen=True, slots=True)
class _Asset:
    content: bytes
    content_type: str
    etag: str


class WebPage:
    """The routes of the page's files, which are read at construction."""

    def __init__(self) -> None:
        self._assets = _read_assets()

    def routes(self) -> list[Route]:
        """Return the routes of the page."""
        return [
            PublicRoute("/ui", self.page, "The fleet and its decisions, live, in a browser", policy=POLICY),
            PublicRoute("/ui/", self.with_slash, "The same", policy=POLICY),
            PublicRoute("/ui/{name}", self.asset, "A file of that page", policy=POLICY),
        ]

    async def page(self, request: PageRequest) -> Page:
        """``GET /ui``."""
        return self._answer(request, PAGE)

    async def with_slash(self, _: PageRequest) -> Page:
        """``GET /ui/``: redirect to ``../ui``. The page's URLs are relative, to work behind a proxy path."""
        return Page(status=307, headers=(*HEADERS, (b"location", b"../ui")))

    async def asset(self, request: PageRequest) -> Page:
        """``GET /ui/{name}``: a style sheet, a script or a picture."""
        return self._answer(request, request.parameters["name"])

    def _answer(self, request: PageRequest, name: str) -> Page:
        asset = self._assets.get(name)
        if asset is None:
            raise UnknownPath(f"nothing is at {request.path}")
        headers = (*HEADERS, (b"etag", asset.etag.encode()))
        known = (request.header("if-none-match") or "").split(",")
        if asset.etag in {tag.strip().removeprefix("W/") for tag in known}:
            return Page(status=304, headers=headers)
        return Page(asset.content, headers=(*headers, (b"content-type", asset.content_type.encode())))


def _read_assets() -> dict[str, _Asset]:
    assets = {}
    for path in files("kvrouter.frontend").joinpath("ui").iterdir():
        content_type = CONTENT_TYPES.get("." + path.name.rpartition(".")[2])
        if content_type is not None:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            assets[path.name] = _Asset(content, content_type, f'"{digest}"')
    return assets
