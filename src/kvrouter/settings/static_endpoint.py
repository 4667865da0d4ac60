"""The text of ``--static-endpoint``: a worker without discovery."""

import re
from collections.abc import Sequence

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, ModelType, Role, WorkerCard, component_of
from kvrouter.settings.planes import RequestPlaneKind

STATIC_INCARNATION = Epoch(0)
"""The incarnation of every start of a worker without discovery, which could not announce another one."""

DEFAULTS = {"role": Role.BOTH.value, "block_size": "64", "context_length": "32768", "dp_size": "1"}
"""The values that a text may leave out, as the mock worker's own flags."""

_KEYS = ("address", "model", "tokenizer", *DEFAULTS, "bootstrap")
_ADDRESS = re.compile(
    r"(?P<scheme>[a-z]+)://[^/,=\s]+/(?P<worker_id>[0-9]{1,19})(/(?P<incarnation>[0-9]{1,20}))?"
)
_SCHEMES = {
    RequestPlaneKind.TCP: ("tcp",),
    RequestPlaneKind.HTTP: ("http", "https"),
    RequestPlaneKind.NATS: ("nats",),
}


def static_cards(texts: Sequence[str], plane: RequestPlaneKind) -> tuple[WorkerCard, ...]:
    """Return the workers of all texts; raise ConfigError that names the invalid one and its mistake."""
    cards: dict[WorkerId, WorkerCard] = {}
    for text in texts:
        card = static_card(text, plane)
        if card.worker_id in cards:
            raise _wrong(text, f"worker {card.worker_id} is named twice")
        cards[card.worker_id] = card
    return tuple(cards.values())


def static_card(text: str, plane: RequestPlaneKind) -> WorkerCard:
    """Return the worker that ``text`` names: ``ADDRESS,model=NAME[,key=value…]``.

    The address is the worker's on the request plane, ``tcp://host:port/worker_id/incarnation``; a missing
    incarnation is 0. Raises ConfigError.
    """
    if not text:
        raise ConfigError(
            "--static-endpoint: needs the worker's address and model, as its log says them: "
            f"--static-endpoint {_SCHEMES[plane][0]}://host:port/worker_id/incarnation,model=NAME",
            param="static_endpoint",
        )
    given = _pairs(text)
    address = _ADDRESS.fullmatch(given.get("address", ""))
    if address is None or address["scheme"] not in _SCHEMES[plane] or int(address["worker_id"]) >= 2**63:
        form = f"{_SCHEMES[plane][0]}://host:port/worker_id/incarnation"
        raise _wrong(text, f"the address must be {form}, as the request plane is {plane.value}")
    if not given.get("model"):
        raise _wrong(text, "model=NAME must be given")
    values = {**DEFAULTS, **given}
    try:
        role = Role(values["role"])
    except ValueError:
        raise _wrong(text, f"role must be one of {', '.join(Role)}, not {values['role']!r}") from None
    incarnation = STATIC_INCARNATION if address["incarnation"] is None else Epoch(int(address["incarnation"]))
    host, port = _bootstrap(text, given.get("bootstrap"), role)
    return WorkerCard(
        worker_id=WorkerId(int(address["worker_id"])),
        incarnation=incarnation,
        model=ModelName(values["model"]),
        role=role,
        block_size=_count(text, "block_size", values),
        context_length=_count(text, "context_length", values),
        address=values["address"]
        if address["incarnation"] is not None
        else f"{values['address']}/{incarnation}",
        dp_size=_count(text, "dp_size", values),
        component=component_of(role),
        serves=ModelType.Prefill if role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=False,
        tokenizer=values.get("tokenizer"),
        runtime_config=ModelRuntimeConfig(bootstrap_host=host, bootstrap_port=port),
    )


def static_text(card: WorkerCard) -> str:
    """Return the text that names this worker."""
    values = {
        "model": card.model,
        "tokenizer": card.tokenizer,
        "role": card.role.value,
        "block_size": str(card.block_size),
        "context_length": str(card.context_length),
        "dp_size": str(card.dp_size),
    }
    config = card.runtime_config
    if config.bootstrap_host is not None and config.bootstrap_port is not None:
        values["bootstrap"] = f"{config.bootstrap_host}:{config.bootstrap_port}"
    fields = (f"{key}={value}" for key, value in values.items() if value and DEFAULTS.get(key) != value)
    return ",".join((card.address, *fields))


def _pairs(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for number, piece in enumerate(text.split(",")):
        key, equals, value = piece.strip().partition("=")
        if not equals and number == 0:
            key, value = "address", piece.strip()
        elif not equals or key not in _KEYS:
            raise _wrong(text, f"{piece.strip()!r} is none of {', '.join(_KEYS)}")
        if key in given:
            raise _wrong(text, f"{key} is given twice")
        given[key] = value
    return given


def _count(text: str, key: str, values: dict[str, str]) -> int:
    number = values[key]
    if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
        raise _wrong(text, f"{key} must be a whole number from 1, not {number!r}")
    return int(number)


def _bootstrap(text: str, place: str | None, role: Role) -> tuple[str | None, int | None]:
    if place is None:
        return None, None
    host, _, port = place.rpartition(":")
    if (
        role is not Role.PREFILL
        or not host
        or not re.fullmatch(r"[1-9][0-9]{0,4}", port)
        or int(port) > 65535
    ):
        raise _wrong(text, f"bootstrap must be host:port of a prefill worker, not {place!r}")
    return host, int(port)


def _wrong(text: str, what: str) -> ConfigError:
    return ConfigError(f"--static-endpoint {text!r}: {what}", param="static_endpoint")
