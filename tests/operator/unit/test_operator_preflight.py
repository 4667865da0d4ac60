"""What is reported before anything is installed: whose each definition is, and the way out."""

import pytest

from kvrouter.kube.objects import Manifest
from kvrouter.operator.reconcile.definition import INSTALL, TAKE_OVER, InstalledDefinition, reports

NAME = "dynamographdeployments.nvidia.com"
OTHER = "kvrouterworkers.kvrouter.dev"


def definition(*managers: tuple[str, str], version: str | None = "0.1.0", of: str = "f:versions") -> Manifest:
    entries: Manifest = {
        "managedFields": [
            {
                "manager": manager,
                "operation": operation,
                "fieldsV1": {"f:spec": {of: {}}},
            }
            for manager, operation in managers
        ]
    }
    annotations: Manifest = {} if version is None else {"kvrouter.dev/definition": version}
    return {
        "metadata": {"name": NAME, "annotations": annotations, **entries},
        "spec": {
            "group": "nvidia.com",
            "versions": [
                {"name": "v1alpha1", "served": True},
                {"name": "v1beta1", "served": True},
                {"name": "v1", "served": False},
            ],
        },
    }


def test_missing_definition_is_reported_with_the_install_command() -> None:
    (report,) = reports([InstalledDefinition(NAME, None)])
    assert report == (NAME, f"not installed yet: {INSTALL}", False)


@pytest.mark.parametrize(
    "managers",
    [
        (("kubectl", "Apply"),),
        (("kubectl-client-side-apply", "Update"),),
        (("kubectl", "Apply"), ("helm", "Apply")),  # taken over where they differed, held by both where not
    ],
)
def test_kvrouter_definition_written_by_kubectl_is_upgraded_by_kubectl(
    managers: tuple[tuple[str, str], ...],
) -> None:
    (report,) = reports([InstalledDefinition(NAME, definition(*managers))])
    assert not report.is_conflict
    assert report.message == f"kvrouter's own, of version 0.1.0. To upgrade it: {INSTALL}"


def test_kvrouter_definition_written_by_helm_is_a_conflict_with_a_takeover() -> None:
    (report,) = reports([InstalledDefinition(NAME, definition(("helm", "Update"), ("kubectl", "Update")))])
    assert report.is_conflict
    assert "its fields are held by helm: the API server refuses" in report.message
    assert report.message.endswith(TAKE_OVER)


def test_manager_of_an_unrelated_field_is_no_conflict() -> None:
    (report,) = reports(
        [InstalledDefinition(NAME, definition(("cert-manager", "Update"), of="f:conversion"))]
    )
    assert not report.is_conflict


def test_another_projects_definition_is_kept_and_no_force_is_suggested() -> None:
    ours = definition(("helm", "Update"))
    theirs = definition(("helm", "Update"), version=None)
    found = reports(
        [
            InstalledDefinition(NAME, theirs, 12, 3),
            InstalledDefinition(OTHER, ours),
            InstalledDefinition("a third", None),
        ]
    )
    assert [report.is_conflict for report in found] == [True, True, False]
    assert "another project's definition, written by helm; it serves v1alpha1, v1beta1" in found[0].message
    assert "12 objects in 3 namespaces are of it" in found[0].message
    assert "stands back" in found[0].message
    assert "kubectl delete" not in found[0].message
    assert "First see to the definition that is another project's" in found[1].message
    assert found[2].message == "not installed yet"
    assert not [report for report in found if "--force-conflicts" in report.message]


def test_unused_definition_of_another_project_comes_with_its_deletion() -> None:
    (report,) = reports([InstalledDefinition(NAME, definition(("helm", "Update"), version=None))])
    assert "It has no objects" in report.message
    assert report.message.endswith(f"kubectl delete crd {NAME}, then {INSTALL}")
