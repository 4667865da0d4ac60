"""An engine behind its own OpenAI-compatible HTTP server: what vLLM, SGLang and TensorRT-LLM have alike."""
