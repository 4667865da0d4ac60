"""The C library, called from Python as a C engine calls it."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from kvrouter.core.events import Medium

ROOT = Path(__file__).parents[2]
INCLUDE = ROOT / "native" / "c" / "include"


def library() -> Path:
    """The shared library that ``make setup`` builds."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "native" / "target"))
    name = "libkvrouter.dylib" if sys.platform == "darwin" else "libkvrouter.so"
    path = target / "release" / name
    assert path.exists(), f"{path} is not there: make setup builds it"
    return path


def compiler(name: str) -> str:
    """A compiler on PATH."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not on PATH: the tests of the C library need a C and a C++ compiler"
    return found


OK, INVALID, UNKNOWN_PARENT, FULL, TIMEOUT = 0, -1, -2, -3, -4
ERROR_BYTES = 256


class Config(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_bytes", ctypes.c_size_t),
        ("address", ctypes.c_char_p),
        ("token", ctypes.c_char_p),
        ("block_size", ctypes.c_uint32),
        ("queue_bytes_max", ctypes.c_uint64),
        ("held_blocks_max", ctypes.c_uint64),
    ]


class LoadReport(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_uint64)
        for name in (
            "active_blocks",
            "total_blocks",
            "active_prefill_tokens",
            "running_requests",
            "waiting_requests",
        )
    ]


class State(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_bytes", ctypes.c_size_t),
        ("connected", ctypes.c_uint32),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "queued_bytes",
                "queued_events",
                "held_blocks",
                "connections",
                "replacements",
                "overflows",
                "dropped_events",
                "unknown_parents",
                "unknown_removed",
            )
        ),
        ("error", ctypes.c_char * ERROR_BYTES),
    ]


@cache
def calls() -> ctypes.CDLL:
    """The library; what returns no code is declared."""
    found = ctypes.CDLL(str(library()))
    found.kvr_publisher_open.restype = ctypes.c_void_p
    found.kvr_close.restype = None
    found.kvr_close.argtypes = [ctypes.c_void_p]
    return found


def open_with(config: Config) -> tuple[int | None, str]:
    """A publisher, or why there is none."""
    error = ctypes.create_string_buffer(ERROR_BYTES)
    publisher: int | None = calls().kvr_publisher_open(
        ctypes.byref(config), error, ctypes.c_size_t(ERROR_BYTES)
    )
    return publisher, error.value.decode()


def config(
    address: str,
    *,
    token: str = "",
    block_size: int = 4,
    queue_bytes_max: int = 0,
    held_blocks_max: int = 0,
) -> Config:
    """A configuration."""
    return Config(
        ctypes.sizeof(Config), address.encode(), token.encode(), block_size, queue_bytes_max, held_blocks_max
    )


class CEngine:
    """A publisher of the C library. Close it."""

    def __init__(self, configured: Config) -> None:
        publisher, error = open_with(configured)
        assert publisher is not None, error
        self.pointer = ctypes.c_void_p(publisher)

    def stored(
        self,
        token_ids: Sequence[int],
        engine_hashes: Sequence[int],
        *,
        parent: int | None = None,
        dp_rank: int = 0,
        medium: int = Medium.GPU,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> int:
        return self._call(
            calls().kvr_stored,
            ctypes.c_uint32(dp_rank),
            (ctypes.c_uint32 * len(token_ids))(*token_ids),
            ctypes.c_size_t(len(token_ids)),
            (ctypes.c_uint64 * len(engine_hashes))(*engine_hashes),
            ctypes.c_size_t(len(engine_hashes)),
            None if parent is None else ctypes.byref(ctypes.c_uint64(parent)),
            None if lora_name is None else lora_name.encode(),
            None if cache_namespace is None else cache_namespace.encode(),
            ctypes.c_int(medium),
        )

    def removed(self, engine_hashes: Sequence[int], *, dp_rank: int = 0, medium: int = Medium.GPU) -> int:
        return self._call(
            calls().kvr_removed,
            ctypes.c_uint32(dp_rank),
            (ctypes.c_uint64 * len(engine_hashes))(*engine_hashes),
            ctypes.c_size_t(len(engine_hashes)),
            ctypes.c_int(medium),
        )

    def cleared(self, *, dp_rank: int = 0) -> int:
        return self._call(calls().kvr_cleared, ctypes.c_uint32(dp_rank))

    def load(self, *, active_blocks: int, total_blocks: int, dp_rank: int = 0) -> int:
        report = LoadReport(active_blocks, total_blocks, 0, 1, 0)
        return self._call(calls().kvr_load, ctypes.c_uint32(dp_rank), ctypes.byref(report))

    def flush(self, timeout_ms: int) -> int:
        """Waits: not for the event loop's own thread while that has a door to serve."""
        return self._call(calls().kvr_flush, ctypes.c_uint32(timeout_ms))

    def status(self) -> State:
        state = State(ctypes.sizeof(State))
        assert self._call(calls().kvr_status, ctypes.byref(state)) == OK
        return state

    def close(self) -> None:
        calls().kvr_close(self.pointer)

    def _call(self, call: Callable[..., int], *arguments: object) -> int:
        return call(self.pointer, *arguments)
