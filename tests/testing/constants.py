"""Limits and times that modules keep as constants, set to other values for one test."""

from numbers import Real
from types import ModuleType
from typing import Protocol

import pytest


class SetConstants(Protocol):
    """``set_constants(event_ingest, SILENT_AFTER_S=0.02)``."""

    def __call__(self, module: ModuleType, **values: object) -> None: ...


@pytest.fixture
def set_constants(monkeypatch: pytest.MonkeyPatch) -> SetConstants:
    """Set constants of a module until the test ends. A number stays a number, and any other its type."""

    def set_them(module: ModuleType, **values: object) -> None:
        for name, value in values.items():
            assert name.isupper(), f"{name} is no constant"
            was = getattr(module, name)
            kind = Real if isinstance(was, Real) else type(was)
            assert isinstance(value, kind), f"{name} is of another type"
            monkeypatch.setattr(module, name, value)

    return set_them
