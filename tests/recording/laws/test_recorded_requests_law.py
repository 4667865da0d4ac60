"""The native line of a request says what a record says that Python makes of the same objects."""

import gzip
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter._native import RecordQueue
from kvrouter.core.constraints import Pin, RouterConfigOverride, RouterMode, RoutingConstraints
from kvrouter.core.errors import KvrouterError, NoEligibleWorker, Reason, RoutingRefused, WorkerFailed
from kvrouter.core.events import pack_hashes, unpack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import DpRank, LeaseId, ModelName, RequestId, Slot, Taint, WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest, KvLoss, Leg, Sampling
from kvrouter.kernel.journey import Shape
from kvrouter.kernel.placement.placement import Draw, Placement
from kvrouter.kernel.request_driver import Attempt
from kvrouter.kernel.routing.interface import Decision, Pick, RouteRequest
from kvrouter.kernel.topology.policy import Fallback, Preferred, Required, TransferConstraint
from kvrouter.recording.request import LegFields, RequestDetails, RequestFields
from kvrouter.recording.salt import Salt
from kvrouter.recording.schema import (
    AttemptRecord,
    Constraints,
    LegRecord,
    RequestRecord,
    Status,
    Worker,
)
from kvrouter.router.traffic import Origin, TrafficRecorder
from tests.oracles.siphash import siphash

SALT = Salt(b"s" * 32)
BEGAN_S = 50.0
BYTES_MAX = 1 << 20
KV_BYTES_PER_TOKEN = 99


class Queue:
    """A recorder that only notes."""

    salt = SALT

    def __init__(self) -> None:
        self.workers: Mapping[str, Worker] = {
            "7": Worker(
                worker="7",
                model="m",
                role="prefill",
                block_size=4,
                context_length=64,
                kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            ),
            "8": Worker(worker="8", model="m", role="prefill", block_size=4, context_length=64),
        }
        self._queue = RecordQueue(key=SALT.block_key, began_s=BEGAN_S, bytes_max=BYTES_MAX)

    def salted(self, constraints: Constraints | None) -> Constraints | None:
        """No word of a client's is salted here."""
        return constraints

    def note_request(self, prompt: Prompt, request: RequestFields, details: RequestDetails | None) -> None:
        more = b"" if details is None else b"," + msgspec.json.encode(details)[1:-1]
        assert self._queue.add_request(prompt, request, more)

    def record(self) -> RequestRecord:
        """What was noted last."""
        n_lines = self._queue.take()
        (line,) = packed(self._queue, n_lines - 1, n_lines).splitlines()
        return msgspec.json.decode(line, type=RequestRecord)


def packed(queue: RecordQueue, first: int, end: int) -> bytes:
    """Lines that were taken."""
    _, room_bytes, _ = queue.batch(first, BYTES_MAX)
    out = bytearray(room_bytes)
    n_bytes, is_member = queue.pack(first, end, out)
    return gzip.decompress(out[:n_bytes]) if is_member else bytes(out[:n_bytes])


TEXTS = st.text(max_size=12) | st.sampled_from(['"\\\x00\x1f\x7f', "é€😀"])
MOMENTS = st.floats(BEGAN_S, 1e6) | st.integers(0, 2**40).map(lambda n: BEGAN_S + n * 5e-7)
SOME_MOMENTS = st.none() | st.just(0.0) | MOMENTS
SENT = st.just(0.0) | MOMENTS
COUNTS = st.none() | st.integers(0, 2**53 - 1)
RANKS = st.builds(
    WorkerRank,
    st.sampled_from([7, 8, 9, 2**63 - 1]).map(WorkerId),
    st.integers(0, 99).map(DpRank),
)
PROMPTS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda ids: Prompt(ids, block_size=4))
CONSTRAINTS = st.builds(
    TransferConstraint,
    st.builds(Required, TEXTS) | st.builds(Fallback, TEXTS) | st.builds(Preferred, TEXTS, st.just(0.5)),
    st.none() | TEXTS,
)


def picks(legs: Sequence[Leg]) -> st.SearchStrategy[Pick]:
    zero = st.just(0.0)
    return st.builds(
        Pick,
        st.just(Slot(0)),
        RANKS,
        st.sampled_from(legs),
        st.integers(0, 10),
        zero,
        zero,
        zero,
        zero,
        zero,
        st.integers(0, 2**40),
    )


DECISIONS = st.builds(
    Decision,
    st.just(RequestId("r")),
    st.just(0),
    st.sampled_from(RouterMode),
    picks([Leg.DECODE, Leg.AGGREGATED, Leg.PREFILL]),
    st.none() | picks([Leg.PREFILL]),
    st.none() | CONSTRAINTS,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@st.composite
def trails(draw: st.DrawFn, prompt: Prompt) -> Attempt:
    placement = Placement(
        route_request=RouteRequest(RequestId("r"), 1, 1),
        decision=draw(DECISIONS),
        prompt=prompt,
        token_ids=array("I"),
        block_size=prompt.block_size,
        shape=draw(st.sampled_from(Shape)),
        draw=Draw(1, 1, 1),
        decode_address="",
        decode_lease=LeaseId(0),
        decode_context_tokens=1,
        decode_domains=draw(st.dictionaries(TEXTS, TEXTS, max_size=3)),
        prefill_domains=draw(st.dictionaries(TEXTS, TEXTS, max_size=3)),
    )
    return Attempt(
        placement,
        placed_s=draw(MOMENTS),
        prefill_sent_s=draw(SENT),
        prefill_done_s=draw(SOME_MOMENTS),
        last_sent_s=draw(SENT),
        first_token_s=draw(SOME_MOMENTS),
        ended_s=draw(SOME_MOMENTS),
        prefill_cached_tokens=draw(COUNTS),
        cached_tokens=draw(COUNTS),
        kv_bytes=draw(COUNTS),
        lost_leg=draw(st.none() | st.sampled_from(Leg)),
        kv_loss=draw(st.none() | st.sampled_from(KvLoss)),
    )


ERRORS: st.SearchStrategy[KvrouterError | None] = st.none() | st.builds(WorkerFailed, TEXTS)
ERRORS |= st.builds(
    lambda refusals: NoEligibleWorker("no", refusals=refusals),
    st.dictionaries(st.sampled_from(Reason), st.integers(1, 9)),
)
PINS = st.none() | st.builds(
    Pin, st.integers(0, 2**53).map(WorkerId), st.none() | st.integers(0, 9).map(DpRank)
)
TAINTS = st.frozensets(TEXTS.map(Taint), max_size=2)
PREFERRED = st.dictionaries(TEXTS.map(Taint), st.floats(-1, 1), max_size=2)
REQUESTS = st.builds(
    GenerateRequest,
    st.just(RequestId("r")),
    TEXTS.map(ModelName),
    st.just(array("I")),
    st.builds(Sampling, st.integers(0, 2**53 - 1)),
    st.builds(RoutingConstraints, TAINTS, PREFERRED, TAINTS),
    st.builds(
        RouterConfigOverride,
        st.none() | st.floats(0, 9),
        st.none() | st.floats(0, 9),
        st.none() | st.sampled_from(RouterMode),
    ),
    pin=PINS,
    prefill_pin=PINS,
    lora_name=st.none() | TEXTS,
    has_media=st.booleans(),
    text_ids=st.none() | st.just(array("I")),
)


def micro(seconds: float) -> float:
    return round(seconds * 1e6) / 1e6


def since(begun_s: float, at_s: float | None) -> float | None:
    return micro(at_s - begun_s) if at_s else None


def pin_text(pin: Pin | None) -> str | None:
    if pin is None:
        return None
    return f"{pin.worker_id}" if pin.dp_rank is None else f"{pin.worker_id}/{pin.dp_rank}"


def constraints_of(request: GenerateRequest) -> Constraints | None:
    asked, override = request.constraints, request.override
    adapter = {f"kvrouter.adapter/{request.lora_name}"}
    found = Constraints(
        required_taints=tuple(sorted(asked.required_taints - adapter)),
        required_decode_taints=tuple(sorted(asked.required_decode_taints)),
        preferred_taints={str(taint): weight for taint, weight in asked.preferred_taints.items()},
        pin=pin_text(request.pin),
        prefill_pin=pin_text(request.prefill_pin),
        overlap_score_weight=override.overlap_score_weight,
        router_temperature=override.router_temperature,
        router_mode=override.router_mode and override.router_mode.value,
    )
    return found if found != Constraints() else None


def leg_of(pick: Pick, domains: Mapping[str, str], **moments: Any) -> LegRecord:
    return LegRecord(
        leg=pick.leg.value,
        worker=f"{pick.rank.worker_id}/{pick.rank.dp_rank}",
        overlap_blocks=pick.overlap_blocks,
        domains=domains,
        candidates=pick.candidates,
        **moments,
    )


def attempt_of(trail: Attempt, begun_s: float) -> AttemptRecord:
    placement, decision = trail.placement, trail.placement.decision
    decode = leg_of(
        decision.decode,
        placement.decode_domains,
        sent_s=since(begun_s, trail.last_sent_s),
        first_token_s=since(begun_s, trail.first_token_s),
        last_s=since(begun_s, trail.ended_s) if trail.last_sent_s else None,
        cached_tokens=trail.cached_tokens,
    )
    legs: tuple[LegRecord, ...] = (decode,)
    kv_bytes = None
    if decision.prefill is not None:
        ended_s = trail.ended_s if trail.prefill_sent_s else None
        prefill = leg_of(
            decision.prefill,
            placement.prefill_domains,
            sent_s=since(begun_s, trail.prefill_sent_s),
            last_s=since(begun_s, trail.prefill_done_s or ended_s),
            cached_tokens=trail.prefill_cached_tokens,
        )
        legs = (prefill, decode)
        kv_bytes = trail.kv_bytes
        if kv_bytes is None and decision.prefill.rank.worker_id == 7:
            n_there = decision.decode.overlap_blocks * placement.block_size
            kv_bytes = max(0, placement.prompt.isl_tokens - n_there) * KV_BYTES_PER_TOKEN
    constraint = None
    if decision.constraint is not None:
        kinds = {Required: "required", Fallback: "fallback", Preferred: "preferred"}
        policy, value = decision.constraint.policy, decision.constraint.value
        constraint = f"{kinds[type(policy)]} {policy.domain}" + ("" if value is None else f"={value}")
    return AttemptRecord(
        shape=placement.shape.name.lower(),
        mode=decision.mode.value,
        placed_s=micro(trail.placed_s - begun_s),
        legs=legs,
        constraint=constraint,
        fallback_used=decision.fallback_used,
        cross_domain=decision.cross_domain,
        last_resort=decision.last_resort,
        kv_bytes=kv_bytes,
        kv_bytes_reported=decision.prefill is not None and trail.kv_bytes is not None,
        lost=trail.lost_leg and trail.lost_leg.value,
        kv_lost=trail.kv_loss and trail.kv_loss.value,
    )


@given(
    st.data(),
    REQUESTS,
    PROMPTS,
    ERRORS,
    st.booleans(),
    MOMENTS,
    SOME_MOMENTS,
    MOMENTS,
    st.integers(0, 1 << 31),
)
def test_native_request_line_equals_the_python_record(
    data: st.DataObject,
    request: GenerateRequest,
    prompt: Prompt,
    error: KvrouterError | None,
    finished: bool,
    begun_s: float,
    first_token_s: float | None,
    ended_s: float,
    output_tokens: int,
) -> None:
    origin = data.draw(st.builds(Origin, st.none() | TEXTS, st.none() | st.text(), st.none() | st.text()))
    trail = data.draw(st.lists(trails(prompt), max_size=3))
    queue = Queue()
    TrafficRecorder(queue, clock=lambda: ended_s).request_ended(  # type: ignore[arg-type]
        request,
        origin,
        trail=trail,
        prompt=prompt,
        error=error,
        finished=finished,
        begun_s=begun_s,
        first_token_s=first_token_s,
        output_tokens=output_tokens,
    )
    names = [siphash(each, SALT.block_key) for each in unpack_hashes(prompt.sequence_hashes)]
    refusals = error.refusals if isinstance(error, RoutingRefused) else {}
    assert queue.record() == RequestRecord(
        at_s=micro(begun_s - BEGAN_S),
        model=request.model,
        input_tokens=prompt.isl_tokens,
        output_tokens=output_tokens,
        max_tokens=request.sampling.max_tokens,
        block_size=prompt.block_size,
        blocks=pack_hashes(names),
        status=Status.FAILED if error else Status.FINISHED if finished else Status.CANCELLED,
        route=origin.route,
        adapter=request.lora_name,
        media=request.has_media,
        by_text=request.text_ids is not None,
        session=None if origin.session is None else SALT.session(origin.session),
        parent=None if origin.parent is None else SALT.session(origin.parent),
        constraints=constraints_of(request),
        attempts=tuple(attempt_of(each, begun_s) for each in trail),
        first_token_s=since(begun_s, first_token_s),
        ended_s=micro(ended_s - begun_s),
        code=None if error is None else error.code,
        http_status=None if error is None else error.status_hint,
        refusals={reason.value: n for reason, n in refusals.items()},
    )


def test_fields_with_default_values_are_left_out_of_the_line() -> None:
    queue = RecordQueue(key=bytes(16), began_s=0.0, bytes_max=BYTES_MAX)
    leg: LegFields = (Leg.AGGREGATED, WorkerRank(WorkerId(1), DpRank(0)), 0, {}, 0, None, 0.0, None, None)
    no = False
    attempt = (Shape.AGGREGATED, RouterMode.KV, 1.0, (leg,), None, no, None, no, no, no, None, None)
    fields = ("m", None, no, 9, 3, Status.FINISHED, None, 1.0, None, 2.0, (attempt,))
    assert queue.add_request(Prompt((), block_size=4), fields, b"")
    line = packed(queue, 0, queue.take())
    assert line == (
        b'{"kind":"request","at_s":1.000000,"model":"m","input_tokens":0,"output_tokens":3,"max_tokens":9,'
        b'"block_size":4,"status":"finished","attempts":[{"shape":"aggregated","mode":"kv","placed_s":0.000000,'
        b'"legs":[{"leg":"aggregated","worker":"1/0","overlap_blocks":0}]}],"ended_s":1.000000,"blocks":""}\n'
    )


WRONG = [float("nan"), float("inf"), -float("inf"), 1e300]


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_time_is_refused_and_nothing_is_queued(wrong: float) -> None:
    queue = RecordQueue(key=bytes(16), began_s=0.0, bytes_max=BYTES_MAX)
    for begun_s, ended_s in ((wrong, 1.0), (1.0, wrong)):
        fields = ("m", None, False, 9, 3, Status.FINISHED, None, begun_s, None, ended_s, ())
        with pytest.raises(ValueError, match="microseconds"):
            queue.add_request(Prompt(range(8), block_size=4), fields, b"")
    assert queue.take() == 0


SIZES = st.integers(0, 300) | st.sampled_from([0xFFFE, 0xFFFF, 0x10000, 0x1FFFE, 0x1FFFF, 0x30000])


@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=6), st.integers(0, 200_000))
@example([(0xFFFF, False), (1, True)], 1)
def test_packed_lines_decompress_as_gzip_in_their_order(
    sizes: list[tuple[int, bool]], bytes_max: int
) -> None:
    queue = RecordQueue(key=SALT.block_key, began_s=0.0, bytes_max=1 << 24)

    for number, (n_bytes, has_blocks) in enumerate(sizes):
        if has_blocks:
            prompt = Prompt.from_blocks(bytes(8 * n_bytes), isl_tokens=n_bytes, block_size=1)
            fields = (f"{number}", None, False, 9, 3, Status.FINISHED, None, float(number), None, 1.0, ())
            assert queue.add_request(prompt, fields, b"")
        else:
            assert queue.add(b"x" * n_bytes + b"\n", float(number), 1 << 24)
    assert queue.take() == len(sizes)
    members, read, first = [], b"", 0
    while first < len(sizes):
        end, room_bytes, at_s = queue.batch(first, bytes_max)
        assert at_s == first
        with pytest.raises(ValueError, match="out"):
            queue.pack(first, end, bytearray(room_bytes - 1))
        out = bytearray(room_bytes)
        n_bytes, is_member = queue.pack(first, end, out)
        lines = gzip.decompress(out[:n_bytes]) if is_member else bytes(out[:n_bytes])
        assert end == first + 1 or len(lines) <= bytes_max
        members.append(bytes(out[:n_bytes]) if is_member else gzip.compress(lines))
        read += lines
        first = end
    assert gzip.decompress(b"".join(members)) == read
    found = read.splitlines()
    assert len(found) == len(sizes)
    for number, ((n_bytes, has_blocks), line) in enumerate(zip(sizes, found, strict=True)):
        if has_blocks:
            record = msgspec.json.decode(line, type=RequestRecord)
            assert (record.model, len(record.blocks)) == (f"{number}", 8 * n_bytes)
        else:
            assert line == b"x" * n_bytes
    with pytest.raises(IndexError):
        queue.batch(len(sizes), bytes_max)
    with pytest.raises(IndexError):
        queue.pack(0, len(sizes) + 1, bytearray(1))


def test_key_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="key: 16 bytes, not 15"):
        RecordQueue(key=bytes(15), began_s=0.0, bytes_max=1)
