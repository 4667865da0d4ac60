"""Comparing transfer policies by paired replays, and the advice that follows."""
