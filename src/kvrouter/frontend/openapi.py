"""The OpenAPI description at ``GET /openapi.json``, and the same as HTML at ``GET /docs``."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape

import msgspec
from msgspec import Struct

from kvrouter.api.booking_schema import Booking, OutputBody, Prefilled, PrefillEnded, Routed
from kvrouter.api.cordon_schema import CordonBody, CordonChange, CordonList
from kvrouter.api.decision_schema import Decisions, Explanation, LastDecisions
from kvrouter.api.error_schema import ErrorBody
from kvrouter.api.fleet_schema import Fleet, Flows, Refusals
from kvrouter.api.health_schema import (
    BusyBody,
    Health,
    ModelList,
    Ready,
    ServerLoad,
    ThresholdList,
    Version,
)
from kvrouter.core.requests import CallRoute
from kvrouter.frontend.errors import JSON_HEADERS
from kvrouter.frontend.openai.form import CONTENT_TYPE
from kvrouter.frontend.openai.passed_routes import PASSED_ROUTES
from kvrouter.frontend.page_route import NO_CONTENT_POLICY, AdminRoute, Page, PageRequest, PublicRoute, Route

Json = dict[str, object]

DOCS_URL = "https://github.com/kvrouter/kvrouter/tree/main/docs/http-api.md"

_CHAT: Json = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        "stream": {"type": "boolean"},
        "max_tokens": {"type": "integer", "minimum": 1},
    },
}
_COMPLETION: Json = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        "model": {"type": "string"},
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        "stream": {"type": "boolean"},
        "max_tokens": {"type": "integer", "minimum": 1},
    },
}
_ANY: Json = {"type": "object", "properties": {"model": {"type": "string"}}}

_FORM: Json = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "model": {"type": "string"},
        "stream": {"type": "boolean"},
    },
}

CALLS: Mapping[str, tuple[str, Json]] = {
    CallRoute.CHAT.value: ("A chat, whole or streamed, as OpenAI has it", _CHAT),
    CallRoute.COMPLETION.value: ("A completion of a text or of token ids, as OpenAI has it", _COMPLETION),
    **{
        route.route.value: (f"To an engine as it is: {route.description}", _FORM if route.is_form else _ANY)
        for route in PASSED_ROUTES
    },
    "/v1/route": ("Where a request should go; it is booked there", _ANY),
    "/v1/prefill": ("Prefill a request; say where its KV waits", _ANY),
}
"""Summaries and minimal body schemas of the calls with a prompt, by path."""

CALL_ANSWERS: Mapping[str, type[Struct]] = {"/v1/route": Routed, "/v1/prefill": Prefilled}
"""JSON answer types of calls, by path; other calls answer as engines do."""

TYPES: tuple[type[Struct], ...] = (
    *(ErrorBody, Routed, Prefilled, ModelList, Health, Ready, ServerLoad, Version, ThresholdList),
    *(Explanation, LastDecisions, Decisions, CordonList, CordonChange, Fleet, Flows, Refusals),
    *(Booking, PrefillEnded, BusyBody, CordonBody, OutputBody),
)
"""The types that every description has, in the order of their schemas, also for routes that an app lacks; the
types of other routes come after them.
"""


def _content(kind: type[Struct]) -> Json:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {"application/json": {"schema": schema}}}


_ERROR: Json = {"description": "An error in OpenAI's form", **_content(ErrorBody)}


def openapi(calls: Iterable[str], pages: Sequence[Route], *, version: str) -> Json:
    """Return the description of an app that takes POSTs at ``calls`` and has these ``pages``."""
    paths: dict[str, Json] = {path: {"post": _call(path)} for path in calls}
    for page in pages:
        path = page.path.replace(":path}", "}")
        methods = sorted(page.methods - {"HEAD"})
        paths.setdefault(path, {}).update((method.lower(), _page(page)) for method in methods)
    types = dict.fromkeys((*TYPES, *(kind for page in pages for kind in (page.answer, page.body) if kind)))
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrouter", "version": version, "summary": "A router for LLM serving fleets"},
        "externalDocs": {"url": DOCS_URL},
        "paths": paths,
        "components": {
            "securitySchemes": {"admin": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas,
        },
    }


def _responses(answer: type[Struct] | None, otherwise: str) -> Json:
    """Return the schemas of the answer, described by ``otherwise`` without one, and of an error."""
    response: Json = {"description": otherwise}
    if answer is not None:
        response = {"description": (answer.__doc__ or "").partition("\n")[0], **_content(answer)}
    return {"200": response, "default": _ERROR}


def _call(path: str) -> Json:
    summary, schema = CALLS[path]
    media_type = CONTENT_TYPE.decode() if schema is _FORM else "application/json"
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {media_type: {"schema": schema}}},
        "responses": _responses(CALL_ANSWERS.get(path), "As an engine answers"),
    }


def _page(page: Route) -> Json:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in page.parameters
    ]
    operation: Json = {
        "summary": page.summary,
        "responses": _responses(page.answer, "A page, or nothing"),
    }
    if page.body is not None:
        operation["requestBody"] = {"required": True, **_content(page.body)}
    if parameters:
        operation["parameters"] = parameters
    if isinstance(page, AdminRoute):
        operation["security"] = [{"admin": []}, {}]
    return operation


_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #8884; padding: .35rem .75rem .35rem 0; }
th, td { text-align: left; vertical-align: top; }
code { font: .9em ui-monospace, monospace; }
"""

_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
_DOCS_POLICY = f"{NO_CONTENT_POLICY}; style-src 'sha256-{_STYLE_HASH}'"


class DescriptionRoutes:
    """The routes ``/openapi.json`` and ``/docs``, which also describe themselves."""

    def __init__(self, calls: Iterable[str], pages: Iterable[Route], *, version: str) -> None:
        self._description = openapi(calls, (*pages, *self.routes()), version=version)

    def routes(self) -> list[Route]:
        """Return the two routes."""
        return [
            PublicRoute("/openapi.json", self.description, "This description"),
            PublicRoute("/docs", self.docs, "This description, for people", policy=_DOCS_POLICY),
        ]

    async def description(self, _: PageRequest) -> Page:
        """``GET /openapi.json``."""
        return Page(msgspec.json.encode(self._description), headers=JSON_HEADERS)

    async def docs(self, _: PageRequest) -> Page:
        """``GET /docs``."""
        headers = ((b"content-type", b"text/html; charset=utf-8"),)
        return Page(docs_html(self._description).encode(), headers=headers)


def docs_html(description: Mapping[str, object]) -> str:
    """Return the routes of a description as a self-contained HTML page."""
    paths = description["paths"]
    rows = [
        f"<tr><td><code>{name.upper()}&nbsp;{escape(path)}</code></td><td>{escape(operation['summary'])}</td>"
        f"<td>{'admin token' if 'security' in operation else ''}</td></tr>"
        for path, methods in (paths if isinstance(paths, dict) else {}).items()
        for name, operation in methods.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>kvrouter: routes</title>'
        f"<style>{_STYLE}</style></head><body><h1>kvrouter</h1>"
        f'<p>What this router answers. <a href="openapi.json">openapi.json</a> says it to programs, '
        f'<a href="{DOCS_URL}">the documentation</a> in full.</p>'
        "<table><thead><tr><th>Route</th><th>What</th><th>Asks for</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></body></html>"
    )
