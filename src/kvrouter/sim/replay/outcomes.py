"""The outcomes of a replay, about 100 bytes each: a replay of a million requests holds them all."""

from collections.abc import Iterable, Iterator, Mapping
from math import isnan, nan
from struct import Struct

import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import WorkerId
from kvrouter.sim.replay.outcome import Move, Outcome

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_FIELDS = (
    ("number", "Q"),
    ("arrived_s", "d"),
    ("placed_s", "d"),
    ("first_s", "d"),
    ("last_s", "d"),
    ("prefill", "q"),
    ("decode", "q"),
    ("input_tokens", "I"),
    ("output_tokens", "I"),
    ("ceiling_tokens", "I"),
    ("generated_tokens", "I"),
    ("cached_tokens", "I"),
    ("predicted_tokens", "I"),
    ("attempts", "I"),
    ("moves_from", "Q"),
    ("n_moves", "H"),
    ("error", "H"),
    ("reason", "H"),
    ("crosses", "B"),
    ("is_critical", "B"),
)
"""A record's fields with their types, as ``struct`` writes them. A missing moment is NaN, a missing worker is
-1, ``error`` and ``reason`` are numbers of texts."""

_MOVE_FIELDS = (("bytes", "Q"), ("src", "H"), ("dst", "H"))

_RECORD, _MOVE = (Struct("<" + "".join(code for _, code in fields)) for fields in (_FIELDS, _MOVE_FIELDS))

_NUMPY = {"Q": "<u8", "q": "<i8", "d": "<f8", "I": "<u4", "H": "<u2", "B": "<u1"}

_DTYPE, _MOVE_DTYPE = (
    np.dtype([(name, _NUMPY[code]) for name, code in fields]) for fields in (_FIELDS, _MOVE_FIELDS)
)


class OutcomeTable:
    """Outcomes as columns, one row each."""

    def __init__(self, outcomes: "Outcomes", rows: npt.NDArray[np.void], moves: npt.NDArray[np.void]) -> None:
        self._outcomes = outcomes
        self._moves = moves
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, flags: Flags) -> "OutcomeTable":
        """Return the rows that are flagged."""
        return OutcomeTable(self._outcomes, self.rows[flags], self._moves)

    def total(self, name: str) -> int:
        """Return the sum of a column."""
        return int(self.rows[name].sum(dtype=np.int64))

    @property
    def failed(self) -> Flags:
        """Which requests ended with an error."""
        flags: Flags = self.rows["error"] != 0
        return flags

    @property
    def ttft_s(self) -> Floats:
        """Seconds from the arrival to the first token; NaN without one."""
        found: Floats = self.rows["first_s"] - self.rows["arrived_s"]
        return found

    @property
    def itl_s(self) -> Floats:
        """Mean seconds between two tokens; NaN with fewer than two."""
        gaps = self.rows["generated_tokens"].astype(np.float64) - 1.0
        gaps[gaps < 1.0] = np.nan
        found: Floats = (self.rows["last_s"] - self.rows["first_s"]) / gaps
        return found

    @property
    def e2e_s(self) -> Floats:
        """Seconds from the arrival to the last token; NaN where it did not end well."""
        found: Floats = self.rows["last_s"] - self.rows["arrived_s"]
        found[self.failed] = np.nan
        return found

    @property
    def computed_tokens(self) -> dict[int, int]:
        """Prompt tokens that were computed, by the worker that did."""
        rows = self.rows
        workers = np.where(rows["prefill"] >= 0, rows["prefill"], rows["decode"])
        tokens = rows["input_tokens"].astype(np.int64) - rows["cached_tokens"]
        names, places = np.unique(workers, return_inverse=True)
        sums = np.bincount(places, weights=tokens, minlength=len(names))
        return {int(name): int(n) for name, n in zip(names, sums, strict=True) if name >= 0}

    def counts(self, name: str) -> dict[str, int]:
        """Return how many requests have each text of ``error`` or ``reason``, without ""."""
        numbers, counts = np.unique(self.rows[name], return_counts=True)
        texts = self._outcomes.texts
        found = {texts[number]: int(n) for number, n in zip(numbers, counts, strict=True) if texts[number]}
        return dict(sorted(found.items()))

    def moves(self) -> Iterator[tuple[int, Move]]:
        """Yield the KV that moved, with the row that it belongs to."""
        first, n_moves = self.rows["moves_from"], self.rows["n_moves"]
        for row in np.flatnonzero(n_moves):
            for at in range(int(first[row]), int(first[row]) + int(n_moves[row])):
                yield int(row), self._outcomes.move(at)

    def moved(self) -> list[tuple[Move, int]]:
        """Return for each pair of places the bytes that moved in all, and the number of moves."""
        n_moves = self.rows["n_moves"].astype(np.int64)
        begins = np.repeat(self.rows["moves_from"].astype(np.int64), n_moves)
        within = np.arange(len(begins)) - np.repeat(np.cumsum(n_moves) - n_moves, n_moves)
        moves = self._moves[begins + within]
        pairs = moves["src"].astype(np.int64) << 16 | moves["dst"]
        names, places, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        total = np.zeros(len(names), np.int64)
        np.add.at(total, places, moves["bytes"].astype(np.int64))
        known = self._outcomes.places
        return [
            (Move(known[int(name) >> 16], known[int(name) & 0xFFFF], int(n_bytes)), int(count))
            for name, n_bytes, count in zip(names, total, counts, strict=True)
        ]


class Outcomes:
    """Outcomes one after the other, in the order in which they were added."""

    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        self.texts: list[str] = []
        """The errors and reasons that were met, "" the first."""
        self.places: list[Mapping[str, str]] = []
        """The places between which KV moved."""
        self._records = bytearray()
        self._moves = bytearray()
        self._text_numbers: dict[str, int] = {}
        self._place_numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._text_number("")
        self.extend(outcomes)

    def __len__(self) -> int:
        return len(self._records) // _RECORD.size

    def __iter__(self) -> Iterator[Outcome]:
        return map(self._outcome, range(0, len(self._records), _RECORD.size))

    def append(self, outcome: Outcome) -> None:
        """Add an outcome that is whole."""
        moves_from = len(self._moves) // _MOVE.size
        for move in outcome.moves:
            src, dst = self._place_number(move.src), self._place_number(move.dst)
            self._moves += _MOVE.pack(move.bytes, src, dst)
        self._records += _RECORD.pack(
            outcome.number,
            outcome.arrived_s,
            nan if outcome.placed_s is None else outcome.placed_s,
            nan if outcome.first_s is None else outcome.first_s,
            nan if outcome.last_s is None else outcome.last_s,
            -1 if outcome.prefill is None else outcome.prefill,
            -1 if outcome.decode is None else outcome.decode,
            outcome.input_tokens,
            outcome.output_tokens,
            outcome.ceiling_tokens,
            outcome.generated_tokens,
            outcome.cached_tokens,
            outcome.predicted_tokens,
            outcome.attempts,
            moves_from,
            len(outcome.moves),
            self._text_number(outcome.error),
            self._text_number(outcome.reason),
            outcome.crosses,
            outcome.is_critical,
        )

    def extend(self, outcomes: Iterable[Outcome]) -> None:
        """Add them in turn."""
        for outcome in outcomes:
            self.append(outcome)

    def table(self) -> OutcomeTable:
        """Return the outcomes as columns, by number."""
        rows = np.frombuffer(self._records, _DTYPE)
        by_number = rows[np.argsort(rows["number"], kind="stable")]
        return OutcomeTable(self, by_number, np.frombuffer(bytes(self._moves), _MOVE_DTYPE))

    def move(self, number: int) -> Move:
        """Return the move of this number."""
        n_bytes, src, dst = _MOVE.unpack_from(self._moves, number * _MOVE.size)
        return Move(self.places[src], self.places[dst], n_bytes)

    def _outcome(self, at: int) -> Outcome:
        found = dict(zip((name for name, _ in _FIELDS), _RECORD.unpack_from(self._records, at), strict=True))
        moves_from, n_moves = found.pop("moves_from"), found.pop("n_moves")
        for name in ("placed_s", "first_s", "last_s"):
            found[name] = None if isnan(found[name]) else found[name]
        for name in ("prefill", "decode"):
            found[name] = None if found[name] < 0 else WorkerId(found[name])
        for name in ("error", "reason"):
            found[name] = self.texts[found[name]]
        for name in ("crosses", "is_critical"):
            found[name] = bool(found[name])
        return Outcome(
            **found, moves=[self.move(number) for number in range(moves_from, moves_from + n_moves)]
        )

    def _text_number(self, text: str) -> int:
        number = self._text_numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def _place_number(self, place: Mapping[str, str]) -> int:
        key = tuple(sorted(place.items()))
        number = self._place_numbers.setdefault(key, len(self.places))
        if number == len(self.places):
            self.places.append(place)
        return number
