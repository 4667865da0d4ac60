"""The registry of engines that can be attached: one line for each kind.

A kind is a package with ``SHORT_HELP`` and ``HELP``, the texts of its command, and a module ``attach`` with a
function ``attach``: an :data:`~kvrouter.engines.attach.AttachEngine`. It is imported when it is needed.
"""

from importlib import import_module
from typing import NamedTuple

ENGINES = {
    "vllm": "kvrouter.engines.vllm",
    "sglang": "kvrouter.engines.sglang",
    "trtllm": "kvrouter.engines.trtllm",
}
"""Packages by the kind's name: in a fleet file, on a pod's label, and of the command ``kvrouter worker``."""


class EngineHelp(NamedTuple):
    """The help texts of the command that attaches engines of one kind."""

    short: str
    text: str


def help_of(kind: str) -> EngineHelp:
    """Return the help of the kind's command."""
    package = import_module(ENGINES[kind])
    return EngineHelp(package.SHORT_HELP, package.HELP)
