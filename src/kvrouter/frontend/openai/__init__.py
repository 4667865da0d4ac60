"""Request and response formats of OpenAI's API, and the calls that pass through to engines."""
