"""SGLang: probes, calls and KV events."""
