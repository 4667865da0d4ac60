"""``kvrouter frontend``: the process that serves OpenAI's HTTP for workers in other processes."""
