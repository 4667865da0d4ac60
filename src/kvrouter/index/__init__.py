"""Who holds which blocks: what the engines' events say, or what routing decisions predict."""
