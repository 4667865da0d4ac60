"""A folder of topology files: each file's name is a domain, its content the worker's value there.

The folder is usually a Kubernetes volume: visible names are links into a hidden folder, ``..data``, which the
kubelet exchanges as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrouter.worker.topology_env import VALUE_CHARS_MAX, name_problem, value_problem

_EXCHANGED = "..data"
_READS_MAX = 3
_BYTES_MAX = 4 * VALUE_CHARS_MAX + 1024
"""More than any legal value and the blanks around it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a folder said at one moment. ``domains`` are sorted by name; ``passed_over`` says why, by name.

    ``warnings`` are about entries that someone meant to be read; an empty file, a hidden one or a folder is
    passed over in silence.
    """

    domains: Mapping[str, str]
    passed_over: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """What was found, in one line."""
        parts = [f"{name}={value}" for name, value in self.domains.items()]
        parts += [f"{name} {why}" for name, why in self.passed_over.items()]
        return ", ".join(parts) or "nothing"


def read_domains(folder: Path) -> Reading:
    """Read every file of ``folder``. A folder that is not there, or cannot be read, has no domains.

    When the folder is exchanged meanwhile it is read again, so that values of two moments do not mix.
    """
    for _ in range(_READS_MAX - 1):
        before = _exchange_mark(folder)
        reading = _read_once(folder)
        if _exchange_mark(folder) == before:
            return reading
    return _read_once(folder)


def _exchange_mark(folder: Path) -> str | None:
    try:
        return str((folder / _EXCHANGED).readlink())
    except OSError:
        return None


def _read_once(folder: Path) -> Reading:
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError:
        return Reading({}, {str(folder): "does not exist"})
    except OSError as error:
        why = f"cannot be listed: {error.strerror}"
        return Reading({}, {str(folder): why}, (f"{folder} {why}",))
    domains: dict[str, str] = {}
    passed_over: dict[str, str] = {}
    warnings: list[str] = []
    for entry in entries:
        value, problem, is_meant = _read_value(entry)
        if problem is None:
            domains[entry.name] = value
            continue
        passed_over[entry.name] = problem
        if is_meant:
            warnings.append(f"{entry} {problem}")
    return Reading(domains, passed_over, tuple(warnings))


def _read_value(entry: Path) -> tuple[str, str | None, bool]:
    """The trimmed value, why it is none, and whether that deserves a warning."""
    try:
        if not entry.is_file():
            return "", "is not a file", False
        with entry.open("rb") as file:
            content = file.read(_BYTES_MAX + 1)
        if len(content) > _BYTES_MAX:
            return "", f"is longer than {VALUE_CHARS_MAX} characters", True
        value = content.decode().strip()
    except FileNotFoundError:
        return "", "has just vanished", False
    except OSError as error:
        return "", f"cannot be read: {error.strerror}", True
    except UnicodeDecodeError:
        return "", "is not UTF-8", True
    if not value:
        return "", "is empty", False
    problem = name_problem(entry.name)
    if problem is not None:
        return "", f"cannot be a domain: its name {problem}", True
    problem = value_problem(value)
    return value, problem, problem is not None
