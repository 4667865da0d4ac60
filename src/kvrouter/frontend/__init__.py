"""The HTTP frontend: OpenAI's API."""
