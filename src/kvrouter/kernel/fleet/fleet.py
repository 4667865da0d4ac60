"""The fleet of one model: its workers, their ranks and slots."""

import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvrouter.core.cordon_rules import Cordon, CordonRules
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, Epoch, ModelName, Slot, WorkerId, WorkerRank
from kvrouter.core.workers import KvTransfers, LoadReport, Role, WorkerCard
from kvrouter.kernel.fleet.circuit import BrokenPairs, Pair
from kvrouter.kernel.fleet.columns import INTEGER_MAX, UNKNOWN, BoolColumn, SlotColumn
from kvrouter.kernel.fleet.slots import Slots
from kvrouter.kernel.topology.policy import policy_of, validate_runtime_config

MAX_SLOTS: Final = 65_536
"""The most worker ranks of one model's fleet."""

REPORTED_BLOCKS_FACTOR: Final = 4
"""The most times the card's number of blocks that load reports may raise a rank's number of blocks to."""

MEASURED_TOKENS_MIN: Final = 1024
"""The fetched tokens from which an engine's report is used to measure the KV bytes of a token."""

MEASURED_ALIKE: Final = 0.05
"""The least relative change of measured KV bytes that counts: engines count full blocks."""

Key = TypeVar("Key")
Built = TypeVar("Built")


class FleetChange(NamedTuple):
    """The slots that a card changed. Drop the state of ``freed`` slots before using the ``joined`` ones: a
    slot may be in both. ``warnings`` are about the card, one line each.
    """

    joined: tuple[Slot, ...]
    freed: tuple[Slot, ...]
    warnings: tuple[str, ...]


class _Member:
    """One worker: its card, slots by rank, liveness, circuit state and cordons. A snapshot shares it, so that
    another card or other slots make another member.
    """

    __slots__ = ("alive", "card", "circuit_open", "cordons", "slots")

    def __init__(self, card: WorkerCard) -> None:
        self.card = card
        self.alive = True
        self.circuit_open = False
        self.cordons: tuple[Cordon, ...] = ()
        self.slots: Mapping[DpRank, Slot] = {}


def _answering(fleet: "Fleet") -> list[WorkerCard]:
    """Return the cards of the live workers; all cards when no worker is alive."""
    return [card for card in fleet if fleet.is_alive(card.worker_id)] or list(fleet)


def _takes_calls(fleet: "Fleet", _key: None) -> bool:
    return all(card.takes_calls for card in _answering(fleet))


def _names(fleet: "Fleet", _: None) -> Mapping[str, str | None]:
    counts = Counter(item for card in _answering(fleet) for item in card.names.items())
    return dict(item for item, _ in reversed(counts.most_common()))


def _context_length_tokens(fleet: "Fleet", _: None) -> int | None:
    cards = _answering(fleet)
    answers = [card for card in cards if card.role is not Role.PREFILL]
    takes_new = [card for card in answers if card.takes_new_requests and not fleet.cordons_on(card.worker_id)]
    lengths = [card.context_length for card in takes_new or answers or cards]
    return max((length for length in lengths if length is not None), default=None)


def _engine_kind(fleet: "Fleet", _: None) -> str:
    kinds = Counter(card.engine.partition(" ")[0] for card in fleet)
    return max(sorted(kinds), key=kinds.__getitem__, default="")


def _unsure_blocks(fleet: "Fleet", _: None) -> npt.NDArray[np.uint32] | None:
    unsure = np.zeros(fleet.n_slots, np.uint32)
    for card in fleet:
        for slot in fleet.slots_of(card.worker_id):
            unsure[slot] = -(-card.lookahead_tokens // fleet.block_size)
    return unsure if unsure.any() else None


def _shortest_context_tokens(fleet: "Fleet", _: None) -> int:
    return min((card.context_length or INTEGER_MAX for card in fleet), default=0)


def _has_open_circuits(fleet: "Fleet", _: None) -> bool:
    return bool(fleet.columns.circuit_open.any())


def _unreached_from(fleet: "Fleet", prefill_slot: Slot) -> BoolColumn | None:
    rank = fleet.rank_at(prefill_slot)
    workers = () if rank is None else fleet.broken_pairs.of(rank.worker_id)
    column = np.zeros(fleet.n_slots, np.bool_)
    for worker_id in workers:
        column[list(fleet.slots_of(worker_id))] = True
    return column if column.any() else None


def _rank_order(fleet: "Fleet", _: None) -> SlotColumn:
    columns = fleet.columns
    order = np.lexsort((columns.dp_rank, columns.worker_id))
    return order[columns.present[order]]


class Derived(Generic[Built]):
    """A cached attribute of a fleet: computed from cards and liveness when read, until the fleet changes."""

    def __init__(self, build: Callable[["Fleet", None], Built]) -> None:
        self._build = build

    def __get__(self, fleet: "Fleet", _: type["Fleet"]) -> Built:
        return fleet.derived(self._build, None)


class Fleet:
    """The workers of one model and their columns over slots. Reading has no side effects.

    A freed slot is reused by a later worker rank. ``n_slots`` is one more than the highest slot in use, and
    the length of every column. ``policies`` are the transfer policies that prefill workers publish.
    """

    def __init__(self, model: ModelName, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self._slots = Slots()
        self.n_slots = 0
        """One more than the highest slot in use."""
        self.columns = self._slots.columns
        self.places = self._slots.places
        self.policies = self._slots.policies
        self.broken_pairs = BrokenPairs()
        self.refusing_pairs: dict[Pair, bool] = {}
        """The pairs whose engines refused each other; True while a request may try the pair again."""
        self._members: dict[WorkerId, _Member] = {}
        self._snapshot: Fleet | None = None
        self._derived: dict[tuple[object, object], Any] = {}
        self._derived_from_places: dict[tuple[object, object], Any] = {}
        self._kv_bytes_per_token: int | None = None
        self._cordons = CordonRules()
        self._last_took_calls = False
        self._last_names: Mapping[str, str | None] = {}

    # --- workers

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[WorkerCard]:
        return (member.card for member in self._members.values())

    def card(self, worker_id: WorkerId) -> WorkerCard | None:
        """Return the worker's card; None when it is not in the fleet."""
        member = self._members.get(worker_id)
        return None if member is None else member.card

    def is_alive(self, worker_id: WorkerId) -> bool:
        """Whether the worker is in the fleet and answers."""
        member = self._members.get(worker_id)
        return member is not None and member.alive

    def cordons_on(self, worker_id: WorkerId) -> tuple[Cordon, ...]:
        """Return the cordons that keep new requests away from the worker."""
        member = self._members.get(worker_id)
        return () if member is None else member.cordons

    def may_take(self, card: WorkerCard) -> bool:
        """Whether the worker of a card in the fleet is alive and may get new requests."""
        member = self._members[card.worker_id]
        return member.alive and card.takes_new_requests and not member.cordons

    def slots_of(self, worker_id: WorkerId) -> tuple[Slot, ...]:
        """Return the slots of the worker's ranks, in the order of ranks."""
        member = self._members.get(worker_id)
        return () if member is None else tuple(member.slots.values())

    def slot_of(self, rank: WorkerRank) -> Slot | None:
        """Return the slot of a worker rank; None when it is not in the fleet."""
        member = self._members.get(rank.worker_id)
        return None if member is None else member.slots.get(rank.dp_rank)

    def rank_at(self, slot: Slot) -> WorkerRank | None:
        """Return the worker rank at ``slot``; None when the slot is free."""
        ranks = self._slots.ranks
        return ranks[slot] if 0 <= slot < len(ranks) else None

    def card_at(self, slot: Slot) -> WorkerCard | None:
        """Return the card of the worker at ``slot``; None when the slot is free."""
        rank = self.rank_at(slot)
        return None if rank is None else self._members[rank.worker_id].card

    def kv_blocks(self, slot: Slot) -> int | None:
        """Return the number of KV blocks of the rank at ``slot``: the larger of its card's number and its
        latest load report's, at most :data:`REPORTED_BLOCKS_FACTOR` times the card's. None when the card has
        no number, or the slot is free.
        """
        card = self.card_at(slot)
        if card is None or not card.runtime_config.total_kv_blocks:
            return None
        in_card, reported = card.runtime_config.total_kv_blocks, int(self.columns.total_blocks[slot])
        return min(max(in_card, reported), REPORTED_BLOCKS_FACTOR * in_card)

    has_open_circuits = Derived(_has_open_circuits)
    """Whether the circuit of some worker is open."""

    @property
    def takes_calls(self) -> bool:
        """Whether every worker passes clients' calls to its engine unchanged; without any worker, whether the
        last ones did.
        """
        return self.derived(_takes_calls, None) if self._members else self._last_took_calls

    context_length_tokens = Derived(_context_length_tokens)
    """The most tokens of prompt and answer that a client may request: the longest context of the workers that
    may answer now, else of all workers. None when unknown.
    """

    engine_kind = Derived(_engine_kind)
    """The most common engine of the workers, such as ``vllm``; empty when unknown."""

    unsure_blocks = Derived(_unsure_blocks)
    """The blocks at the end of a match, by slot, that an engine may not reuse because it also compares the
    tokens behind them (``lookahead_tokens``); None when all are 0.
    """

    shortest_context_tokens = Derived(_shortest_context_tokens)
    """The shortest context of all workers, in tokens; 0 without any worker."""

    @property
    def names(self) -> Mapping[str, str | None]:
        """Further names that calls may use, as live workers report: an alias of the model (None), or an
        adapter. The majority decides; without any worker, the last worker's names.
        """
        return self.derived(_names, None) if self._members else self._last_names

    # --- columns over slots

    def unreached_from(self, prefill_slot: Slot) -> BoolColumn | None:
        """Return the slots of the decode workers that form a broken pair with the prefill worker at
        ``prefill_slot``; None when there are none.
        """
        return self.derived(_unreached_from, prefill_slot) if self.broken_pairs else None

    rank_order = Derived(_rank_order)
    """The slots in use, sorted by worker rank, independent of the order in which workers joined."""

    @property
    def snapshot(self) -> "Fleet":
        """The columns, places, slots and cards of this fleet without later changes, the same object until the
        fleet changes. The loads that workers report are not such changes, except a new number of blocks.
        """
        if self._snapshot is None:
            self._snapshot = self._copy()
        return self._snapshot

    def _copy(self) -> "Fleet":
        """Return a copy, which shares the members and no column."""
        copied = Fleet(self.model, self.block_size)
        copied._slots, copied.n_slots = self._slots.copy(), self.n_slots
        copied.columns, copied.places = copied._slots.columns, copied._slots.places
        copied.policies, copied.broken_pairs = copied._slots.policies, self.broken_pairs.copy()
        copied.refusing_pairs, copied._members = dict(self.refusing_pairs), dict(self._members)
        copied._kv_bytes_per_token, copied._cordons = self._kv_bytes_per_token, self._cordons
        copied._last_took_calls, copied._last_names = self._last_took_calls, self._last_names
        return copied

    def derived(self, build: Callable[["Fleet", Key], Built], key: Key) -> Built:
        """Return ``build(self, key)``, cached until the fleet changes; ``key`` must be hashable.

        For values computed from cards and liveness alone: load reports are not a change. A builder with a key
        per slot must build small values, and no builder may have a key per request.
        """
        try:
            found: Built = self._derived[build, key]
        except KeyError:
            found = self._derived[build, key] = build(self, key)
        return found

    def derived_from_places(self, build: Callable[["Fleet", Key], Built], key: Key) -> Built:
        """Return ``build(self, key)``, cached until a rank joins, leaves or moves: for values computed from
        roles, domains, levels, transfer policies, KV formats, refusing pairs and KV bytes per token alone.
        """
        try:
            found: Built = self._derived_from_places[build, key]
        except KeyError:
            found = self._derived_from_places[build, key] = build(self, key)
        return found

    # --- changes

    def join(self, card: WorkerCard) -> FleetChange:
        """Add a worker, a new incarnation (which replaces the old one), or a new card of a worker.

        Raises ConfigError, with the field as ``param`` and the fleet unchanged, for another model, another
        block size, impossible ranks, a number that no column can hold, a full fleet, or an invalid runtime
        config.
        """
        member = self._members.get(card.worker_id)
        n_own = 0 if member is None else len(member.slots)
        warnings = _validate(card, self, self._slots.in_use - n_own)
        freed: list[Slot] = []
        if member is not None and member.card.incarnation != card.incarnation:
            freed += self._drop(member)
            member = None
        joined = self._apply(member, card, freed)
        self._changed()
        return FleetChange(joined, tuple(freed), tuple(warnings))

    def leave(self, worker_id: WorkerId, incarnation: Epoch) -> list[Slot]:
        """Remove a worker and return its freed slots; empty when the fleet has another incarnation of it."""
        member = self._members.get(worker_id)
        if member is None or member.card.incarnation != incarnation:
            return []
        if len(self._members) == 1:
            self._last_names, self._last_took_calls = self.names, self.takes_calls
        freed = self._drop(member)
        del self._members[worker_id]
        self._changed()
        return freed

    def set_alive(self, worker_id: WorkerId, alive: bool) -> bool:
        """Set whether a worker answers. Return whether the worker is in the fleet."""
        member = self._members.get(worker_id)
        if member is None:
            return False
        if member.alive != alive:
            member.alive = alive
            for slot in member.slots.values():
                self.columns.write(slot, "alive", alive)
            self._changed()
        return True

    def set_cordons(self, rules: CordonRules) -> list[WorkerCard]:
        """Replace all cordons by ``rules``; return the cards of newly cordoned and uncordoned workers."""
        self._cordons = rules
        changed = []
        for member in self._members.values():
            was_cordoned = bool(member.cordons)
            member.cordons = rules.on(member.card, member.card.runtime_config.domains)
            if bool(member.cordons) != was_cordoned:
                changed.append(member.card)
                for slot in member.slots.values():
                    self.columns.write(slot, "cordoned", not was_cordoned)
        if changed:
            self._changed()
        return changed

    def set_circuit_open(self, worker_id: WorkerId, is_open: bool) -> None:
        """Set whether a worker's circuit is open; ignored for a worker that is not in the fleet."""
        member = self._members.get(worker_id)
        if member is not None and member.circuit_open != is_open:
            member.circuit_open = is_open
            for slot in member.slots.values():
                self.columns.write(slot, "circuit_open", is_open)
            self._changed()

    def set_broken_pair(self, prefill: WorkerId, decode: WorkerId, is_broken: bool) -> None:
        """Set whether KV from one worker does not reach another; they need not be in the fleet."""
        if self.broken_pairs.put(prefill, decode, is_broken):
            self._snapshot = None
            for slot in self.slots_of(prefill):
                self._derived.pop((_unreached_from, slot), None)  # no other derived value depends on it

    def set_refusing_pair(self, pair: Pair, is_tried: bool | None) -> None:
        """Set whether a request may try again a pair whose engines refused each other; None: they do not."""
        if self.refusing_pairs.get(pair) is is_tried:
            return
        if is_tried is None:
            del self.refusing_pairs[pair]
        else:
            self.refusing_pairs[pair] = is_tried
        self._derived_from_places.clear()
        self._changed()

    def set_aggregated_failed(self, has_failed: bool) -> None:
        """Set whether the last request failed that ran aggregated because every pair was broken."""
        if self.broken_pairs.aggregated_failed != has_failed:
            self.broken_pairs.aggregated_failed = has_failed
            self._snapshot = None

    def report(self, report: LoadReport) -> bool:
        """Store the latest load of a worker rank. Return whether the rank is in the fleet.

        The engine's KV transfers measure the KV bytes per token, for cards that do not publish them.
        """
        slot = self.slot_of(report.rank)
        if slot is None:
            return False
        if report.kv_transfers is not None:
            self._measure_kv(report.kv_transfers)
        write = self.columns.write
        write(slot, "has_report", True)
        write(slot, "report_active_blocks", report.active_blocks)
        write(slot, "report_prefill_tokens", _known(report.active_prefill_tokens))
        write(slot, "report_running_requests", report.running_requests)
        write(slot, "report_waiting_requests", report.waiting_requests)
        if report.total_blocks > 0 and self.columns.total_blocks.item(slot) != report.total_blocks:
            write(slot, "total_blocks", report.total_blocks)
            self._snapshot = None
        return True

    # --- internals

    def _measure_kv(self, kv_transfers: KvTransfers) -> None:
        if kv_transfers.tokens < MEASURED_TOKENS_MIN or kv_transfers.bytes <= 0:
            return
        measured, before = round(kv_transfers.bytes / kv_transfers.tokens), self._kv_bytes_per_token
        if before is not None and abs(measured - before) <= MEASURED_ALIKE * before:
            return
        self._kv_bytes_per_token = measured
        for member in self._members.values():
            if member.card.runtime_config.kv_bytes_per_token is None:
                for slot in member.slots.values():
                    self.columns.write(slot, "kv_bytes_per_token", measured)
        self._derived_from_places.clear()
        self._derived.clear()
        self._snapshot = None

    def _apply(self, before: _Member | None, card: WorkerCard, freed: list[Slot]) -> tuple[Slot, ...]:
        wanted = {rank.dp_rank for rank in card.ranks()}
        member = self._members[card.worker_id] = _Member(card)
        slots: dict[DpRank, Slot] = {}
        same_blocks, is_elsewhere = True, False
        if before is not None:
            member.alive, member.circuit_open = before.alive, before.circuit_open
            slots.update(before.slots)
            same_blocks = before.card.runtime_config.total_kv_blocks == card.runtime_config.total_kv_blocks
            is_elsewhere = _place_of(before.card) != _place_of(card)
        gone = [dp_rank for dp_rank in slots if dp_rank not in wanted]
        freed.extend(self._slots.free(slots.pop(dp_rank)) for dp_rank in gone)
        member.cordons = self._cordons.on(card, card.runtime_config.domains)
        joined = []
        for rank in card.ranks():
            slot = slots.get(rank.dp_rank)
            is_new = slot is None
            if slot is None:
                slot = slots[rank.dp_rank] = self._slots.take(rank)
                joined.append(slot)
            self._write(slot, member, keep_total_blocks=same_blocks and not is_new)
        if joined or gone or is_elsewhere:
            self._derived_from_places.clear()
        member.slots = dict(sorted(slots.items()))
        return tuple(joined)

    def _write(self, slot: Slot, member: _Member, *, keep_total_blocks: bool) -> None:
        card, config, write = member.card, member.card.runtime_config, self.columns.write
        write(slot, "alive", member.alive)
        write(slot, "draining", card.draining)
        write(slot, "cordoned", bool(member.cordons))
        write(slot, "engine_silent", card.engine_silent)
        write(slot, "circuit_open", member.circuit_open)
        write(slot, "prefill", card.role is Role.PREFILL)
        write(slot, "decode_or_both", card.role is not Role.PREFILL)
        write(slot, "decode_only", card.decode_only)
        kv_bytes = config.kv_bytes_per_token
        write(slot, "kv_bytes_per_token", _known(self._kv_bytes_per_token if kv_bytes is None else kv_bytes))
        write(slot, "context_length", card.context_length or INTEGER_MAX)
        write(slot, "prompt_tokens_min", config.prompt_tokens_min or 0)
        longest = config.prompt_tokens_max
        write(slot, "prompt_tokens_max", INTEGER_MAX if longest is None else longest)
        write(slot, "seats", config.max_num_seqs or np.inf)
        if not keep_total_blocks:  # a load report may have a better number
            write(slot, "total_blocks", config.total_kv_blocks or np.inf)
        self.places.put(slot, config.domains, config.taints)
        if card.role is Role.PREFILL:
            self.policies.put(slot, policy_of(config, None))
        else:
            self.policies.remove(slot)

    def _drop(self, member: _Member) -> list[Slot]:
        freed = [self._slots.free(slot) for slot in member.slots.values()]
        self._derived_from_places.clear()
        return freed

    def _changed(self) -> None:
        self._slots.trim()
        self.n_slots = len(self._slots.ranks)
        self._derived.clear()
        self._snapshot = None


def _validate(card: WorkerCard, fleet: Fleet, n_others: int) -> list[str]:
    """Validate a card and return warnings; ``n_others`` counts other workers' slots. Raises ConfigError."""
    if card.model != fleet.model:
        raise ConfigError(f"model: worker {card.worker_id} serves {card.model!r}, not {fleet.model!r}",
                          param="model")  # fmt: skip
    if card.block_size not in (None, fleet.block_size):
        raise ConfigError(
            f"block_size: worker {card.worker_id} has blocks of {card.block_size} tokens, "
            f"the fleet of {fleet.model!r} has {fleet.block_size}",
            param="block_size",
        )
    if card.dp_size < 1 or card.dp_start < 0:
        raise ConfigError(
            f"dp_size: worker {card.worker_id} has {card.dp_size} ranks from {card.dp_start}",
            param="dp_size",
        )
    _check_integers(card)
    if n_others + card.dp_size > MAX_SLOTS:
        raise ConfigError(
            f"dp_size: the fleet of {fleet.model!r} is full: {MAX_SLOTS} worker ranks", param="dp_size"
        )
    return validate_runtime_config(card.runtime_config)


def _place_of(card: WorkerCard) -> tuple[object, ...]:
    """Return the fields of a card that determine its KV transfers."""
    config = card.runtime_config
    return (
        card.role,
        config.topology_domains,
        config.topology_levels,
        config.kv_transfer_domain,
        config.kv_transfer_enforcement,
        config.kv_transfer_preferred_weight,
        config.kv_bytes_per_token,
        config.kv_format,
        card.engine,
    )


def _check_integers(card: WorkerCard) -> None:
    """Raise ConfigError for a number that no column can hold, before any slot is written."""
    config = card.runtime_config
    for name, number in (
        ("worker_id", card.worker_id),
        ("dp_start", card.dp_start + card.dp_size),
        ("context_length", card.context_length),
        ("total_kv_blocks", config.total_kv_blocks),
        ("max_num_seqs", config.max_num_seqs),
        ("kv_bytes_per_token", config.kv_bytes_per_token),
        ("prompt_tokens_min", config.prompt_tokens_min),
        ("prompt_tokens_max", config.prompt_tokens_max),
    ):
        if number is not None and not 0 <= number <= INTEGER_MAX:
            raise ConfigError(f"{name}: 0 to {INTEGER_MAX}, not {reprlib.repr(number)}", param=name)


def _known(count: int | None) -> int:
    return UNKNOWN if count is None else count
