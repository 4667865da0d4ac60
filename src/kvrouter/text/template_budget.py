"""The budget of one rendering of a chat template: bytes and processor time."""

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
"""What a rendering may make, all its steps together: 200 times what it is given, within these bounds."""

CPU_S_MAX = 2.0
"""Processor time of one rendering in a thread of its own."""

CPU_S_MAX_ON_LOOP = 0.05
"""Processor time of one rendering on the event loop, where short chats are rendered."""

ITEM_BYTES = 32
STEP_BYTES = 64
DEPTH_MAX = 64
NUMBER_BITS_MAX = 8192
LOOKS_AFTER = 32
"""Charges between two looks at the clock; one of more than LARGE_BYTES is followed by a look at once."""

LARGE_BYTES = 64 * 1024

T = TypeVar("T")


class TemplateOverBounds(KvrouterError):
    """A model's chat template wants more than a rendering may use, or what cannot be bounded."""

    code = "chat_template_over_bounds"


class Budget:
    """One rendering's."""

    __slots__ = ("_bytes_left", "_bytes_max", "_cpu_s_max", "_cpu_until_s", "_given", "_unseen")

    def __init__(self, given: object, *, cpu_s_max: float, bytes_max: int = BYTES_MIN) -> None:
        """``given`` is what the template is given: it is weighed only when the least budget is used up."""
        self._given: object | None = given
        self._bytes_left = self._bytes_max = bytes_max
        self._cpu_s_max = cpu_s_max
        self._cpu_until_s = time.thread_time() + cpu_s_max
        self._unseen = LOOKS_AFTER

    def charge(self, n_bytes: int) -> None:
        """What comes next takes so many bytes, or as much time as writing them. Raises TemplateOverBounds."""
        self._bytes_left -= n_bytes
        if self._bytes_left < 0:
            self._grow()
        self._unseen -= 1
        if self._unseen < 0 or n_bytes > LARGE_BYTES:
            self._unseen = LOOKS_AFTER
            if time.thread_time() > self._cpu_until_s:
                raise TemplateOverBounds(
                    f"it takes more than {self._cpu_s_max * 1000:g} ms of processor time"
                )

    def _grow(self) -> None:
        if self._given is not None:
            bytes_max = BYTES_PER_INPUT_BYTE * weight(self._given, BYTES_MAX)
            grown = max(0, min(bytes_max, BYTES_MAX) - self._bytes_max)
            self._given = None
            self._bytes_max += grown
            self._bytes_left += grown
        if self._bytes_left < 0:
            raise TemplateOverBounds(f"it makes more than {self._bytes_max} bytes")

    def charge_for(self, value: object) -> None:
        """Reading all of ``value`` comes next, or writing it as text."""
        if type(value) is str:
            self.charge(str.__sizeof__(value))
        else:
            _weigh(value, self.charge, 0)


class Current(threading.local):
    """The budget of the rendering that this thread is in; outside of one nothing may be spent."""

    def __init__(self) -> None:
        self.budget = Budget(None, cpu_s_max=0.0, bytes_max=0)


current = Current()


class Spending:
    """Inside, this thread's charges go to ``budget``."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __enter__(self) -> None:
        self._before = current.budget
        current.budget = self._budget

    def __exit__(self, *_: object) -> None:
        current.budget = self._before


def weight(value: object, bytes_max: int) -> int:
    """About the bytes of ``value`` written out, a part as often as it is met; at most ``bytes_max``."""
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
    """Call ``count`` for each part. Raises TemplateOverBounds for what is nested too deeply."""
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
    """The attributes of a template's ``namespace``, which has no way to ask for all of them."""
    attrs: dict[str, object] = object.__getattribute__(value, "_Namespace__attrs")
    return tuple(attrs.items())


def counted(items: Iterator[T]) -> Iterator[T]:
    """The same items, each charged for."""
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
    r"|[^{}\[:!]*+(?:\[[^]{}]*+\][^{}\[:!]*+)*+\[[^]{}]*+\}"  # a brace inside a key: the field goes on
    r")"
)
"""Each looks at a character a few times at most, also where nothing is found."""


def check_percent(pattern: str) -> None:
    """Refuse a pattern of ``%`` that pads or rounds to thousands of places: ``%9999d``, ``%*d``.

    A key may hold parentheses, so behind one the places are taken for a field's whatever they stand in.
    """
    wide = _WIDE_PERCENT_OR_KEY if "%(" in pattern else _WIDE_PERCENT
    if wide.search(pattern.replace("%%", "")):
        raise TemplateOverBounds("it formats to a width that is not bounded")


def check_braces(pattern: str) -> None:
    """Refuse a pattern of ``str.format`` that does: ``{:9999}``, ``{:{}}``."""
    if _WIDE_BRACES.search(pattern.replace("{{", "")):
        raise TemplateOverBounds("it formats to a width that is not bounded")
