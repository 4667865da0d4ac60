"""Fits the timing of a mock engine to the first requests of a measured run, and measures how well it predicts
the others.

The result is the likeliest timing: each figure starts at the value expected from the model's size and the
GPU, and moves within its own spread by the first requests. Their stamps are compared with those of the same
requests on a mock engine, to which all requests come; of the later ones only arrivals and lengths are read.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import count, product
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.sim.calibrate.engine_run import engine_config, simulate
from kvrouter.sim.calibrate.kv_blocks import BlockBounds, KvBlocks, block_bounds
from kvrouter.sim.calibrate.measured_run import F64, MeasuredRun, Stamps
from kvrouter.sim.calibrate.model_shape import ModelShape
from kvrouter.sim.calibrate.roofline import Roofline, roofline

SPREADS = {
    "prefill_linear": 0.4,
    "prefill_base": 0.7,
    "prefill_attention": 0.5,
    "decode_base": 0.3,
    "decode_sequence": 0.7,
    "decode_kv_token": 0.4,
    "mixed_kv_token": 0.5,
}
"""The spread of each figure around its expected value: one standard deviation, as a logarithm."""

DECODE_SPREAD = 0.02
"""How far the time from first to last token may be from the mock engine's, as a logarithm."""

STEP_SPREAD = 0.1
"""How far the time from the schedule to the first token may be, as a logarithm, and that from arrival to the
first token, as a share of its mean. Where only a client measured, the first one is from arrival too.
"""

OUTLIER = 1.5
"""From this many standard deviations on a difference counts linearly, no longer by its square: the first
request of an engine, which warms up, does not represent the others."""

INDEPENDENT_REQUESTS = 10
"""Requests that run together are correlated: any number of them counts as this many."""

REQUESTS_MIN = 5
"""The fewest requests to fit figures to."""

ROUNDS = 8
"""How often each stage of the fit looks for a better timing."""

GRID_POINTS = 7
GRID_LOG = 1.05
"""The grid of starting points for a fit: the points in each direction, and the distance, as a logarithm."""

STARTS = 2
"""A fit also begins from this many points of the grid: the expected values may lead to an unlikely timing."""

LIKELIER = 0.7
"""A timing is better below this share of the squared deviations; of timings that are nearly as likely the one
reached from the expected values is taken."""

TRIES = 5
"""How often a round takes a smaller step."""

STAGES = ((0.1, True), (0.08, False), (0.03, False))
"""The steps of the differences, as a logarithm, and whether the figures of prefill are moved together, and
those of decoding. A small step may only move a request from one engine step to another, which tells little
about the best timing: the first stages use large steps, the last one small ones."""

BLOCKS_SPREAD = 2.0
"""KV blocks are looked for up to this factor away from the assumed ones and from what requests show."""

BLOCKS_POINTS = 12
"""How many numbers of KV blocks are tried there."""

BLOCKS_NEAR = tuple(np.linspace(-0.12, 0.12, 9).tolist())
"""How far those are away, as a logarithm, that are tried around the likeliest of them."""

STEP_LARGEST = 0.7
"""The largest change of a figure in one round, as a logarithm."""

GAIN_LEAST = 3e-3
"""A stage ends when a round gains less than this share."""

SIMULATIONS = 20
"""How many simulations a prediction averages."""

JITTER = DECODE_SPREAD
"""How far the figures of these are apart, as a logarithm: as far as few requests leave them open."""

PERCENTILES = (50, 90, 99)

RELIABLE = (50, 90)
ERROR_MOST = 0.1
"""A calibration is said to miss where one of these percentiles has a larger error."""

LEAST_S = 1e-4
"""Errors of shorter times have no meaning: a request at an idle scheduler waits some microseconds."""

QUEUE = "queue"
TOKEN_TIME = "time per output token"  # noqa: S105 -- a quantity, no password


Quantities = dict[str, F64]
"""Waiting times in seconds by their name, an entry a request."""


class Calibrated(NamedTuple):
    """A mock engine for a measured run: with the timing expected from its hardware alone, and with the one
    fitted to ``n_fitted`` requests. ``kv`` says where the fitted engine's KV blocks are from.
    """

    expected: MockConfig
    fitted: MockConfig
    n_fitted: int
    kv: KvBlocks
    guesses: tuple[str, ...]


class Comparison(msgspec.Struct, frozen=True):
    """One percentile of one quantity over some requests; seconds, and relative errors.

    Errors of times shorter than ``step_s`` are None: where in a step a request arrives is random.
    """

    quantity: str
    percentile: int
    measured_s: float
    calibrated_s: float
    expected_s: float
    step_s: float = 0.0

    @property
    def error(self) -> float | None:
        """The error of the calibrated engine; None without a comparable measurement."""
        return self._error(self.calibrated_s)

    @property
    def expected_error(self) -> float | None:
        """The error without fitting; None without a comparable measurement."""
        return self._error(self.expected_s)

    def _error(self, predicted_s: float) -> float | None:
        least_s = max(self.step_s, LEAST_S)
        return predicted_s / self.measured_s - 1.0 if self.measured_s > least_s else None


def calibrate(
    run: MeasuredRun, shape: ModelShape, *, n_fitted: int, on_round: Callable[[int], None] = lambda _: None
) -> Calibrated:
    """Fit a timing to the first ``n_fitted`` requests; with 0, derive it from model and hardware alone.

    Raises ConfigError where there are too few requests to fit to or none left to predict, and for a model
    that does not fit into its GPUs.
    """
    check_fitted(run, n_fitted)
    return calibrate_from(run, roofline(run, shape), n_fitted=n_fitted, on_round=on_round)


def calibrate_from(
    run: MeasuredRun,
    prior: Roofline,
    *,
    n_fitted: int,
    spreads: Mapping[str, float] = SPREADS,
    on_round: Callable[[int], None] = lambda _: None,
) -> Calibrated:
    """Fit a timing to the first ``n_fitted`` requests; each figure may be away from that of ``prior`` by its
    entry in ``spreads``, which has the keys of :data:`SPREADS`.

    Raises ConfigError as :func:`check_seen` does.
    """
    check_fitted(run, n_fitted)
    expected = replace(engine_config(run, prior.kv_tokens), timing=prior.timing)
    if not n_fitted:
        return Calibrated(expected, expected, 0, _unseen_blocks(run, expected), prior.guesses)
    rounds = count()
    fit = _Fit(run, expected, n_fitted, prior, spreads, lambda: on_round(next(rounds)))
    timing, kv = _fitted(run, fit, expected.total_kv_blocks)
    fitted = replace(expected, timing=timing, total_kv_blocks=kv.blocks)
    return Calibrated(expected, fitted, n_fitted, kv, prior.guesses)


def _unseen_blocks(run: MeasuredRun, expected: MockConfig) -> KvBlocks:
    is_read = run.meta.engine_kwargs.num_gpu_blocks_override is not None
    return KvBlocks(expected.total_kv_blocks, "read" if is_read else "unknown")


def _fitted(run: MeasuredRun, fit: "_Fit", assumed: int) -> tuple[Timing, KvBlocks]:
    """Return the likeliest timing, and with it the KV blocks, unless they are read."""
    if run.meta.engine_kwargs.num_gpu_blocks_override is not None:
        return fit.timing_at(fit.likeliest(fit.starts())), KvBlocks(assumed, "read")
    bounds = block_bounds(run, fit.n_fitted)
    fits = {each: fit.with_blocks(each) for each in _candidates(run, bounds, assumed)}
    least, most = min(fits), max(fits)
    starts = fit.starts()
    # Where requests are the same with any of them, they do not depend on KV, and the assumption stays.
    if assumed in fits and len({fits[each].cost(starts[1]) for each in (least, assumed, most)}) == 1:
        return fit.timing_at(fit.likeliest(starts)), KvBlocks(assumed, "unknown", *bounds)
    begun = {each: fits[each].starts() for each in fits}
    likely = sorted(fits, key=lambda each: fits[each].cost(begun[each][1]))[:STARTS]
    ends = {each: fits[each].likeliest(begun[each]) for each in {*likely, *({assumed} & fits.keys())}}
    costs = {each: fits[each].cost(at) for each, at in ends.items()}
    blocks = min(costs, key=costs.__getitem__)
    if assumed in costs and costs[blocks] > LIKELIER * costs[assumed]:
        return fit.timing_at(ends[assumed]), KvBlocks(assumed, "unknown", *bounds)
    near = np.clip([round(blocks * float(np.exp(away))) for away in BLOCKS_NEAR], least, most).tolist()
    nearest = min(near, key=lambda each: fit.with_blocks(each).cost(ends[blocks]))
    at = fit.with_blocks(nearest).nearest(ends[blocks])
    return fit.timing_at(at), KvBlocks(nearest, "inferred", *bounds)


def _candidates(run: MeasuredRun, bounds: BlockBounds, assumed: int) -> list[int]:
    """Return KV blocks to try; ``assumed`` is one of them unless the requests contradict it."""
    longest = int((run.input_tokens + run.output_tokens).max()) // run.meta.engine_kwargs.block_size + 1
    least = max(longest, bounds.least or 0)
    end = bounds.most or round(max(assumed, least) * BLOCKS_SPREAD)
    begin = max(least, round(min(assumed, end) / BLOCKS_SPREAD))
    found = set(np.geomspace(begin, max(begin, end), BLOCKS_POINTS).round().astype(int).tolist())
    return sorted(found | ({assumed} if begin <= assumed <= end else set()))


def check_fitted(run: MeasuredRun, n_fitted: int) -> None:
    """Raise ConfigError where ``n_fitted`` requests are too few to fit to, or leave none to predict."""
    if n_fitted and n_fitted < REQUESTS_MIN:
        raise ConfigError(
            f"requests: {n_fitted} are too few to fit to; take {REQUESTS_MIN} or more, or 0 to see none",
            param="requests",
        )
    if n_fitted >= run.n_requests:
        raise ConfigError(
            f"requests: {n_fitted} of {run.n_requests} leave none to predict; take fewer", param="requests"
        )


class Compared(NamedTuple):
    """The predictions of the requests that were fitted to, and of the others."""

    seen: list[Comparison]
    unseen: list[Comparison]


def compare(run: MeasuredRun, calibrated: Calibrated) -> Compared:
    """Predict all requests, and compare them with the measured ones."""
    n_fitted = calibrated.n_fitted
    expected = _simulated(run, calibrated.expected)
    fitted = _simulated(run, calibrated.fitted) if n_fitted else expected
    which = slice(0, n_fitted), slice(n_fitted, run.n_requests)
    return Compared(*(_comparisons(run, expected, fitted, each) for each in which))


def _comparisons(
    run: MeasuredRun, expected: Sequence[Quantities], fitted: Sequence[Quantities], which: slice
) -> list[Comparison]:
    measured = _percentiles_of([quantities(run, run.stamps)], which)
    by_expected, by_fitted = _percentiles_of(expected, which), _percentiles_of(fitted, which)
    token_s = measured[TOKEN_TIME][PERCENTILES.index(50)]
    return [
        Comparison(
            name,
            percentile,
            measured[name][at],
            by_fitted[name][at],
            by_expected[name][at],
            step_s=token_s if name == QUEUE else 0.0,
        )
        for name in measured
        for at, percentile in enumerate(PERCENTILES)
    ]


def missed(rows: Sequence[Comparison]) -> list[Comparison]:
    """Return the medians and p90s of ``rows`` whose error is above :data:`ERROR_MOST`."""
    return [
        row
        for row in rows
        if row.percentile in RELIABLE and row.error is not None and abs(row.error) > ERROR_MOST
    ]


def _simulated(run: MeasuredRun, config: MockConfig) -> list[Quantities]:
    """Return the waiting times of simulations with slightly different timings.

    The step that a request joins, with its other requests, is random, and so is the p99 of one simulation.
    """
    draws = np.random.default_rng(0)
    found = []
    for _ in range(SIMULATIONS):
        moved = {
            name: getattr(config.timing, name) * float(np.exp(draws.normal(0.0, JITTER))) for name in SPREADS
        }
        moved["decode_min"] = min(1.0, moved["decode_base"])
        stamps = simulate(run, replace(config, timing=replace(config.timing, **moved)))
        found.append(quantities(run, stamps))
    return found


def _percentiles_of(runs: Sequence[Quantities], which: slice) -> dict[str, list[float]]:
    """Return the mean over ``runs`` of each percentile of the requests ``which``."""
    return {
        name: np.mean([_percentiles(each[name][which]) for each in runs], axis=0).tolist() for name in runs[0]
    }


def _percentiles(values: F64) -> list[float]:
    known = values[~np.isnan(values)]
    return np.percentile(known, PERCENTILES).tolist() if len(known) else [0.0] * len(PERCENTILES)


def quantities(run: MeasuredRun, stamps: Stamps) -> Quantities:
    """Return the waiting times of requests in seconds, an entry a request; NaN for an answer of ``run`` with
    one token, or that came at once.

    Without the scheduler's stamps of every request, queue and service are one quantity: TTFT.
    """
    between = np.where(run.decodes, run.output_tokens - 1, np.nan)
    if not run.knows_scheduler:
        return {
            "TTFT": stamps.first - stamps.arrival,
            TOKEN_TIME: (stamps.last - stamps.first) / between,
            "end to end": stamps.last - stamps.arrival,
        }
    return {
        QUEUE: stamps.scheduled - stamps.queued,
        "service TTFT": stamps.first - stamps.scheduled,
        TOKEN_TIME: (stamps.last - stamps.first) / between,
        "end to end": stamps.last - stamps.arrival,
    }


class _Fit:
    """Least squares by Levenberg and Marquardt, over logarithms of the timing's figures."""

    def __init__(
        self,
        run: MeasuredRun,
        config: MockConfig,
        n_fitted: int,
        prior: Roofline,
        spreads: Mapping[str, float],
        on_round: Callable[[], None],
    ) -> None:
        self._run = run
        self._config = config
        self._on_round = on_round
        self.n_fitted = n_fitted
        self._names = tuple(spreads)
        figures = asdict(prior.timing)
        self._expected: F64 = np.log([figures[name] for name in self._names])
        self._spreads: F64 = np.array(list(spreads.values()))
        self._measured = _first_rows(run.stamps, n_fitted)
        # Where tokens are drafted, all may come in one step.
        self._decodes = self._measured.last > self._measured.first
        self._is_scheduled = ~np.isnan(self._measured.scheduled)
        self._weight = min(1.0, (INDEPENDENT_REQUESTS / n_fitted) ** 0.5)
        self._ttft_spread_s = STEP_SPREAD * float((self._measured.first - self._measured.arrival).mean())

    def with_blocks(self, blocks: int) -> "_Fit":
        """Return the fit with another number of KV blocks."""
        other = copy(self)
        other._config = replace(self._config, total_kv_blocks=blocks)
        return other

    def likeliest(self, starts: Sequence[F64]) -> F64:
        """Return the likeliest figures that are reached from ``starts``."""
        expected, *others = (self.nearest(start) for start in starts)
        best = min(others, key=self.cost)
        return best if self.cost(best) < LIKELIER * self.cost(expected) else expected

    def starts(self) -> list[F64]:
        """Return the starting points: the expected values, and the likeliest timings of a grid, in which the
        figures of prefill are moved together, and all others.
        """
        moves = np.linspace(-GRID_LOG, GRID_LOG, GRID_POINTS)
        grid = [self._expected + np.array(direction) @ self._groups() for direction in product(moves, moves)]
        return [self._expected, *sorted(grid, key=self.cost)[:STARTS]]

    def nearest(self, at: F64) -> F64:
        """Return the likeliest figures near those of ``at``."""
        for difference, together in STAGES:
            directions = self._groups() if together else np.eye(len(at))
            at = self._nearer(at, directions, difference)
        return at

    def cost(self, at: F64) -> float:
        """Return the sum of squares of all differences."""
        rest = self._residuals(at)
        return float(rest @ rest)

    def _groups(self) -> F64:
        """Return two ways in which figures may move: those of prefill, and all others."""
        is_prefill = np.array([name.startswith("prefill") for name in self._names])
        return np.stack([is_prefill, ~is_prefill]).astype(np.float64)

    def _nearer(self, at: F64, directions: F64, difference: float) -> F64:
        """Go from ``at`` along ``directions``, one a row, until no round gains much."""
        rest = self._residuals(at)
        cost, damping = float(rest @ rest), 1e-3
        for _ in range(ROUNDS):
            self._on_round()
            slopes = np.stack(
                [
                    (self._residuals(at + difference * direction) - rest) / difference
                    for direction in directions
                ],
                axis=1,
            )
            square = slopes.T @ slopes
            gain = 0.0
            for _ in range(TRIES):
                step = -np.linalg.solve(square + damping * np.diag(np.diag(square)), slopes.T @ rest)
                there = at + np.clip(step, -STEP_LARGEST, STEP_LARGEST) @ directions
                rest_there = self._residuals(there)
                cost_there = float(rest_there @ rest_there)
                if cost_there < cost:
                    gain = 1.0 - cost_there / cost
                    at, rest, cost = there, rest_there, cost_there
                    damping /= 5.0
                    break
                damping *= 5.0
            if gain < GAIN_LEAST:
                break
        return at

    def timing_at(self, at: F64) -> Timing:
        """Return the timing with these figures."""
        figures = dict(zip(self._names, np.exp(at).tolist(), strict=True))
        return replace(self._config.timing, **figures, decode_min=min(1.0, figures["decode_base"]))

    def _residuals(self, at: F64) -> F64:
        """Differences of the requests' stamps and of the figures, in standard deviations."""
        config = replace(self._config, timing=self.timing_at(at))
        here = _first_rows(simulate(self._run, config, first=self.n_fitted), self.n_fitted)
        there = self._measured
        decodes = self._decodes
        differences = np.concatenate(
            (
                np.log((here.last - here.first)[decodes] / (there.last - there.first)[decodes])
                / DECODE_SPREAD,
                np.log((here.first - self._began(here)) / (there.first - self._began(there))) / STEP_SPREAD,
                (here.first - there.first) / self._ttft_spread_s,
            )
        )
        size = np.abs(differences)
        linear = np.sqrt(np.maximum(OUTLIER * (2.0 * size - OUTLIER), 0.0)) * np.sign(differences)
        robust = np.where(size <= OUTLIER, differences, linear)
        return np.concatenate((self._weight * robust, (at - self._expected) / self._spreads))

    def _began(self, stamps: Stamps) -> F64:
        """Return when requests came into a step; when they arrived, without a measured stamp of that."""
        return np.where(self._is_scheduled, stamps.scheduled, stamps.arrival)


def _first_rows(stamps: Stamps, n_fitted: int) -> Stamps:
    return Stamps(*(column[:n_fitted] for column in msgspec.structs.astuple(stamps)))
