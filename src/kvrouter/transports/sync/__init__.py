"""Replica sync: the port and its adapter."""
