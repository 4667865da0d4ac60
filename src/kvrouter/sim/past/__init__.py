"""Analyses of recorded requests and the fleet that served them: caches, hits and refusals."""
