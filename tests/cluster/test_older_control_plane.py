"""What the operator can not rest on where Kubernetes is older than 1.35."""

from tests.cluster.control_plane import ControlPlane, Features
from tests.cluster.namespaces import new_namespace
from tests.cluster.nodes import RACK, ZONE
from tests.cluster.pods import bound_by_hand


def test_neither_feature_is_on(older_plane: ControlPlane) -> None:
    off = Features(mutating_admission_policy=False, copies_binding_labels=False)
    assert older_plane.features() == off


def test_a_bindings_annotations_come_to_its_pod_and_its_labels_do_not(older_plane: ControlPlane) -> None:
    with new_namespace(older_plane) as namespace:
        metadata = bound_by_hand(older_plane, namespace)["metadata"]
    assert metadata["annotations"][RACK] == "said"
    assert not {RACK, ZONE} & metadata["labels"].keys()
