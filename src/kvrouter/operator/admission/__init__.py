"""Admission: whether a deployment may be stored."""
