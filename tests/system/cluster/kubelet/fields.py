"""What a stored pod says of itself, and how its words come true on a machine without containers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVERY_INTERFACE = "0.0.0.0"
"""A pod has one interface: its own address."""

_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_PLAIN = {
    "metadata.name": ("metadata", "name"),
    "metadata.namespace": ("metadata", "namespace"),
    "metadata.uid": ("metadata", "uid"),
    "spec.nodeName": ("spec", "nodeName"),
    "spec.serviceAccountName": ("spec", "serviceAccountName"),
}
_REFERENCE = re.compile(r"\$(\$|\((\w[\w.-]*)\))")


class NotPlayedError(Exception):
    """A manifest asks for something that this kubelet does not do."""


def field(pod: Mapping[str, Any], path: str, address: str) -> str:
    """Return the field of ``pod`` that a ``fieldRef`` names; a label that is not there is empty."""
    keyed = _KEYED.fullmatch(path)
    if keyed is not None:
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    if path == "status.podIP":
        return address
    if path not in _PLAIN:
        raise NotPlayedError(f"fieldRef {path}")
    part, name = _PLAIN[path]
    return str(pod[part][name])


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return ``text`` with ``$(NAME)`` in place; a name that is not known stays, and ``$$`` is one ``$``."""

    def reported(found: re.Match[str]) -> str:
        if found[1] == "$":
            return "$"
        return variables.get(found[2], found[0])

    return _REFERENCE.sub(reported, text)


class Outside:
    """Where the paths and the address that a container names are on this machine.

    No container is here, so nothing can be mounted where a manifest says: each absolute path of a mount is
    rewritten wherever it stands in a variable or an argument.
    """

    def __init__(self, mounts: Mapping[str, Path], address: str) -> None:
        self._mounts = {path.rstrip("/"): str(folder) for path, folder in mounts.items()}
        self._address = address
        either = "|".join(re.escape(path) for path in sorted(self._mounts, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w./-])({either})(?![\w.-])") if either else None

    def word(self, text: str) -> str:
        """Return ``text`` as it is true here."""
        if text == EVERY_INTERFACE:
            return self._address
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._mounts[found[1]], text)

    def folder(self, path: str) -> str | None:
        """Return the folder that is mounted at ``path``."""
        return self._mounts.get(path)
