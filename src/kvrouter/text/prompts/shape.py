"""The shape of a call: features that an engine may convert to a prompt differently from the router."""

from collections.abc import Mapping

from kvrouter.core.requests import CallRoute
from kvrouter.text.prompts.fields import MESSAGES_MAX, PromptFields

_ROUTES: Mapping[CallRoute, str] = {
    CallRoute.CHAT: "chat",
    CallRoute.RESPONSES: "responses",
    CallRoute.MESSAGES: "messages",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_TYPES = {
    "function_call": "assistant",
    "custom_tool_call": "assistant",
    "reasoning": "assistant",
    "function_call_output": "tool",
    "custom_tool_call_output": "tool",
}


def shape_of(fields: PromptFields) -> str:
    """Return route, roles and whether there are tools, such as ``chat developer+user tools``."""
    items = fields.messages if fields.messages is not None else fields.input
    found = {_role_of(item) for item in items[:MESSAGES_MAX]} if isinstance(items, list) else {"user"}
    if fields.instructions or fields.system:
        found.add("system")
    roles = "+".join(role for role in (*_ROLES, "other") if role in found) or "nobody"
    return f"{_ROUTES[fields.route]} {roles}{' tools' if fields.tools else ''}"


def _role_of(item: object) -> str:
    if not isinstance(item, dict):
        return "other"
    kind, role = item.get("type"), item.get("role")
    known = _OF_TYPES.get(kind) if isinstance(kind, str) else None
    return known or (role if isinstance(role, str) and role in _ROLES else "other")
