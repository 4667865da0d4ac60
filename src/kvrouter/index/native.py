"""The indexes of the native core."""

from kvrouter._native import ApproximateIndex, BlockIndex

__all__ = ["ApproximateIndex", "BlockIndex"]
