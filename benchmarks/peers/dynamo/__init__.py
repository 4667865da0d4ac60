"""Dynamo's side, run inside the peers' environment."""
