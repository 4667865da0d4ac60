"""Legs as a worker receives them, for the tests of engines."""

import json
from array import array
from collections.abc import Iterable
from itertools import count
from typing import Any

from msgspec.structs import replace

from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import CallRoute, ClientCall, EngineRequest, Leg, Sampling

MODEL = ModelName("tiny")

_names = count()


def client_call(body: dict[str, object], *, resumable: bool = True) -> ClientCall:
    """What a client wrote: a chat where it has messages, else a completion."""
    return ClientCall(
        route=CallRoute.CHAT if "messages" in body else CallRoute.COMPLETION,
        body=json.dumps(body).encode(),
        stream=bool(body.get("stream")),
        resumable=resumable,
    )


def plain_leg(
    name: str = "x",
    tokens: Iterable[int] = (1, 2, 3),
    leg: Leg = Leg.AGGREGATED,
    *,
    max_tokens: int = 1,
    sampling: Sampling | None = None,
    **fields: Any,
) -> EngineRequest:
    """A leg for the model ``m`` that says nothing that it need not."""
    return EngineRequest(
        request_id=RequestId(name),
        attempt=0,
        leg=leg,
        model=ModelName("m"),
        token_ids=array("I", tokens),
        sampling=sampling or Sampling(max_tokens=max_tokens),
        **fields,
    )


def engine_request(
    tokens: Iterable[int] = (5, 6, 7),
    kind: Leg = Leg.AGGREGATED,
    *,
    max_tokens: int = 9,
    call: ClientCall | None = None,
    **changes: Any,
) -> EngineRequest:
    """A leg of a greedy request that ends by its length, under a name of its own."""
    request = EngineRequest(
        request_id=RequestId(f"r{next(_names)}"),
        attempt=0,
        leg=kind,
        model=MODEL,
        token_ids=array("I", tokens),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        intake="i",
        call=call,
    )
    return replace(request, **changes)


def completion_request(
    tokens: Iterable[int], *, stream: bool = True, max_tokens: int = 9, **fields: object
) -> EngineRequest:
    """A leg whose client wrote a greedy completion of these tokens."""
    prompt = list(tokens)
    body: dict[str, object] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **fields,
    }
    return engine_request(prompt, max_tokens=max_tokens, call=client_call(body))


def full_request(call: ClientCall | None = None, kind: Leg = Leg.AGGREGATED, **changes: Any) -> EngineRequest:
    """A leg of which every part says something."""
    request = EngineRequest(
        request_id=RequestId("r"),
        attempt=1,
        leg=kind,
        model=ModelName("public"),
        token_ids=array("I", [5, 6, 7]),
        sampling=Sampling(max_tokens=9, min_tokens=2, temperature=0.5, seed=3, stop_token_ids=(2,)),
        intake="i",
        call=call,
    )
    return replace(request, **changes)


def short_completion(*, stream: bool = True, kind: Leg = Leg.AGGREGATED) -> EngineRequest:
    """A leg whose client wrote a short text."""
    return engine_request(
        (1, 2), kind, max_tokens=3, call=client_call({"model": MODEL, "prompt": "hi", "stream": stream})
    )
