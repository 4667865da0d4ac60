"""The page on security names every limit that has a setting."""

import re
from pathlib import Path

import pytest

from kvrouter.config import FrontendSettings, KvRouterConfig
from kvrouter.config.planes import PlaneSettings
from kvrouter.config.setting import Section, settings_of

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
LIMIT = re.compile(r"_(max|min|limit|timeout|within|stall)(_|$)|_wait_s$")
NO_LIMIT = {"router_min_initial_workers", "circuit_open_max_s"}
"""Settings whose names look like it."""


def limits() -> list[str]:
    sections: dict[str, type[Section]] = {
        "frontend": FrontendSettings,
        "router": KvRouterConfig,
        "planes": PlaneSettings,
    }
    specs = [spec for name, section in sections.items() for spec in settings_of(name, section)]
    return sorted(
        str(spec.flag or spec.variable)
        for spec in specs
        if LIMIT.search(spec.name) and spec.name not in NO_LIMIT
    )


@pytest.mark.parametrize("setting", limits())
def test_every_limit_with_a_setting_is_on_the_page(setting: str) -> None:
    assert f"`{setting}`" in PAGE
