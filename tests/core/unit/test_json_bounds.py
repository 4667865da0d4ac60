"""The native scan and the reading of token ids let other threads run."""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from kvrouter.core.json_bounds import JsonBounds, token_ids

MANY = 2**62
BOUNDS = JsonBounds(
    depth=MANY,
    values=MANY,
    items=MANY,
    numbers=MANY,
    text_bytes=MANY,
    short_bytes=MANY,
    key_bytes=MANY,
    number_bytes=MANY,
    blanks_in_row=MANY,
    blanks=MANY,
    number_fields=(),
    short_fields=(),
)
TEXT = b"[" + b"1," * 16_000_000 + b"1]"


@pytest.mark.parametrize("read", [BOUNDS.scan, lambda text: token_ids(text, 0)], ids=["scan", "token_ids"])
def test_other_threads_run_while_a_long_text_is_scanned(
    read: Callable[[bytes], object], request: pytest.FixtureRequest
) -> None:
    """The interpreter asks no thread to let another one run: only one that lets go of it is interrupted."""
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(60)
    turns = 0
    turns_meanwhile: list[int] = []

    def count() -> None:
        before = turns
        read(TEXT)
        turns_meanwhile.append(turns - before)

    thread = threading.Thread(target=count)
    thread.start()
    while not turns_meanwhile:
        turns += 1
        time.sleep(0)
    thread.join()
    assert turns_meanwhile[0] > 0
