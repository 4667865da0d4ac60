"""Replay of a real trace through HTTP: sample, text, schedule, client, fleet and report."""
