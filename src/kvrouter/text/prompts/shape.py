"""The shape of a call: features that an engine may convert to a prompt differently from the router."""

from kvrouter.text.prompts.fields import MESSAGES_MAX, PromptFields

_ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_TYPES = {
    "function_call": "assistant",
    "custom_tool_call": "assistant",
    "reasoning": "assistant",
    "function_call_output": "tool",
    "custom_tool_call_output": "tool",
}


def shape_of(fields: PromptFields) -> str:
    """Return route, roles and further features, such as ``chat developer+user tools kwargs``: ``tools``;
    ``kwargs`` for names of the template; ``reasoning`` for an effort or a budget of thinking; ``documents``;
    ``continued`` for an answer that continues the last message, or begins without a generation prompt.
    """
    items = fields.messages if fields.messages is not None else fields.input
    found = {_role_of(item) for item in items[:MESSAGES_MAX]} if isinstance(items, list) else {"user"}
    if fields.instructions or fields.system:
        found.add("system")
    roles = "+".join(role for role in (*_ROLES, "other") if role in found) or "nobody"
    features = {
        "tools": bool(fields.tools),
        "kwargs": bool(fields.chat_template_kwargs),
        "reasoning": bool(fields.reasoning_effort or fields.reasoning or fields.thinking),
        "documents": bool(fields.documents),
        "continued": bool(fields.continue_final_message) or fields.add_generation_prompt is False,
    }
    return " ".join([str(fields.route.generates), roles, *(name for name, has in features.items() if has)])


def _role_of(item: object) -> str:
    if not isinstance(item, dict):
        return "other"
    kind, role = item.get("type"), item.get("role")
    known = _OF_TYPES.get(kind) if isinstance(kind, str) else None
    return known or (role if isinstance(role, str) and role in _ROLES else "other")
