"""What the server says about the replay: handoffs from ``/metrics``."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

HANDOFFS = "kvrouter_handoffs_total"
PREFILL_DOMAIN = "prefill_domain"
DECODE_DOMAIN = "decode_domain"

Handoffs = Counter[tuple[str, str]]
"""How many KV transfers went from a prefill worker's domain to a decode worker's."""


def handoffs(metrics_text: str) -> Handoffs:
    """The handoffs counted in one scrape. A label that is missing raises ``KeyError``."""
    counts: Handoffs = Counter()
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            if sample.name == HANDOFFS:
                counts[sample.labels[PREFILL_DOMAIN], sample.labels[DECODE_DOMAIN]] += int(sample.value)
    return counts
