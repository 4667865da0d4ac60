"""TensorRT-LLM: its wire turned into core's words."""
