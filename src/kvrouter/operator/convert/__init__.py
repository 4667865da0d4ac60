"""Converts Dynamo's manifests to kvrouter's, and notes each field that kvrouter does not have."""

from kvrouter.operator.convert.convert import Conversion, convert

__all__ = ["Conversion", "convert"]
