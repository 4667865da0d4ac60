"""``kvrouter explain``: ask a running router where a prompt would go, and draw why."""

import http.client
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.core.errors import KvrouterError

ROWS_MAX = 50
"""Candidates that a table shows; ``--json`` has them all."""

ANSWER_MAX_BYTES = 64 * 1024 * 1024
"""A longer answer is not one of a router."""


class ExplainFailed(KvrouterError):
    """The router could not be asked, or did not answer what was asked."""

    code = "explain_failed"


class Candidate(msgspec.Struct, frozen=True):
    """One worker rank, as the decision saw it."""

    worker_id: int
    dp_rank: int
    eligible: bool
    reason: str | None
    domains: Mapping[str, str]
    overlap_blocks: int
    prefill_blocks: float
    decode_blocks: float
    transfer_blocks: float
    multiplier: float
    cost: float | None
    chosen: bool


class Chosen(msgspec.Struct, frozen=True):
    """The worker rank that was picked."""

    worker_id: int
    dp_rank: int


class LegPick(msgspec.Struct, frozen=True):
    """One leg: every candidate, and which one was picked."""

    chosen: Chosen | None
    candidates: Sequence[Candidate]


class Constraint(msgspec.Struct, frozen=True):
    """What the prefill worker's transfer policy asked of the decode worker."""

    enforcement: str
    domain: str
    value: str | None


class Refusal(msgspec.Struct, frozen=True):
    """Why no worker may take the request; the message counts worker ranks by reason."""

    code: str
    message: str


class Explanation(msgspec.Struct, frozen=True):
    """The answer of ``POST /v1/route/explain``."""

    request_id: str
    model: str
    mode: str
    isl_tokens: int
    blocks: int
    prefill: LegPick | None
    decode: LegPick | None
    constraint: Constraint | None
    fallback_used: bool
    error: Refusal | None


class _ApiError(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ApiError


class _ModelEntry(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class RouterClient:
    """A running router, by its URL: ``http://127.0.0.1:8000``."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 30.0) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ExplainFailed(f"--url: must be http://host:port, not {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ExplainFailed(f"--url: must be http://host:port, not {url!r}")
        self._url = url
        self._https = parts.scheme == "https"
        self._host, self._port = host, port
        self._path = parts.path.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s

    def only_model(self) -> str:
        """Return the one model that is served; raise ExplainFailed when there are more, or none."""
        models = _decode(self._ask("GET", "/v1/models", None), _ModelList).data
        if len(models) != 1:
            names = ", ".join(model.id for model in models) or "none"
            raise ExplainFailed(f"--model: is required: the router serves {names}")
        return models[0].id

    def explain(self, prompt: str, model: str) -> bytes:
        """Return the router's answer for ``prompt``, as JSON."""
        if not prompt.isprintable() and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise ExplainFailed("PROMPT: must be UTF-8 text")
        return self._ask("POST", "/v1/route/explain", {"model": model, "prompt": prompt})

    def _ask(self, method: str, path: str, body: Mapping[str, str] | None) -> bytes:
        connection = self._connect()
        headers = {"content-type": "application/json"} if body is not None else {}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        try:
            content = msgspec.json.encode(body) if body is not None else None
            connection.request(method, self._path + path, content, headers)
            response = connection.getresponse()
            answer = response.read(ANSWER_MAX_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise ExplainFailed(f"{self._url}: no answer: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        if len(answer) > ANSWER_MAX_BYTES:
            raise ExplainFailed(f"{self._url}: answered with more than {ANSWER_MAX_BYTES} bytes")
        if response.status != http.client.OK:
            raise ExplainFailed(f"{self._url}: {response.status} {_message(answer) or response.reason}")
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        if self._https:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


T = TypeVar("T")


def _decode(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise ExplainFailed(f"the answer is not a router's: {error}") from error


def _message(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return ""


def read_explanation(answer: bytes) -> Explanation:
    """Decode a router's answer; raise ExplainFailed when it is another program's."""
    return _decode(answer, Explanation)


def draw(explanation: Explanation, console: Console) -> None:
    """Print the decision: a refusal's error, what was asked, a table for each leg, and how KV is moved."""
    if explanation.error is not None:
        console.print(Text(f"{explanation.error.code}: {explanation.error.message}", "bold red"))
    console.print(
        Text.assemble(
            (explanation.model, "bold"),
            f", {explanation.isl_tokens} tokens, {explanation.blocks} blocks, mode {explanation.mode}",
        )
    )
    for title, leg in (("Prefill", explanation.prefill), (_last_leg(explanation), explanation.decode)):
        if leg is not None:
            console.print(_table(title, leg))
            rest = _rest(leg)
            if rest:
                console.print(Text(rest, "dim"))
    if explanation.constraint is not None:
        asked = explanation.constraint
        console.print(
            f"KV transfer: {asked.enforcement} {asked.domain}={asked.value or 'unknown'}", markup=False
        )
    if explanation.fallback_used:
        console.print(Text("The handoff crosses its domain: no decode worker was left in it.", "yellow"))


def _last_leg(explanation: Explanation) -> str:
    return "Decode" if explanation.prefill is not None else "Worker"


def _ordered(leg: LegPick) -> list[Candidate]:
    """Return the candidates: the chosen one, then the eligible ones by cost, then the refused ones."""
    return sorted(
        leg.candidates,
        key=lambda row: (
            not row.chosen,
            not row.eligible,
            row.cost if row.cost is not None else 0.0,
            row.reason or "",
            row.worker_id,
            row.dp_rank,
        ),
    )


def _table(title: str, leg: LegPick) -> Table:
    table = Table(
        title=Text(f"{title}: {_chosen(leg)}"), title_justify="left", title_style="bold", header_style="bold"
    )
    for name in ("", "worker", "where"):
        table.add_column(name)
    for name in ("overlap", "prefill", "decode", "transfer", "×", "cost"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in _ordered(leg)[:ROWS_MAX]:
        style = "bold green" if row.chosen else ("" if row.eligible else "dim")
        numbers = (row.prefill_blocks, row.decode_blocks, row.transfer_blocks, row.multiplier, row.cost)
        cells = [
            "→" if row.chosen else "",
            f"{row.worker_id}/{row.dp_rank}",
            " ".join(f"{domain}={value}" for domain, value in row.domains.items()),
            str(row.overlap_blocks),
            *map(_number, numbers),
            "chosen" if row.chosen else (row.reason or ""),
        ]
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _chosen(leg: LegPick) -> str:
    if leg.chosen is None:
        eligible = sum(row.eligible for row in leg.candidates)
        return f"nobody, {eligible} of {len(leg.candidates)} eligible"
    return f"{leg.chosen.worker_id}/{leg.chosen.dp_rank}"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}".rstrip("0").rstrip(".")


def _rest(leg: LegPick) -> str:
    rest = _ordered(leg)[ROWS_MAX:]
    if not rest:
        return ""
    counts = Counter("eligible" if row.eligible else str(row.reason) for row in rest)
    return f"… and {len(rest)} more: " + ", ".join(
        f"{reason} {count}" for reason, count in sorted(counts.items())
    )
