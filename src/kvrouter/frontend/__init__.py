"""The HTTP frontend: OpenAI's API, admin routes, and the standalone router's API."""
