"""Engines behind an OpenAI-compatible HTTP server: what vLLM, SGLang and TensorRT-LLM share."""
