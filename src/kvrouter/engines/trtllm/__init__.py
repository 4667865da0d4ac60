"""TensorRT-LLM: probes, calls and KV events."""
