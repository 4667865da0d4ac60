"""vLLM: probes, calls and KV events."""
