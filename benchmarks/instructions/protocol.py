"""What the counting process and the counted one both know."""

from typing import TypedDict

COUNT_CALLS = "BENCH_COUNT_CALLS"
"""The variable by which the counted process is told to count calls of Python functions."""

PUT_OFF_S = 3600.0
"""Longer than any count takes."""


class Reply(TypedDict):
    """What the counted process answers at a mark."""

    pid: int

    marks: int
    """So far."""

    calls: int
    """Of Python functions since the mark before."""
