"""Whatever integers a card has: its worker is here whole and can leave, or nothing of it is here."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.transports.records.encoding import CardRecord, decode_record, encode_record
from tests.testing.plain_fleets import worker_card

MODEL = ModelName("m")
EXTREMES = [edge + step for edge in (0, 2**16, 2**31, 2**53, 2**63, 2**64, 10**400) for step in (-1, 0, 1)]
INTEGERS = st.integers() | st.sampled_from(EXTREMES) | st.integers(0, 100_000)
COUNTS = st.none() | INTEGERS


def card(worker_id: int, config: ModelRuntimeConfig | None = None) -> WorkerCard:
    return worker_card(worker_id, config=config, block_size=16)


@st.composite
def cards(draw: st.DrawFn) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(draw(INTEGERS.filter(lambda number: number != 1))),
        incarnation=Epoch(draw(INTEGERS)),
        model=MODEL,
        role=draw(st.sampled_from(Role)),
        block_size=16,
        context_length=draw(INTEGERS),
        address="here",
        dp_size=draw(st.integers(-1, 4) | st.sampled_from([2**16 + 1, 2**63])),
        dp_start=draw(INTEGERS),
        runtime_config=ModelRuntimeConfig(
            total_kv_blocks=draw(COUNTS),
            max_num_seqs=draw(COUNTS),
            max_num_batched_tokens=draw(COUNTS),
            kv_bytes_per_token=draw(COUNTS),
            bootstrap_port=draw(COUNTS),
        ),
    )


@example(wrong=card(7, ModelRuntimeConfig(kv_bytes_per_token=2**63)))
@example(wrong=card(7, ModelRuntimeConfig(total_kv_blocks=10**400)))
@example(wrong=card(7, ModelRuntimeConfig(max_num_seqs=10**400)))
@example(wrong=card(7, ModelRuntimeConfig(prompt_tokens_max=10**400)))
@given(wrong=cards())
def test_a_worker_joins_with_all_ranks_or_none(wrong: WorkerCard) -> None:
    fleet = Fleet(MODEL, 16)
    fleet.join(card(1))
    try:
        change = fleet.join(wrong)
    except ConfigError:
        pass
    else:
        assert list(change.joined) == list(range(1, 1 + wrong.dp_size))
        assert list(fleet.leave(wrong.worker_id, wrong.incarnation)) == list(change.joined)
    assert list(fleet) == [card(1)]
    assert (fleet.n_slots, int(fleet.columns.present.sum())) == (1, 1)


@pytest.mark.parametrize("field", ["worker_id", "dp_start", "context_length"])
@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_card_with_a_number_out_of_range_is_refused_by_name(field: str, number: int) -> None:
    fleet = Fleet(MODEL, 16)
    with pytest.raises(ConfigError) as refused:
        fleet.join(structs.replace(card(7), **{field: number}))
    assert refused.value.param == ("dp_size" if (field, number) == ("dp_start", -1) else field)
    assert list(fleet) == []


@given(wrong=cards())
def test_a_card_from_a_decoded_record_can_join_the_fleet(wrong: WorkerCard) -> None:
    try:
        record = decode_record(encode_record(CardRecord(wrong, lease_s=10.0)))
    except (ProtocolError, OverflowError, ValueError):  # the last two: it cannot be written
        return
    assert Fleet(MODEL, 16).join(record.card).joined


@pytest.mark.parametrize(
    "field",
    [
        "total_kv_blocks",
        "kv_bytes_per_token",
        "max_num_seqs",
        "max_num_batched_tokens",
        "bootstrap_port",
        "prompt_tokens_min",
        "prompt_tokens_max",
    ],
)
@pytest.mark.parametrize("number", [-1, 2**63, 10**400], ids=["negative", "2**63", "1e400"])
def test_a_record_with_a_config_number_out_of_range_is_refused_by_name(field: str, number: int) -> None:
    written = json.loads(encode_record(CardRecord(card(2), lease_s=10.0)))
    written["card"]["runtime_config"] = {field: number}
    with pytest.raises(ProtocolError) as refused:
        decode_record(json.dumps(written).encode())
    assert refused.value.param in (field, "record")
