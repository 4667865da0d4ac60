"""SGLang: probes, calls and KV events."""

SHORT_HELP = "A worker for an SGLang server that runs already."

HELP = """Make an SGLang server part of a fleet; the server's own image and command stay as they are.

Its model, page size, capacity, ranks and event sources are asked of it. Start it with KV events and
--enable-cache-report, as the page on SGLang shows. A key that it asks for is taken from
KVROUTER_ENGINE_API_KEY.
"""
