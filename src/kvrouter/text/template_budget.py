"""The budget of bytes and processor time of one rendering of a chat template."""

import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import TypeVar

from jinja2.utils import Namespace

from kvrouter.core.errors import KvrouterError

BYTES_MIN = 16 * 1024 * 1024
BYTES_PER_INPUT_BYTE = 200
BYTES_MAX = 256 * 1024 * 1024
"""The most bytes that all steps of a rendering produce: 200 times its input, within these bounds."""

CPU_S_MAX = 2.0
"""The processor time of one rendering in a thread."""

CPU_S_MAX_ON_LOOP = 0.05
"""The processor time of one rendering on the event loop, for short chats."""

ITEM_BYTES = 32
STEP_BYTES = 64
DEPTH_MAX = 64
NUMBER_BITS_MAX = 8192
LOOKS_AFTER = 32
"""Charges between two looks at the clock; a charge over LARGE_BYTES is followed by one too. Time counts from
the first look, so that a short rendering takes none."""

LARGE_BYTES = 64 * 1024

T = TypeVar("T")


class TemplateOverBounds(KvrouterError):
    """A chat template exceeds the bounds of a rendering, or uses an unbounded operation."""

    code = "chat_template_over_bounds"


class Budget:
    """The budget of one rendering."""

    __slots__ = ("_bytes_left", "_bytes_max", "_charges_left", "_cpu_s_max", "_cpu_until_s", "_inputs")

    def __init__(self, inputs: object, *, cpu_s_max: float, bytes_max: int = BYTES_MIN) -> None:
        """``inputs`` are the template's; they are weighed only when ``bytes_max`` is used up."""
        self._inputs: object | None = inputs
        self._bytes_left = self._bytes_max = bytes_max
        self._cpu_s_max = cpu_s_max
        self._cpu_until_s: float | None = None
        self._charges_left = LOOKS_AFTER

    def charge(self, n_bytes: int) -> None:
        """Charge for an operation before it runs, in bytes or equivalent time. Raises TemplateOverBounds."""
        self._bytes_left = bytes_left = self._bytes_left - n_bytes
        self._charges_left = charges_left = self._charges_left - 1
        if bytes_left < 0:
            self._grow()
        if charges_left < 0 or n_bytes > LARGE_BYTES:
            self._look()

    def _look(self) -> None:
        self._charges_left = LOOKS_AFTER
        now_s = time.thread_time()
        if self._cpu_until_s is None:
            self._cpu_until_s = now_s + self._cpu_s_max
        elif now_s > self._cpu_until_s:
            raise TemplateOverBounds(f"it takes more than {self._cpu_s_max * 1000:g} ms of processor time")

    def _grow(self) -> None:
        if self._inputs is not None:
            bytes_max = BYTES_PER_INPUT_BYTE * weight(self._inputs, BYTES_MAX)
            grown = max(0, min(bytes_max, BYTES_MAX) - self._bytes_max)
            self._inputs = None
            self._bytes_max += grown
            self._bytes_left += grown
        if self._bytes_left < 0:
            raise TemplateOverBounds(f"it makes more than {self._bytes_max} bytes")

    def charge_for(self, value: object) -> None:
        """Charge for reading all of ``value``, or for writing it as text."""
        if type(value) is str:
            self.charge(str.__sizeof__(value))
        else:
            _weigh(value, self.charge, 0)


class Current(threading.local):
    """The budget of this thread's rendering; outside of one it is zero."""

    def __init__(self) -> None:
        self.budget = Budget(None, cpu_s_max=0.0, bytes_max=0)


current = Current()


class Charging:
    """A context in which this thread's charges go to ``budget``."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __enter__(self) -> None:
        self._before = current.budget
        current.budget = self._budget

    def __exit__(self, *_: object) -> None:
        current.budget = self._before


def weight(value: object, bytes_max: int) -> int:
    """Return the approximate bytes of ``value`` written out, repeated parts included, up to ``bytes_max``."""
    left = bytes_max

    def count(n_bytes: int) -> None:
        nonlocal left
        left -= n_bytes
        if left < 0:
            raise OverflowError

    try:
        _weigh(value, count, 0)
    except OverflowError:
        return bytes_max
    return bytes_max - left


def _weigh(value: object, count: Callable[[int], None], depth: int) -> None:
    """Call ``count`` for each part. Raises TemplateOverBounds for a too deeply nested value."""
    if isinstance(value, str):
        count(str.__sizeof__(value))
        return
    if isinstance(value, int):
        count(ITEM_BYTES + value.bit_length() // 3)
        return
    count(ITEM_BYTES)
    if isinstance(value, range):
        count(ITEM_BYTES * len(value))
        return
    parts: Iterable[object]
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, Namespace):
        parts = namespace_items(value)
    elif isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        parts = value
    else:
        return
    if depth >= DEPTH_MAX:
        raise TemplateOverBounds(f"it nests values more than {DEPTH_MAX} deep")
    for part in parts:
        _weigh(part, count, depth + 1)


def namespace_items(value: Namespace) -> tuple[object, ...]:
    """Return the attributes of a template's ``namespace``, which has no public method for that."""
    attrs: dict[str, object] = object.__getattribute__(value, "_Namespace__attrs")
    return tuple(attrs.items())


def counted(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, charging for each."""
    budget = current.budget
    for item in items:
        budget.charge_for(item)
        yield item


_WIDE_PLACES = r"[-#0 +]*(?:\*|[0-9]{4}|[0-9]*\.(?:\*|[0-9]{4}))"
_WIDE_PERCENT = re.compile("%" + _WIDE_PLACES)
_WIDE_PERCENT_OR_KEY = re.compile("[%)]" + _WIDE_PLACES)
_WIDE_BRACES = re.compile(
    r"\{(?:"
    r"[^{}]*+\{"  # a field inside
    r"|[^{}:]*+:[^{}]*[0-9]{4}"
    r"|[^{}\[:!]*+(?:\[[^]{}]*+\][^{}\[:!]*+)*+\[[^]{}]*+\}"  # a brace inside a key does not end the field
    r")"
)
"""Each pattern visits a character a few times at most, even without a match."""


def check_percent(pattern: str) -> None:
    """Refuse a ``%`` pattern that pads or rounds to thousands of places: ``%9999d``, ``%*d``.

    A key may contain parentheses, so places after any parenthesis count as a field's.
    """
    wide = _WIDE_PERCENT_OR_KEY if "%(" in pattern else _WIDE_PERCENT
    if wide.search(pattern.replace("%%", "")):
        raise TemplateOverBounds("it formats to a width that is not bounded")


def check_braces(pattern: str) -> None:
    """Refuse a ``str.format`` pattern that pads or rounds to thousands of places: ``{:9999}``, ``{:{}}``."""
    if _WIDE_BRACES.search(pattern.replace("{{", "")):
        raise TemplateOverBounds("it formats to a width that is not bounded")
