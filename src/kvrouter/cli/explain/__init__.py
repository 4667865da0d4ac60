"""``kvrouter explain``: the decision for a prompt, or about a request, with its reasons."""
