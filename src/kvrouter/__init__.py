"""kvrouter: a KV-cache-aware, topology-aware router for LLM serving fleets."""
