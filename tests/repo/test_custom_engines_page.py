"""The page on custom engines names calls that exist and limits that hold."""

import re
from inspect import signature
from pathlib import Path

from kvrouter import KvPublisher, register_llm
from kvrouter.settings.tree import SETTINGS
from kvrouter.worker import engine_door

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "custom-engines.md").read_text("utf-8")
HEADER = (ROOT / "native" / "c" / "include" / "kvrouter.h").read_text("utf-8")


def test_calls_and_codes_named_on_the_page_are_in_the_header() -> None:
    named = set(re.findall(r"\b(?:kvr_\w+|KVR_[A-Z_]+)\b", PAGE)) - {"KVR_TOKEN"}
    assert named
    assert {name for name in named if not re.search(rf"\b{name}\b", HEADER)} == set()


def test_the_page_counts_the_headers_calls_and_structs() -> None:
    calls = re.findall(r"^[\w *]+?\b(kvr_\w+)\(", HEADER, re.MULTILINE)
    structs = re.findall(r"^typedef struct \w+ \{", HEADER, re.MULTILINE)
    assert (len(set(calls)), len(structs)) == (10, 3)
    assert "ten calls and three structs" in PAGE


def test_the_page_has_the_c_librarys_limits() -> None:
    source = ROOT / "native" / "c" / "src"
    said = (
        ("frames", "FRAME_BLOCKS_MAX: usize = 4096;", "4096 blocks; longer stores are split"),
        ("lib", "QUEUE_BYTES_MAX: u64 = 8 << 20;", "| queue | 8 MiB (`queue_bytes_max`)"),
        ("lib", "HELD_BLOCKS_MAX: u64 = 16_000_000;", "| mirror | 16 million blocks (`held_blocks_max`)"),
        ("publisher", "DP_RANKS: u32 = 4096;", "| ranks | `dp_rank` below 4096 |"),
        ("link", "PAUSE_MIN: Duration = Duration::from_millis(50);", "every 0.05 to 2 s"),
        (
            "link",
            "PAUSE_MAX: Duration = Duration::from_secs(2);",
            "tries again after 0.05 s, then less and less often, up to every 2 s",
        ),
    )
    for file, code, words in said:
        assert code in (source / f"{file}.rs").read_text("utf-8")
        assert words in PAGE


def test_python_calls_named_on_the_page_exist() -> None:
    for name in ("publish_stored", "publish_removed", "publish_cleared", "publish_load", "heartbeat"):
        assert f"`{name}`" in PAGE
        assert callable(getattr(KvPublisher, name))
    for argument in ("event_source", "engine"):
        assert f"`{argument}`" in PAGE
        assert argument in signature(register_llm).parameters
    assert "mm_hashes" in signature(KvPublisher.publish_stored).parameters


def test_the_page_and_header_promise_no_weight_for_other_tiers() -> None:
    """Only overlap on the GPU is asked of the index: no setting changes what other media are worth."""
    assert not [spec.name for spec in SETTINGS if re.search(r"medium|tier|host_cache|disk|cpu", spec.name)]
    assert "no setting makes them worth anything to a decision" in PAGE
    assert "configured otherwise" not in HEADER


def test_the_page_has_the_engine_doors_limits() -> None:
    assert f"cleared after {engine_door.SILENCE_S:g} s of silence" in PAGE
    assert f"shows no token within {engine_door.GREETING_S:g} s" in PAGE
    assert f"| connections | {engine_door.CONNECTIONS_MAX} at one door; the next one is refused |" in PAGE
    assert f"| token | {engine_door.TOKEN_BYTES_MAX} bytes |" in PAGE
    assert f"| frames | {engine_door.FRAME_BYTES_MAX >> 20} MiB, 4096 blocks" in PAGE
