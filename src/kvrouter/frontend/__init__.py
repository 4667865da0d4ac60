"""The front door: OpenAI's HTTP."""
