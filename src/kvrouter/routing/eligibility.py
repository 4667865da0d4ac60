"""Eligibility: masks over slots, each with the reason for which it refuses."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvrouter.core.constraints import Pin, RoutingConstraints
from kvrouter.core.errors import Reason
from kvrouter.core.ids import Taint, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.fleet import UNKNOWN, BoolColumn, Fleet, IntColumn
from kvrouter.fleet.columns import INTEGER_MAX
from kvrouter.routing.request import RouteRequest, View


def fitted(column: IntColumn, n_slots: int) -> IntColumn:
    """Return the first ``n_slots`` entries; raises ValueError when the column is shorter."""
    length = len(column)
    if length == n_slots:
        return column
    if length < n_slots:
        raise ValueError(f"a column of {length} entries for a fleet of {n_slots} slots")
    return column[:n_slots]


def required_taints(constraints: RoutingConstraints, *, prefill: bool) -> frozenset[Taint]:
    """Return what the worker of a leg must carry."""
    if prefill or not constraints.required_decode_taints:
        return constraints.required_taints
    return constraints.required_taints | constraints.required_decode_taints


class Mask(NamedTuple):
    """A mask over slots with its complement and the number of slots that it allows."""

    allowed: BoolColumn
    refused: BoolColumn
    n_allowed: int

    def within(self, other: BoolColumn) -> "Mask":
        """Return the slots that both allow."""
        return mask_of(self.allowed & other)


def mask_of(allowed: BoolColumn) -> Mask:
    """Return the mask that allows these slots."""
    return Mask(allowed, ~allowed, int(np.count_nonzero(allowed)))


class Step(NamedTuple):
    """One question, and the slots that pass it; the others are refused for ``reason``."""

    reason: Reason
    passed: BoolColumn


class Stopped(NamedTuple):
    """The slots that were refused first for ``reason``."""

    reason: Reason
    slots: BoolColumn


class Screen(NamedTuple):
    """Who may take one leg by all that does not depend on the other leg, nor on load.

    ``role`` are the worker ranks of the leg's role; ``steps`` are in the order in which they are asked, after
    whether a rank takes anything new at all.
    """

    leg: Leg
    role: BoolColumn
    steps: tuple[Step, ...]
    mask: Mask


class _RoleColumns(NamedTuple):
    role: BoolColumn
    steps: tuple[Step, ...]
    ready: Mask
    has_prompt_ranges: bool
    """Whether some worker prefills prompts of some lengths alone."""


_PREFILL, _DECODE, _AGGREGATED = Leg.PREFILL, Leg.DECODE, Leg.AGGREGATED
"""An enumeration's attributes are slow before Python 3.12."""


def screen(request: RouteRequest, fleet: Fleet, leg: Leg) -> Screen:
    """Ask everything of the fleet that this request asks for ``leg``."""
    columns = fleet.derived(_role_columns, (leg, request.last_resort))
    pin = request.prefill_pin if leg is Leg.PREFILL else request.pin
    required = required_taints(request.constraints, prefill=leg is Leg.PREFILL)
    context_tokens = _context_tokens(request, leg)
    is_short_for_some = context_tokens > fleet.shortest_context_tokens
    near = None if leg is _DECODE else request.near
    is_bound = near is not None and near.is_required
    # of a prompt that its engine tokenizes nobody knows how long it is
    is_ranged = columns.has_prompt_ranges and leg is not _DECODE and request.isl_tokens > 0
    is_special = request.excluded or is_short_for_some or is_bound or is_ranged
    if not required and pin is None and not is_special:
        return Screen(leg, columns.role, columns.steps, columns.ready)
    steps = list(columns.steps)
    if request.excluded:
        steps.append(Step(Reason.EXCLUDED, _not_of(fleet, request.excluded)))
    if is_short_for_some:
        fits = fleet.columns.context_length >= context_tokens
        steps.append(Step(Reason.CONTEXT_TOO_SHORT, fits))
    if is_ranged:
        tokens, ranges = request.isl_tokens, fleet.columns
        passed = (ranges.prompt_tokens_min <= tokens) & (tokens <= ranges.prompt_tokens_max)
        steps.append(Step(Reason.PROMPT_OUT_OF_RANGE, passed))
    if pin is not None:
        steps.append(Step(Reason.PINNED_ELSEWHERE, _pinned(fleet, pin)))
    if near is not None and near.is_required:
        nobody = np.zeros(fleet.n_slots, np.bool_)
        passed = nobody if near.taint is None else fleet.carries(near.taint)
        steps.append(Step(Reason.FAR_FROM_FRONTEND, passed))
    steps.extend(Step(Reason.TAINT_MISSING, fleet.carries(taint)) for taint in sorted(required))
    allowed = columns.ready.allowed
    for step in steps:
        allowed = allowed & step.passed
    return Screen(leg, columns.role, tuple(steps), mask_of(allowed))


def ready(fleet: Fleet, leg: Leg, *, last_resort: bool) -> Mask:
    """Return the ranks of the leg's role that answer, with their engines, do not drain, are not cordoned and,
    but as a ``last_resort``, have no open circuit: one object until the fleet changes.
    """
    return fleet.derived(_role_columns, (leg, last_resort)).ready


def not_busy(view: View) -> BoolColumn | None:
    """Return the slots that are under every busy threshold; None when none is set.

    Judged on what the worker last reported and on what was booked or ended since then, but never on less than
    what is booked there: requests that come at once count each other, whatever the last report said. On what
    is booked alone until the first report comes, and for tokens that an engine does not report. Where the
    number of a worker's blocks is unknown, so is the fraction, and the worker is not busy by it.
    """
    fraction, tokens = (
        view.settings.active_decode_blocks_threshold,
        view.settings.active_prefill_tokens_threshold,
    )
    if fraction is None and tokens is None:
        return None
    columns, n_slots = view.fleet.columns, view.fleet.n_slots
    free = np.ones(n_slots, np.bool_)
    if fraction is not None:
        reported = np.where(columns.has_report, columns.report_active_blocks, UNKNOWN)
        active_blocks = load_by_slot(view.active_blocks, reported, view.blocks_at_report)
        free &= active_blocks / columns.total_blocks <= fraction
    if tokens is not None:
        reported = columns.report_prefill_tokens
        free &= load_by_slot(view.prefill_tokens, reported, view.tokens_at_report) <= tokens
    return free


def load_by_slot(booked: IntColumn, reported: IntColumn, at_report: IntColumn | None) -> IntColumn:
    """Return the load by slot: what is ``booked``, or the latest report with what changed since, if more."""
    booked = fitted(booked, len(reported))
    if at_report is None:
        return np.maximum(booked, reported)
    by_report = reported + booked - fitted(at_report, len(reported))
    return np.where(reported == UNKNOWN, booked, np.maximum(booked, by_report))


def able(who: Screen, not_busy: BoolColumn | None) -> Mask:
    """Return who may take the leg now."""
    return who.mask if not_busy is None else who.mask.within(not_busy)


def first_refusals(who: Screen, fleet: Fleet, later: Iterable[Step] = ()) -> list[Stopped]:
    """Return for each reason the slots of the role that it stopped first.

    ``later`` are the steps that follow the screen's own: domain, then busy. Where nobody has the role, it is
    the role that stops everybody who is here.
    """
    columns = fleet.columns
    left = who.role
    if not left.any():
        return [Stopped(Reason.WRONG_ROLE, columns.present)]
    stopped = []
    there = (
        Step(Reason.NOT_ALIVE, columns.alive),
        Step(Reason.DRAINING, ~columns.draining),
        Step(Reason.CORDONED, ~columns.cordoned),
        Step(Reason.ENGINE_SILENT, ~columns.engine_silent),
    )
    for step in (*there, *who.steps, *later):
        stopped.append(Stopped(step.reason, left & ~step.passed))
        left = left & step.passed
    return stopped


def _context_tokens(request: RouteRequest, leg: Leg) -> int:
    """What the context of a rank must hold that takes the leg: a prefill worker makes one token."""
    if leg is Leg.PREFILL and request.context_tokens:
        return request.isl_tokens + 1
    return request.context_tokens


def _role_columns(fleet: Fleet, key: tuple[Leg, bool]) -> _RoleColumns:
    leg, last_resort = key
    columns = fleet.columns
    role = columns.prefill if leg is _PREFILL else columns.decode_or_both
    if leg is _AGGREGATED:
        role = role & ~columns.decode_only
    has_ranges = bool(
        (columns.prompt_tokens_min > 0).any() or (columns.prompt_tokens_max < INTEGER_MAX).any()
    )
    there = role & columns.alive & ~(columns.draining | columns.cordoned | columns.engine_silent)
    if last_resort or not fleet.has_open_circuits:
        return _RoleColumns(role, (), mask_of(there), has_ranges)
    circuits = Step(Reason.CIRCUIT_OPEN, ~columns.circuit_open)
    return _RoleColumns(role, (circuits,), mask_of(there & circuits.passed), has_ranges)


def _not_of(fleet: Fleet, workers: Iterable[WorkerId]) -> BoolColumn:
    passed = np.ones(fleet.n_slots, np.bool_)
    for worker_id in workers:
        passed[list(fleet.slots_of(worker_id))] = False
    return passed


def _pinned(fleet: Fleet, pin: Pin) -> BoolColumn:
    passed = np.zeros(fleet.n_slots, np.bool_)
    if pin.dp_rank is None:
        passed[list(fleet.slots_of(pin.worker_id))] = True
    else:
        slot = fleet.slot_of(WorkerRank(pin.worker_id, pin.dp_rank))
        if slot is not None:
            passed[slot] = True
    return passed
