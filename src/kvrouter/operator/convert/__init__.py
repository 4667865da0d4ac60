"""Dynamo's manifests as kvrouter's, and what becomes of each field that kvrouter does not have."""

from kvrouter.operator.convert.convert import Conversion, convert

__all__ = ["Conversion", "convert"]
