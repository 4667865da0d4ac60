"""A collector of spans: OTLP over HTTP, decoded with OpenTelemetry's own messages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.testing.asyncio_servers import port_of, serving


def span_attributes(attributes: list[KeyValue]) -> dict[str, object]:
    """Attributes by name."""
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


@dataclass
class OtlpCollector:
    """What came, in order."""

    url: str
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, object]] = field(default_factory=list)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    def inside(self, parent: Span) -> list[str]:
        """The names of a span's children, by when they began."""
        children = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return [span.name for span in sorted(children, key=lambda span: span.start_time_unix_nano)]


@asynccontextmanager
async def otlp_collector() -> AsyncIterator[OtlpCollector]:
    """A collector that listens."""
    found = OtlpCollector("")

    async def take(request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            found.resources.append(span_attributes(list(resource.resource.attributes)))
            for scope in resource.scope_spans:
                found.spans.extend(scope.spans)
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with serving(app) as server:
        found.url = f"http://127.0.0.1:{port_of(server)}"
        yield found
