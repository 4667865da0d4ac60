"""vLLM: probes, calls and KV events."""

SHORT_HELP = "A worker for a vLLM server that runs already."

HELP = """Make a vLLM server part of a fleet; the server's own image and command stay as they are.

Its model, block size, capacity, ranks and event sources are asked of it. Start it with prefix caching and KV
events, as the page on vLLM shows. A key that it asks for is taken from KVROUTER_ENGINE_API_KEY.
"""
