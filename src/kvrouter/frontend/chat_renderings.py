"""Tells for which models chats are not made into prompts here, and why: such calls are routed by load."""

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
"""A model is routed by load while more than half of its last chats could not be made into prompts."""

REASONS_LOGGED_MAX = 64
"""How many reasons are logged, of all models: some repeat words of a client."""

NO_TEMPLATE = "it has no chat template"


class UnrenderedReason(StrEnum):
    """Why a chat was not made into a prompt."""

    NO_TEMPLATE = "no_template"
    TEMPLATE_FAILED = "template_failed"
    OVER_BOUNDS = "over_bounds"
    REFUSED = "refused"
    TOO_LONG = "too_long"

    @property
    def is_for_the_engine(self) -> bool:
        """Whether the engine most likely refuses the call too: the caller's mistake, and nobody else's."""
        return self in (UnrenderedReason.REFUSED, UnrenderedReason.TOO_LONG)


class Unrendered(NamedTuple):
    """One chat that was not made into a prompt."""

    reason: UnrenderedReason
    detail: str
    is_logged: bool = False
    """Whether the log said so as the model was loaded."""


class UnrenderedChats(NamedTuple):
    """The chats of a model that were not made into prompts for one reason, and the last one's detail."""

    reason: UnrenderedReason
    chats: int
    detail: str


def unrendered(text: TextModel, error: KvrouterError) -> Unrendered:
    """Return the reason for a chat that this error kept from becoming a prompt."""
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
    """What became of the chats of each model that is served."""

    def __init__(self, observed: FrontendInstrumentation) -> None:
        self._observed = observed
        self._windows: dict[ModelName, deque[bool]] = {}
        self._chats: Counter[tuple[ModelName, UnrenderedReason]] = Counter()
        self._details: dict[tuple[ModelName, UnrenderedReason], str] = {}
        self._last: dict[ModelName, str] = {}
        self._logged: set[tuple[ModelName, str]] = set()

    def note(self, model: ModelName, missing: Unrendered | None) -> None:
        """A chat of this model became a prompt, or did not, which ``missing`` tells."""
        if missing is not None:
            self._observed.chat_unrendered(model, missing.reason)
            if missing.reason.is_for_the_engine:
                return
            self._chats[model, missing.reason] += 1
            self._details[model, missing.reason] = missing.detail
            key = (model, missing.detail)
            if not missing.is_logged and key not in self._logged and len(self._logged) < REASONS_LOGGED_MAX:
                self._logged.add(key)
                self._observed.chat_template_failed(model, missing.detail)
            if missing.reason is UnrenderedReason.NO_TEMPLATE:
                return  # prompts of completions are read, and chats may have no answer at all
            self._last[model] = missing.detail
        self._windows.setdefault(model, deque(maxlen=WINDOW_CHATS)).append(missing is not None)

    def why_by_load(self, model: ModelName, text: TextModel) -> str | None:
        """Why most chats of a model are routed by load; None where they are not, or there were none."""
        window = self._windows.get(model)
        if window is None:
            return text.why_by_load
        if 2 * sum(window) <= len(window):
            return None
        return f"chats cannot be read here ({sum(window)} of the last {len(window)}): {self._last[model]}"

    def counts(self, model: ModelName) -> Iterator[UnrenderedChats]:
        """Yield how many chats of a model were not made into prompts, by reason, without those that their
        engine refuses too.
        """
        for reason in UnrenderedReason:
            chats = self._chats[model, reason]
            if chats:
                yield UnrenderedChats(reason, chats, self._details[model, reason])
