"""Hostile clients, strangers and liars against real processes. Each scenario has a bar.

A bar is CPU time or memory of the process under attack, so a busy machine fails nothing. What other clients
wait is measured too, and its limit is one that only a process that hangs reaches.
"""
