"""Laws of labels: every way puts the same values onto a pod, and does nothing where they are already."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.operator.labels.binding import backfill_labels, binding_patch
from kvrouter.operator.labels.level_labels import LevelLabels, pod_labels
from kvrouter.operator.labels.pods import Node, Pod

KEYS = ("topology.kubernetes.io/zone", "nvidia.com/rack", "a~b/c", "other")
values = st.sampled_from(("", "a", "b"))
labels = st.dictionaries(st.sampled_from((*KEYS, "grove.io/topology.zone", "grove.io/topology.rack")), values)
copies = st.lists(
    st.builds(
        lambda domain, key, is_raw: LevelLabels(
            domain, key, key if is_raw else f"grove.io/topology.{domain}"
        ),
        st.sampled_from(("zone", "rack")),
        st.sampled_from(KEYS),
        st.booleans(),
    ),
    max_size=3,
    unique_by=(lambda copy: copy.domain, lambda copy: copy.pod_label),
)


@given(labels, labels, copies)
def test_backfilled_labels_equal_labels_at_binding_and_are_written_once(
    of_pod: dict[str, str], of_node: dict[str, str], wanted: list[LevelLabels]
) -> None:
    node = Node("n", of_node)
    pod = Pod("p", uid="u", node_name="n", labels=of_pod)
    late = patched(pod, backfill_labels(pod, node, wanted).patch)
    assert backfill_labels(late, node, wanted).patch is None
    at_binding = {**of_pod, **pod_labels(of_node, wanted)}
    assert late.labels == at_binding
    missing = {copy.domain for copy in backfill_labels(pod, node, wanted).missing}
    assert missing == {copy.domain for copy in wanted if not at_binding[copy.pod_label]}


@given(st.none() | labels, labels)
def test_a_patched_binding_has_the_labels_and_needs_no_other_patch(
    present: dict[str, str] | None, wanted: dict[str, str]
) -> None:
    metadata: dict[str, JsonValue] = {} if present is None else {"labels": {**present}}
    found = applied(metadata, binding_patch({"metadata": metadata}, wanted))
    assert found == {**(present or {}), **wanted}
    assert binding_patch({"metadata": {"labels": {**found}}}, wanted) == []


def patched(pod: Pod, patch: dict[str, JsonValue] | None) -> Pod:
    """The pod after a merge patch of its labels."""
    if patch is None:
        return pod
    metadata = patch["metadata"]
    assert isinstance(metadata, dict)
    changed = metadata["labels"]
    assert isinstance(changed, dict)
    assert metadata["uid"] == pod.uid
    return replace(pod, labels={**pod.labels, **{key: str(value) for key, value in changed.items()}})


def applied(metadata: dict[str, JsonValue], patch: list[JsonValue]) -> dict[str, JsonValue]:
    """The labels after a JSON patch (RFC 6902) of additions."""
    found = metadata.get("labels")
    labels = {**found} if isinstance(found, dict) else {}
    for step in patch:
        assert isinstance(step, dict)
        path, value = str(step["path"]), step["value"]
        if path == "/metadata/labels":
            assert isinstance(value, dict)
            labels = {**value}
        else:
            key = path.removeprefix("/metadata/labels/")
            assert "/" not in key
            labels[key.replace("~1", "/").replace("~0", "~")] = value
    return labels
