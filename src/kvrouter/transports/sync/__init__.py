"""Replica sync: a port and its adapter."""
