"""Law: what lies deeper than the bound is null, and nothing else of an object changes."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.kube.client import DEPTH_MAX, ClusterLost, cut_at_depth, decoded, manifest_of
from kvrouter.kube.objects import ResourceKind, WatchEvent

TEXTS = st.text(st.sampled_from('{}[]",:\\ab\u00e9\U0001f600\x00'), max_size=6)
VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=20,
)
NESTED_TOO_DEEP = [1_000, 2_000, 5_000, 9_990, 200_000]
"""Depths at which Python 3.11, 3.12 and 3.13 give up, and deeper."""


def cut(value: JsonValue, depth: int) -> JsonValue:
    """The oracle: the same in objects."""
    if isinstance(value, list):
        return [cut(each, depth - 1) for each in value] if depth > 0 else None
    if isinstance(value, dict):
        return {key: cut(each, depth - 1) for key, each in value.items()} if depth > 0 else None
    return value


@given(VALUES, st.integers(0, 6), st.booleans())
def test_values_below_the_depth_limit_become_null_and_the_rest_stays(
    value: JsonValue, depth: int, is_ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert json.loads(cut_at_depth(text, depth_max=depth)) == cut(value, depth)


@given(st.binary(max_size=60) | TEXTS.map(str.encode))
def test_any_bytes_are_cut_without_an_error(text: bytes) -> None:
    assert len(cut_at_depth(text, depth_max=2)) <= 2 * len(text)


@pytest.mark.parametrize("depth", NESTED_TOO_DEEP)
@pytest.mark.parametrize(("opens", "closes"), [(b'{"a":', b"}"), (b"[", b"]")])
def test_object_keeps_the_fields_beside_a_too_deep_one(depth: int, opens: bytes, closes: bytes) -> None:
    kind = ResourceKind("v1", "Pod", "pods")
    text = b'{"metadata": {"name": "one"}, "spec": %b1%b, "status": {"phase": "Running"}}' % (
        opens * depth,
        closes * depth,
    )
    found = manifest_of(kind, msgspec.Raw(text))
    assert found["metadata"] == {"name": "one"}
    assert found["status"] == {"phase": "Running"}
    spec, levels = found["spec"], 0
    while spec is not None:
        spec = spec["a"] if isinstance(spec, dict) else spec[0]  # type: ignore[index]
        levels += 1
    assert levels == DEPTH_MAX - 1


@pytest.mark.parametrize("depth", NESTED_TOO_DEEP)
def test_too_deep_watch_line_is_still_decoded_as_an_event(depth: int) -> None:
    line = b'{"type": "ADDED", "object": {"metadata": {"name": "one"}, "spec": %b1%b}}' % (
        b"[" * depth,
        b"]" * depth,
    )
    event = decoded(line, WatchEvent)
    assert event.type == "ADDED"
    assert manifest_of(ResourceKind("v1", "Pod", "pods"), event.object)["metadata"] == {"name": "one"}


@pytest.mark.parametrize("text", [b"{", b'{"a":' * 5_000, b"[" * 100_000, b"]" * 5_000, b"", b"\xff"])
def test_invalid_json_is_a_lost_cluster(text: bytes) -> None:
    with pytest.raises(ClusterLost):
        manifest_of(ResourceKind("v1", "Pod", "pods"), msgspec.Raw(text))
    with pytest.raises(ClusterLost):
        decoded(text, WatchEvent)
