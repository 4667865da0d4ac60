"""Counts, per model, the chats that could not be rendered into prompts, and why: they are routed by load."""

from collections import Counter, deque
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from kvrouter.core.errors import ContextLengthExceeded, KvrouterError
from kvrouter.core.ids import ModelName
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.text.chat import TemplateFailed
from kvrouter.text.model import TextModel
from kvrouter.text.template_budget import TemplateOverBounds

WINDOW_CHATS = 16
"""A model is routed by load while more than half of its last chats could not be rendered."""

REASONS_LOGGED_MAX = 64
"""The most reasons that are logged, over all models: some contain text of a client."""

NO_TEMPLATE = "it has no chat template"


class UnrenderedReason(StrEnum):
    """Why a chat could not be rendered into a prompt."""

    NO_TEMPLATE = "no_template"
    TEMPLATE_FAILED = "template_failed"
    OVER_BOUNDS = "over_bounds"
    REFUSED = "refused"
    TOO_LONG = "too_long"

    @property
    def is_for_the_engine(self) -> bool:
        """Whether the engine most likely refuses the call too, because the call is wrong."""
        return self in (UnrenderedReason.REFUSED, UnrenderedReason.TOO_LONG)


class Unrendered(NamedTuple):
    """One chat that could not be rendered into a prompt."""

    reason: UnrenderedReason
    detail: str
    is_logged: bool = False
    """Whether the reason was already logged when the model was loaded."""


class UnrenderedChats(NamedTuple):
    """How many chats of a model could not be rendered for one reason, and the last one's detail."""

    reason: UnrenderedReason
    chats: int
    detail: str


def unrendered(text: TextModel, error: KvrouterError) -> Unrendered:
    """Return the reason for a chat whose rendering raised ``error``."""
    if text.template is None:
        return Unrendered(UnrenderedReason.NO_TEMPLATE, NO_TEMPLATE)
    if isinstance(error, TemplateFailed):
        fault = error.message.removeprefix("messages: ")
        return Unrendered(UnrenderedReason.TEMPLATE_FAILED, fault, is_logged=fault == text.template.fault)
    if isinstance(error, TemplateOverBounds):
        return Unrendered(UnrenderedReason.OVER_BOUNDS, error.message)
    is_long = isinstance(error, ContextLengthExceeded)
    return Unrendered(UnrenderedReason.TOO_LONG if is_long else UnrenderedReason.REFUSED, error.message)


class ChatRenderings:
    """The last renderings of each model's chats, and counts of the failed ones."""

    def __init__(self, instrumentation: FrontendInstrumentation) -> None:
        self._instrumentation = instrumentation
        self._windows: dict[ModelName, deque[bool]] = {}
        self._chats: Counter[tuple[ModelName, UnrenderedReason]] = Counter()
        self._details: dict[tuple[ModelName, UnrenderedReason], str] = {}
        self._last: dict[ModelName, str] = {}
        self._logged: set[tuple[ModelName, str]] = set()

    def note(self, model: ModelName, missing: Unrendered | None) -> None:
        """Count one chat of ``model``: rendered, or not, for the reason ``missing``."""
        if missing is not None:
            self._instrumentation.chat_unrendered(model, missing.reason)
            if missing.reason.is_for_the_engine:
                return
            self._chats[model, missing.reason] += 1
            self._details[model, missing.reason] = missing.detail
            key = (model, missing.detail)
            if not missing.is_logged and key not in self._logged and len(self._logged) < REASONS_LOGGED_MAX:
                self._logged.add(key)
                self._instrumentation.chat_template_failed(model, missing.detail)
            if missing.reason is UnrenderedReason.NO_TEMPLATE:
                return  # completions are still tokenized here, and engines may refuse chats
            self._last[model] = missing.detail
        self._windows.setdefault(model, deque(maxlen=WINDOW_CHATS)).append(missing is not None)

    def why_by_load(self, model: ModelName, text: TextModel) -> str | None:
        """Return why most chats of a model are routed by load; None when they are not, or before any chat."""
        window = self._windows.get(model)
        if window is None:
            return text.why_by_load
        if 2 * sum(window) <= len(window):
            return None
        return f"chats cannot be read here ({sum(window)} of the last {len(window)}): {self._last[model]}"

    def counts(self, model: ModelName) -> Iterator[UnrenderedChats]:
        """Yield a model's failed renderings by reason, without chats that engines refuse too."""
        for reason in UnrenderedReason:
            chats = self._chats[model, reason]
            if chats:
                yield UnrenderedChats(reason, chats, self._details[model, reason])
