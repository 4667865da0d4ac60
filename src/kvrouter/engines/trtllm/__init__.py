"""TensorRT-LLM: probes, calls and KV events."""

SHORT_HELP = "A worker for a TensorRT-LLM server that runs already."

HELP = """Make a TensorRT-LLM server part of a fleet; its own image and command stay as they are.

Its model is asked of it, and what else it tells: where it tells neither its block size nor its context, give
--block-size and --context-length. Its KV events are asked for over HTTP, or heard where --kv-events says. The
page on TensorRT-LLM shows how to start it. A key that it asks for is taken from KVROUTER_ENGINE_API_KEY.
"""
