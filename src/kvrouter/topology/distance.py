"""How far apart two workers are, in levels that both name."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Distance(NamedTuple):
    """The narrowest level that two workers share, and its depth: 1 for the broadest, 0 for none."""

    level: str | None
    depth: int


NO_SHARED_LEVEL = Distance(None, 0)


def distance(a: Mapping[str, str], b: Mapping[str, str], levels: Sequence[str]) -> Distance:
    """Return the distance of the workers whose domain values are ``a`` and ``b``.

    ``levels`` come broadest first. A level that either worker has no value for is passed over; a level in
    which they differ ends the walk, because ``rack-1`` of one zone is not ``rack-1`` of another.
    """
    shared = NO_SHARED_LEVEL
    for depth, level in enumerate(levels, start=1):
        value_a, value_b = a.get(level), b.get(level)
        if value_a is None or value_b is None:
            continue
        if value_a != value_b:
            break
        shared = Distance(level, depth)
    return shared
