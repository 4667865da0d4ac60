"""``kvrouter doctor`` asks for nothing in healthy fleets, and names the fault alone in broken ones."""

import pytest

from tests.testing.constants import SetConstants
from tests.testing.doctor_fleets import BROKEN, HEALTHY, SERVED_ENOUGH, DoctorFleet


@pytest.mark.parametrize("fleet", HEALTHY, ids=lambda each: each.name)
async def test_a_healthy_fleet_has_no_finding_that_asks_for_action(
    fleet: DoctorFleet, set_constants: SetConstants
) -> None:
    report = await fleet.examined(set_constants)
    assert fleet.verdict(report) == "no finding"
    assert all(each.compared for each in report.passed)


@pytest.mark.parametrize("fleet", SERVED_ENOUGH, ids=lambda each: each.name)
async def test_a_check_that_no_traffic_makes_does_not_ask_for_more(
    fleet: DoctorFleet, set_constants: SetConstants
) -> None:
    report = await fleet.examined(set_constants)
    assert report.not_enough == []
    assert {"clocks", "predictions", "hit-rate", "slow-ranks"} <= {each.check for each in report.not_made}


@pytest.mark.parametrize("fleet", BROKEN, ids=lambda each: each.name)
async def test_a_broken_fleet_has_its_fault_as_the_only_finding(
    fleet: DoctorFleet, set_constants: SetConstants
) -> None:
    report = await fleet.examined(set_constants)
    assert {each.check for each in report.findings} == {fleet.check}
    for finding in report.findings:
        assert fleet.words in f"{finding.subject} {finding.seen}"
        assert finding.compared
        assert finding.remedy
