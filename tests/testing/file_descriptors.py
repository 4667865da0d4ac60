"""A process that may open no file more than it has open."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptor_left(*, none_at_all: bool = False) -> Iterator[None]:
    """Every file that is opened inside fails, a descriptor that is closed inside apart.

    ``none_at_all``: also that one cannot be had again.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 if none_at_all else lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
