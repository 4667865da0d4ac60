"""Parsers of bodies that look through them first, as the front door does."""

import json
from typing import Any

from kvrouter.core.ids import ModelName
from kvrouter.core.requests import CallRoute
from kvrouter.frontend.openai import parse, passthrough
from kvrouter.frontend.openai.body import BodyBounds, scanned
from kvrouter.frontend.openai.parse import READER, ChatCall, CompletionCall, NvextReader
from kvrouter.frontend.openai.passed_routes import PASSED_ROUTES, parse_passed
from kvrouter.frontend.openai.passthrough import PassthroughCall
from kvrouter.text.prompts.fields import PromptFields

BOUNDS = BodyBounds()


def parse_chat(data: bytes, nvext: NvextReader = READER) -> ChatCall:
    return parse.parse_chat(scanned(data, BOUNDS), nvext)


def parse_completion(data: bytes, nvext: NvextReader = READER) -> CompletionCall:
    return parse.parse_completion(scanned(data, BOUNDS), nvext)


def parse_either(data: bytes, nvext: NvextReader = READER) -> ChatCall | CompletionCall:
    return parse.parse_either(scanned(data, BOUNDS), nvext)


def parse_passthrough(route: CallRoute, data: bytes, nvext: NvextReader = READER) -> PassthroughCall:
    return passthrough.parse_passthrough(route, ModelName("m"), scanned(data, BOUNDS), nvext)


def parse_passed_chat(route: CallRoute, body: dict[str, Any]) -> PromptFields:
    """Return what the prompt of a call is made from, on whichever route."""
    data = json.dumps(body).encode()
    if route is CallRoute.CHAT:
        found = parse_passthrough(route, data).chat
    else:
        passed = next(each for each in PASSED_ROUTES if each.route is route)
        found = parse_passed(passed, ModelName("m"), scanned(data, BOUNDS)).chat
    assert found is not None
    return found
