"""Metrics: each moves, many services can live in one process, and no label can grow without end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.telemetry import CounterFamily, GaugeFamily, HistogramFamily, Telemetry, families
from tests.testing.constants import SetConstants


def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(telemetry.render().decode())
        for sample in family.samples
    }


def test_every_metric_of_the_table_is_rendered_and_changes() -> None:
    telemetry = Telemetry()
    for spec in Telemetry.SPECS:
        family = next(f for f in vars(telemetry).values() if getattr(f, "meaning", None) == spec.meaning)
        values = tuple(f"{label}-1" for label in spec.labels)
        labels = tuple(sorted(zip(spec.labels, values, strict=True)))
        suffix = "_count" if spec.kind == "histogram" else ""
        key = (f"{spec.name}{suffix}", labels)
        before = samples(telemetry).get(key, 0.0)
        match family:
            case CounterFamily():
                family.inc(*values, by=3)
            case GaugeFamily():
                family.set(3, *values)
            case HistogramFamily():
                family.observe(0.1, *values, times=3)
        assert samples(telemetry)[key] == before + 3, spec.name


def test_metric_names_follow_prometheus_conventions() -> None:
    names = [spec.name for spec in Telemetry.SPECS]
    assert len(set(names)) == len(names)
    for spec in Telemetry.SPECS:
        assert spec.name.startswith("kvrouter_")
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert spec.meaning.endswith(".")
        if spec.kind == "histogram":
            assert spec.name.endswith(("_seconds", "_tokens"))


def test_two_services_share_no_metric_values() -> None:
    one, other = Telemetry(), Telemetry()
    one.handoffs.inc("a", "b")
    assert one.handoffs.value("a", "b") == 1
    assert other.handoffs.value("a", "b") == 0
    assert b'prefill_domain="a"' not in other.render()


def test_hostile_label_values_are_escaped() -> None:
    telemetry = Telemetry()
    telemetry.fallbacks.inc('zo"ne\n\\')
    assert samples(telemetry)["kvrouter_fallbacks_total", (("domain", 'zo"ne\n\\'),)] == 1


def test_label_sets_are_bounded_and_nothing_is_lost(set_constants: SetConstants) -> None:
    set_constants(families, LABEL_SETS_MAX=3)
    counter = CounterFamily("c", "c", ("model",))
    gauge = GaugeFamily("g", "g", ("model",))
    histogram = HistogramFamily("h", "h", ("model",), (1.0,))
    for number in range(10):
        counter.inc(str(number))
        gauge.set(1, str(number))
        histogram.observe(0.5, str(number))
    assert counter.value("_full") == 7
    assert sum(counter.value(str(number)) for number in range(10)) == 3
    assert histogram.count("_full") == 7
    for family in (counter, gauge, histogram):
        (collected,) = family.collect()
        assert len({tuple(sample.labels.items())[-1:] for sample in collected.samples}) <= 8


@pytest.mark.parametrize("labels", [(), ("a", "b")])
def test_the_number_of_labels_is_checked(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="kvrouter_resumes: needs the labels"):
        Telemetry().resumes.inc(*labels)


def test_replaced_gauge_forgets_absent_label_sets() -> None:
    telemetry = Telemetry()
    telemetry.ledger_active_blocks.set(5, "7", "0")
    telemetry.ledger_active_blocks.replace({("8", "0"): 2.0})
    assert telemetry.ledger_active_blocks.value("7", "0") == 0
    assert telemetry.ledger_active_blocks.value("8", "0") == 2
    telemetry.http_connections.add(1)
    telemetry.http_connections.add(1)
    telemetry.http_connections.add(-1)
    assert telemetry.http_connections.value() == 1


def test_scrape_callback_runs_at_each_render_until_it_is_ended() -> None:
    telemetry = Telemetry()
    counts = iter([1.0, 2.0])
    end = telemetry.before_scrape(lambda: telemetry.index_bytes.set(next(counts), "m"))
    assert b'kvrouter_index_bytes{model="m"} 1.0' in telemetry.render()
    assert b'kvrouter_index_bytes{model="m"} 2.0' in telemetry.render()
    end()
    assert b'kvrouter_index_bytes{model="m"} 2.0' in telemetry.render()


@given(values=st.lists(st.floats(min_value=0, max_value=4) | st.sampled_from([0.5, 1.0, 2.0]), max_size=30))
def test_observe_many_equals_observing_one_by_one(values: list[float]) -> None:
    one = HistogramFamily("h", "h", (), (0.5, 1.0, 2.0))
    many = HistogramFamily("h", "h", (), (0.5, 1.0, 2.0))
    for value in values:
        one.observe(value)
    many.observe_many(values)
    (one_page,), (many_page,) = one.collect(), many.collect()
    for left, right in zip(one_page.samples, many_page.samples, strict=True):
        assert (left.name, left.labels) == (right.name, right.labels)
        assert left.value == pytest.approx(right.value)
    buckets = {s.labels["le"]: s.value for s in many_page.samples if s.name.endswith("_bucket")}
    for bound in ("0.5", "1.0", "2.0", "+Inf"):
        assert buckets[bound] == sum(value <= float(bound) for value in values)
