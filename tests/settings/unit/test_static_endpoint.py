"""Workers named by hand: the text that names one, and a discovery that knows no other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.cli import main
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, ModelType, Role, WorkerCard
from kvrouter.settings.planes import RequestPlaneKind
from kvrouter.settings.static_endpoint import static_card, static_cards, static_text
from kvrouter.transports.records.memory import StaticDiscovery
from tests.testing.discovery_stores import card, record_discovery

TCP = RequestPlaneKind.TCP
COUNTS = st.integers(1, 999_999_999)


@st.composite
def cards(draw: st.DrawFn) -> WorkerCard:
    role = draw(st.sampled_from(Role))
    worker_id, incarnation = draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 2**64 - 1))
    config = ModelRuntimeConfig()
    if role is Role.PREFILL and draw(st.booleans()):
        config = ModelRuntimeConfig(bootstrap_host="host", bootstrap_port=draw(st.integers(1, 65535)))
    return WorkerCard(
        worker_id=WorkerId(worker_id),
        incarnation=Epoch(incarnation),
        model=ModelName(draw(st.from_regex(r"[A-Za-z0-9/_.-]{1,30}", fullmatch=True))),
        role=role,
        block_size=draw(COUNTS),
        context_length=draw(COUNTS),
        address=f"tcp://host:7001/{worker_id}/{incarnation}",
        dp_size=draw(COUNTS),
        component="prefill" if role is Role.PREFILL else "backend",
        serves=ModelType.Prefill if role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=False,
        tokenizer=draw(st.sampled_from((None, "mock", "/models/a=b"))),
        runtime_config=config,
    )


@given(cards())
def test_static_text_of_a_card_reads_back_as_that_card(card: WorkerCard) -> None:
    assert static_card(static_text(card), TCP) == card


def test_omitted_static_endpoint_fields_have_the_workers_defaults() -> None:
    short = static_card("tcp://h:1/7,model=m", TCP)
    assert (short.address, short.worker_id, short.incarnation) == ("tcp://h:1/7/0", 7, 0)
    assert (short.role, short.block_size, short.context_length, short.dp_size) == (Role.BOTH, 64, 32768, 1)
    assert static_card("model=m,address=tcp://h:1/7/0", TCP) == short


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "needs the worker's address and model"),
        ("tcp://h:1,model=m", "the address must be"),
        ("tcp://h:1/x/0,model=m", "the address must be"),
        (f"tcp://h:1/{2**63}/0,model=m", "the address must be"),
        ("tcp://h:1/٣/0,model=m", "the address must be"),
        ("http://h:1/1/0,model=m", "the request plane is tcp"),
        ("tcp://h:1/1/0", "model=NAME must be given"),
        ("tcp://h:1/1/0,model=", "model=NAME must be given"),
        ("tcp://h:1/1/0,model=m,model=n", "model is given twice"),
        ("tcp://h:1/1/0,model=m,rôle=both", "'rôle=both' is none of"),
        ("tcp://h:1/1/0,model=m,both", "'both' is none of"),
        ("tcp://h:1/1/0,model=m,role=all", "role must be one of prefill, decode, both"),
        ("tcp://h:1/1/0,model=m,block_size=0", "block_size must be a whole number from 1"),
        ("tcp://h:1/1/0,model=m,dp_size=two", "dp_size must be a whole number from 1"),
        ("tcp://h:1/1/0,model=m,bootstrap=h:9", "bootstrap must be host:port of a prefill worker"),
        ("tcp://h:1/1/0,model=m,role=prefill,bootstrap=h:0", "bootstrap must be host:port"),
    ],
)
def test_invalid_static_endpoint_is_refused_with_the_reason(text: str, reported: str) -> None:
    with pytest.raises(ConfigError, match="--static-endpoint") as error:
        static_card(text, TCP)
    assert reported in error.value.message


def test_worker_id_named_twice_is_refused() -> None:
    texts = ["tcp://h:1/1/0,model=m", "tcp://h:2/1/0,model=m"]
    with pytest.raises(ConfigError, match="worker 1 is named twice"):
        static_cards(texts, TCP)


@pytest.mark.parametrize("given", [("tcp://h:1/1/0,model=m",), ()], ids=["an address", "a switch"])
def test_static_endpoints_are_refused_with_kv_routing(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["frontend", "--http-port", "0", "--static-endpoint", *given]) == 2
    assert "--static-endpoint: needs --router-mode round-robin or random" in capsys.readouterr().err


async def test_static_discovery_delivers_only_its_own_cards() -> None:
    discovery = StaticDiscovery([card(1), card(2)])
    first = await record_discovery(discovery)
    await discovery.publish(card(3))
    await discovery.withdraw(WorkerId(1), Epoch(9))
    second = await record_discovery(discovery)
    assert first.events == second.events == [card(1), card(2)]
    first.end()
    first.end()
    await discovery.close()
    await discovery.close()


def test_static_endpoint_as_a_switch_is_told_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontend", "--router-mode", "random", "--static-endpoint", "--http-port", "0"]) == 2
    assert "model=NAME" in capsys.readouterr().err
