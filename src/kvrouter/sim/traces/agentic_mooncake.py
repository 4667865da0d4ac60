"""``dynamo.agentic_mooncake``: Mooncake's rows with whole prompts, which wait for others by ``request_id``.

There are two versions. Rows without a header name in ``wait_for`` the requests that they wait for, and come
``delay`` + ``tool_wait_ms`` after the last of their answers; one without a wait has a ``timestamp``. Version
2 begins with a header, which states the block size. Its rows name ``dependencies``, each with its own delay
after the answer (``completion``) or the arrival (``dispatch``) of another, and come no earlier than
``not_before_ms``. Its names of blocks and of sessions are those of one play, ``play_id``.

Rows are in any order: Dynamo sorts those of a play by the text of their ids. So they are held whole.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from kvrouter.core.errors import ConfigError
from kvrouter.core.hashing import mix64
from kvrouter.sim.traces.lines import decode_row, read_lines, wrong_row
from kvrouter.sim.traces.mooncake_row import (
    Asked,
    Milliseconds,
    MooncakeRow,
    asked,
    block_size,
    block_size_note,
    check_pieces,
    delay_ms,
    timestamp_ms,
)
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest, Wait

SCHEMA = "dynamo.agentic_mooncake"

VERSION = 2

KEYS = frozenset({"wait_for", "branches", "prefix_reset", "tool_wait_ms", "tool_events"})
"""Keys that only rows without a header have."""

KEYS_2 = frozenset({"dependencies", "not_before_ms"})
"""Keys that only rows of version 2 have."""

CLOCK_ROUNDING_MS = 1.0
"""Recorded times are rounded, so a time that is too early by less than this still counts."""

_SPREAD = np.uint64(0x9E3779B97F4A7C15)

Name = Annotated[str, Meta(min_length=1)]


class _Header(msgspec.Struct):
    version: int
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    hash_id_scope: Literal["local"]


class _Row(MooncakeRow, kw_only=True):
    """A row without a header."""

    request_id: Name
    session_id: str | None = None
    wait_for: list[str] = msgspec.field(default_factory=list)
    tool_wait_ms: Milliseconds | None = None
    dependencies: msgspec.Raw | UnsetType = UNSET
    not_before_ms: msgspec.Raw | UnsetType = UNSET


class _Dependency(msgspec.Struct):
    request_id: str
    trigger: Literal["dispatch", "completion"]
    delay_ms: Milliseconds


class _Row2(MooncakeRow, kw_only=True):
    """A row of version 2."""

    request_id: Name
    play_id: Name
    session_id: Name
    not_before_ms: Milliseconds
    dependencies: list[_Dependency] = msgspec.field(default_factory=list)
    wait_for: msgspec.Raw | UnsetType = UNSET


class _Link(msgspec.Struct):
    """A wait of a request for another, from ``field`` of its row."""

    field: str
    name: str
    delay_ms: float
    for_arrival: bool


class _Request(msgspec.Struct):
    """A row. ``stated_ms`` is its stated time, ``at_ms`` the time of its arrival, or the earliest one without
    ``has_time``.
    """

    asked: Asked
    name: str
    play: str
    session: str
    stated_ms: float | None
    links: list[_Link]
    at_ms: float = 0.0
    has_time: bool = True


class AgenticMooncakeReader:
    """Reads the requests of a file, again with each call. ``text`` is its first ``line``.

    Raises ConfigError that names line and field of a row that is wrong, that waits for a request which is not
    there, or in the end for itself.
    """

    def __init__(self, path: Path, line: int, text: bytes) -> None:
        self._path = path
        self._header = _header(path, line, text)
        self._decode = msgspec.json.Decoder(_Row).decode
        self._decode_2 = msgspec.json.Decoder(_Row2).decode
        requests, piece_tokens = self._read()
        self.info = TraceInfo(
            SCHEMA,
            piece_tokens,
            has_sessions=any(request.links for request in requests),
            has_times=all(request.has_time for request in requests),
            notes=() if self._header is not None else (block_size_note(piece_tokens),),
        )

    def __call__(self) -> Iterator[TraceRequest]:
        """Yield the requests by arrival."""
        requests, piece_tokens = self._read()
        requests.sort(key=lambda request: request.at_ms)
        first_ms = requests[0].at_ms
        numbers: dict[str, int] = {}
        for number, request in enumerate(requests):
            numbers[request.name] = number
            yield request.asked.request(
                number,
                request.at_ms - first_ms,
                piece_tokens,
                session=request.session,
                waits=tuple(
                    Wait(numbers[link.name], link.delay_ms / 1e3, link.for_arrival) for link in request.links
                ),
                not_before_s=self._not_before_s(request, first_ms),
            )

    def _read(self) -> tuple[list[_Request], int]:
        """Return the requests, each after those that it waits for, and the tokens of a block."""
        rows = read_lines(self._path)
        if self._header is None:
            requests = [self._request(line, text) for line, text in rows]
            piece_tokens = block_size(request.asked for request in requests)
        else:
            next(rows, None)
            piece_tokens = self._header.block_size
            salts: dict[str, int] = {}
            requests = [self._request_2(line, text, salts) for line, text in rows]
            for request in requests:
                check_pieces(request.asked, piece_tokens)
        if not requests:
            raise ConfigError(f"{self._path}: has a header and no requests", param=str(self._path))
        ordered = _in_turn(self._path, requests)
        by_name = {request.name: request for request in ordered}
        for request in ordered:
            self._set_time(request, by_name)
        return ordered, piece_tokens

    def _not_before_s(self, request: _Request, first_ms: float) -> float:
        if self._header is None or request.stated_ms is None:
            return 0.0
        return max(0.0, request.stated_ms - first_ms) / 1e3

    def _set_time(self, request: _Request, by_name: dict[str, _Request]) -> None:
        """Set when a request comes, as those that it waits for have it. One of version 2 has a time where
        that is late enough for them.
        """
        stated_ms = request.stated_ms
        request.at_ms, request.has_time = stated_ms or 0.0, stated_ms is not None
        for link in request.links:
            other = by_name[link.name]
            if self._header is None and stated_ms is not None:
                if stated_ms < other.at_ms:
                    wrong_row(
                        self._path,
                        request.asked.line,
                        f"timestamp: {stated_ms:g} is before {other.at_ms:g} of {link.name!r}, which it "
                        "waits for",
                    )
                continue
            earliest_ms = other.at_ms + link.delay_ms
            request.at_ms = max(request.at_ms, earliest_ms)
            if stated_ms is not None:
                leaves_time = link.for_arrival or stated_ms > other.at_ms
                request.has_time &= leaves_time and stated_ms >= earliest_ms - CLOCK_ROUNDING_MS

    def _request(self, line: int, text: bytes) -> _Request:
        """Return the request of a row without a header."""
        row = decode_row(self._decode, self._path, line, text)
        for key in sorted(KEYS_2):
            if getattr(row, key) is not UNSET:
                self._not_of_version(line, key)
        at_ms, after_ms = timestamp_ms(self._path, line, row), delay_ms(self._path, line, row) or 0.0
        think_ms = after_ms + (row.tool_wait_ms or 0.0)
        if not row.wait_for and at_ms is None:
            wrong_row(self._path, line, "timestamp: is missing, and the request waits for no other")
        if not row.wait_for and think_ms:
            field = "delay" if after_ms else "tool_wait_ms"
            wrong_row(self._path, line, f"{field}: is there, and the request waits for no other")
        return _Request(
            asked=asked(self._path, line, row),
            name=row.request_id,
            play="",
            session=row.session_id or "",
            stated_ms=at_ms,
            links=[
                _Link(f"wait_for[{position}]", name, think_ms, for_arrival=False)
                for position, name in enumerate(row.wait_for)
            ],
        )

    def _request_2(self, line: int, text: bytes, salts: dict[str, int]) -> _Request:
        """Return the request of a row of version 2, with names that only its play has."""
        row = decode_row(self._decode_2, self._path, line, text)
        if row.wait_for is not UNSET:
            self._not_of_version(line, "wait_for")
        found = asked(self._path, line, row)
        salt = np.uint64(salts.setdefault(row.play_id, mix64(len(salts))))
        pieces = array("Q", (np.frombuffer(found.pieces, np.uint64) * _SPREAD + salt).tobytes())
        return _Request(
            asked=msgspec.structs.replace(found, pieces=pieces),
            name=row.request_id,
            play=row.play_id,
            session=f"{row.play_id}/{row.session_id}",
            stated_ms=row.not_before_ms,
            links=[
                _Link(
                    f"dependencies[{position}].request_id",
                    other.request_id,
                    other.delay_ms,
                    for_arrival=other.trigger == "dispatch",
                )
                for position, other in enumerate(row.dependencies)
            ],
        )

    def _not_of_version(self, line: int, key: str) -> NoReturn:
        if self._header is None:
            wrong_row(self._path, line, f"{key}: is of version {VERSION}, whose first line is a header")
        wrong_row(self._path, line, f"{key}: is of rows without a header; version {VERSION} has dependencies")


def is_agentic(path: Path, row: dict[str, object]) -> bool:
    """Whether a file with this first row has rows of this format. A row without a wait may have no key of its
    own; then the rows below it decide. Raises ConfigError for one of them that is not JSON.
    """
    if row.get("schema") == SCHEMA or not (KEYS | KEYS_2).isdisjoint(row):
        return True
    if "request_id" not in row or "hash_ids" not in row:
        return False
    decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
    return any(not KEYS.isdisjoint(decode_row(decode, path, line, text)) for line, text in read_lines(path))


def _header(path: Path, line: int, text: bytes) -> _Header | None:
    """Return the header that the first line is; None where it is a row."""
    keys = decode_row(msgspec.json.Decoder(dict[str, msgspec.Raw]).decode, path, line, text)
    if "schema" not in keys:
        return None
    header = decode_row(msgspec.json.Decoder(_Header).decode, path, line, text)
    if header.version != VERSION:
        wrong_row(path, line, f"version: {header.version} is not {VERSION}, the one that is known")
    return header


def _in_turn(path: Path, requests: Sequence[_Request]) -> list[_Request]:
    """Return each request after those that it waits for. Raises ConfigError if that is impossible."""
    by_name: dict[str, _Request] = {}
    for request in requests:
        other = by_name.setdefault(request.name, request)
        if other is not request:
            wrong_row(
                path,
                request.asked.line,
                f"request_id: {request.name!r} is that of line {other.asked.line}, too",
            )
    n_left = {request.name: len(request.links) for request in requests}
    waiting: dict[str, list[_Request]] = {}
    for request in requests:
        for link in request.links:
            awaited = by_name.get(link.name)
            if awaited is None:
                wrong_row(path, request.asked.line, f"{link.field}: no row has the request_id {link.name!r}")
            if awaited.play != request.play:
                wrong_row(
                    path,
                    request.asked.line,
                    f"{link.field}: {link.name!r} is of the play {awaited.play!r}, and the request of "
                    f"{request.play!r}",
                )
            waiting.setdefault(link.name, []).append(request)
    ready = deque(request for request in requests if not request.links)
    ordered: list[_Request] = []
    while ready:
        request = ready.popleft()
        ordered.append(request)
        for follower in waiting.get(request.name, ()):
            n_left[follower.name] -= 1
            if not n_left[follower.name]:
                ready.append(follower)
    if len(ordered) < len(requests):
        _wrong_circle(path, by_name, n_left)
    return ordered


def _wrong_circle(path: Path, by_name: dict[str, _Request], n_left: dict[str, int]) -> NoReturn:
    """Raise ConfigError for a request in a circle of waits."""
    followed: dict[str, _Link] = {}
    request = next(request for request in by_name.values() if n_left[request.name])
    while request.name not in followed:
        link = followed[request.name] = next(link for link in request.links if n_left[link.name])
        request = by_name[link.name]
    link = followed[request.name]
    what = "is the request itself" if link.name == request.name else f"waits for {request.name!r} in its turn"
    wrong_row(path, request.asked.line, f"{link.field}: {link.name!r} {what}, so none of them can come")
