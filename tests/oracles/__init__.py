"""Readable twins of native code, and planes that tests alone use: what the real ones have to equal."""
