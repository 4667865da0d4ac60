"""OpenAI's chat and completions: what a client may send, and what it gets."""
