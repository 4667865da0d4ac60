"""What recorded requests show about the fleet that served them: caches, hits and refusals."""
