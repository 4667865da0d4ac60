"""OpenAI's chat and completions: request and response formats."""
