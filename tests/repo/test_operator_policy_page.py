"""The page on the policy: what it shows is admitted, and what it calls the same is the same."""

import re
from pathlib import Path

import yaml

from kvrouter.operator.admission.validate import Verdict
from kvrouter.operator.api.crd import COLUMNS
from kvrouter.operator.api.deployment import KIND, read_deployment
from kvrouter.operator.api.grove import read_topology
from kvrouter.operator.api.names import LEVEL_CHARS_MAX
from kvrouter.operator.policy import read_policy
from tests.system.cluster.admission_rows import BY_THE_DEFINITION, UNREAD, WITH_GROVE, WITHOUT_GROVE
from tests.testing.operator_deployments import GROVE, NO_GROVE, validated

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes-policy.md").read_text("utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]
SHOWN = [block for block in BLOCKS if block["kind"] == KIND]


def test_shown_deployments_are_admitted() -> None:
    assert [validated(document, None, GROVE) for document in SHOWN] == [Verdict()] * 5
    assert validated(SHOWN[2], None, NO_GROVE) == Verdict()


def test_the_two_shown_spellings_read_as_the_same_policy() -> None:
    first, second = (read_deployment(document).deployment for document in SHOWN[:2])
    assert first is not None
    assert second is not None
    assert read_policy(first.spec).policy == read_policy(second.spec).policy is not None


def test_the_shown_topology_is_read_completely() -> None:
    (shown,) = (read_topology(block) for block in BLOCKS if block["kind"] != KIND)
    assert shown is not None
    assert shown.domains == ("zone", "rack")
    assert shown.network_qos is not None
    assert [each.level for each in shown.network_qos.levels] == ["zone", "rack"]
    assert shown.oddities == ()


def test_the_page_names_every_column() -> None:
    untold = [column["name"] for column in COLUMNS if f"`{str(column['name']).upper()}`" not in PAGE]
    assert untold == []


def test_the_page_states_the_longest_level() -> None:
    assert f"at most {LEVEL_CHARS_MAX} characters" in " ".join(PAGE.split())


def test_every_mistake_in_the_pages_table_has_an_admission_test() -> None:
    section = PAGE.partition("## What is refused, and how to fix it\n")[2].partition("\n## ")[0]
    shown = {
        row for row in re.findall(r"^\| (?!mistake|---)(.+?) \|", section, re.M) if not row.startswith("**")
    }
    played = {row for table in (BY_THE_DEFINITION, WITHOUT_GROVE, UNREAD, WITH_GROVE) for row in table}
    assert shown == played != set()
