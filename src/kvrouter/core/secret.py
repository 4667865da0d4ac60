"""Reads and checks secrets from variables and files. Error messages never contain the secret."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvrouter.core.errors import ConfigError

SECRET_MAX_BYTES = 16 * 1024
"""The longest key, token or password; the token of a service account has one to two thousand bytes."""


def secret_mistake(text: str) -> str | None:
    """Return the mistake in a secret as a phrase, such as ``is empty``; None for a valid secret."""
    if not text:
        return "is empty"
    if len(text.encode("utf-8", "surrogatepass")) > SECRET_MAX_BYTES:
        return f"is longer than {SECRET_MAX_BYTES} bytes: is it something else than a secret?"
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text):
        return "holds a line break or another control character: it must be one line of text"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "must be UTF-8 text"
    return None


def trimmed(text: str) -> str:
    """Return a secret without trailing white space: files and ``echo`` end with a new line."""
    return text.rstrip()


def checked_secret(text: str, name: str) -> str:
    """Return a secret without trailing white space. Raises ConfigError that names ``name``."""
    secret = trimmed(text)
    mistake = secret_mistake(secret)
    if mistake is not None:
        raise ConfigError(f"{name}: {mistake}", param=_field(name))
    return secret


def secret_variable(environ: Mapping[str, str], variable: str) -> str | None:
    """Return the secret in a variable; None when it is unset or blank. Raises ConfigError that names it."""
    text = environ.get(variable, "")
    return checked_secret(text, variable) if text.strip() else None


def secret_file(path: Path, name: str) -> str:
    """Return the secret in a file, one line of text; ``name`` is the setting. Raises ConfigError."""
    data = secret_bytes(path, name, max_bytes=SECRET_MAX_BYTES)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: {path}: must be UTF-8 text", param=_field(name)) from error
    return checked_secret(text, f"{name}: {path}")


def secret_bytes(path: Path, name: str, *, max_bytes: int) -> bytes:
    """Return the content of a secret file, a regular file of at most ``max_bytes``. Raises ConfigError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer
    try:
        descriptor = os.open(path, flags)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{name}: {path}: is no regular file", param=_field(name))
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {path}: {_why(error)}", param=_field(name)) from error
    if len(data) > max_bytes:
        raise ConfigError(f"{name}: {path}: is longer than {max_bytes} bytes", param=_field(name))
    return data


def _field(name: str) -> str:
    return name.partition(":")[0].rpartition(".")[2]


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return "may not be read by this process: give its user the right to read it"
    if isinstance(error, FileNotFoundError):
        return "is not there"
    return f"cannot be read: {(error.strerror if isinstance(error, OSError) else None) or 'no path'}"
