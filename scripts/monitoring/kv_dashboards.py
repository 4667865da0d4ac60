"""The dashboards about KV: its transfers, and the index of what workers hold."""

from scripts.monitoring.panels import Dashboard, Panel, Query, line

TRANSFER = Dashboard(
    uid="kvrouter-kv-transfer",
    title="kvrouter: KV transfer by zone",
    panels=(
        Panel(
            title="Handoffs by pair of domains",
            description="Handoffs of KV from prefill to decode, a second, by the domains at both ends.",
            unit="ops",
            queries=line(
                "sum by (prefill_domain, decode_domain) (rate(kvrouter_handoffs_total{@fleet}[@rate]))",
                "{{prefill_domain}} → {{decode_domain}}",
            ),
        ),
        Panel(
            title="Time to first token by pair of domains",
            description="The median, of requests that a pair of workers served.",
            unit="s",
            queries=line(
                "histogram_quantile(0.5, sum by (le, prefill_domain, decode_domain)"
                " (rate(kvrouter_time_to_first_token_by_domain_seconds_bucket{@fleet}[@rate])))",
                "{{prefill_domain}} → {{decode_domain}}",
            ),
        ),
        Panel(
            title="Workers by domain",
            description="Workers of each role in each transfer domain.",
            unit="short",
            queries=line(
                "max by (domain, role) (sum by (instance, domain, role) (kvrouter_worker_up{@model}))",
                "{{domain}} {{role}}",
            ),
        ),
        Panel(
            title="Fallbacks",
            description="Handoffs that crossed their domain, a second: no decode worker was left in it.",
            unit="ops",
            queries=line("sum by (domain) (rate(kvrouter_fallbacks_total{@fleet}[@rate]))", "{{domain}}"),
        ),
        Panel(
            title="Waits for a domain",
            description="Requests that waited for a decode worker in their domain, a second, by outcome.",
            unit="ops",
            queries=line(
                "sum by (outcome) (rate(kvrouter_domain_waits_total{@fleet}[@rate]))", "{{outcome}}"
            ),
        ),
        Panel(
            title="Lost KV",
            description="Handoffs whose KV did not arrive, a second, by both workers and why.",
            unit="ops",
            queries=line(
                "sum by (prefill_worker, decode_worker, reason)"
                " (rate(kvrouter_kv_lost_total{@model}[@rate]))",
                "{{prefill_worker}} → {{decode_worker}}: {{reason}}",
            ),
        ),
        Panel(
            title="Fetched KV",
            description="Bytes of KV that workers fetched, a second, by their engines' own count.",
            unit="Bps",
            queries=line(
                "sum by (worker) (max by (worker, dp_rank)"
                " (rate(kvrouter_kv_transfer_bytes_total{@model}[@rate])))",
                "{{worker}}",
            ),
        ),
        Panel(
            title="Speed of a transfer",
            description="Bytes by seconds of the transfers that workers made.",
            unit="Bps",
            queries=line(
                "sum by (worker) (rate(kvrouter_kv_transfer_bytes_total{@model}[@rate]))"
                " / sum by (worker) (rate(kvrouter_kv_transfer_seconds_total{@model}[@rate]))",
                "{{worker}}",
            ),
        ),
        Panel(
            title="Bandwidth of links",
            description="Under the cost of time: as learned from handoffs.",
            unit="Bps",
            queries=line("avg by (link) (kvrouter_link_bandwidth_bytes_per_second{@model})", "{{link}}"),
        ),
        Panel(
            title="Latency of links",
            description="Under the cost of time: what a transfer takes apart from its bytes.",
            unit="s",
            queries=line("avg by (link) (kvrouter_link_latency_seconds{@model})", "{{link}}"),
        ),
        Panel(
            title="Slow links and ranks",
            description="Links that take twice as long as they should, and ranks that get KV slowly.",
            unit="short",
            queries=(
                Query(expr="max by (link) (kvrouter_link_slow{@model}) == 1", legend="{{link}}"),
                Query(
                    expr="max by (worker, dp_rank) (kvrouter_kv_transfer_slow{@fleet}) == 1",
                    legend="rank {{worker}}/{{dp_rank}}",
                ),
            ),
        ),
        Panel(
            title="Failed transfers",
            description="Transfers of KV to a worker that failed, a second, by its engine's own count.",
            unit="ops",
            queries=line(
                "sum by (worker) (rate(kvrouter_kv_transfers_failed_total{@model}[@rate]))", "{{worker}}"
            ),
        ),
    ),
)

INDEX = Dashboard(
    uid="kvrouter-index",
    title="kvrouter: index health",
    panels=(
        Panel(
            title="States of feeds",
            description="Ranks by the state that their event stream is in.",
            unit="short",
            queries=line(
                "max by (state) (sum by (instance, state) (kvrouter_feed_state{@fleet}))", "{{state}}"
            ),
        ),
        Panel(
            title="Staleness",
            description="How long a rank's blocks have not been known for sure.",
            unit="s",
            queries=line(
                "max by (worker, dp_rank) (kvrouter_feed_staleness_seconds{@fleet}) > 0",
                "{{worker}}/{{dp_rank}}",
            ),
        ),
        Panel(
            title="Ranks without events",
            description="Ranks that should publish KV events and were not heard for 15 s.",
            unit="short",
            queries=line(
                "max by (worker, dp_rank) (kvrouter_kv_events_missing{@fleet}) == 1", "{{worker}}/{{dp_rank}}"
            ),
        ),
        Panel(
            title="Lag of events",
            description="Age of the latest KV batch when it was applied, by its sender's clock.",
            unit="s",
            queries=line("max by (worker) (kvrouter_event_lag_seconds{@fleet})", "{{worker}}"),
        ),
        Panel(
            title="Answers that contradict the index",
            description="Share of the answers for which the index had promised another number of blocks.",
            unit="percentunit",
            queries=line(
                "sum by (prediction)"
                ' (rate(kvrouter_index_predictions_total{@model,prediction!="right"}[@rate]))'
                " / on () group_left sum(rate(kvrouter_index_predictions_total{@model}[@rate]))",
                "{{prediction}}",
            ),
        ),
        Panel(
            title="Ranks that the index was wrong about",
            description="Times that a rank's own counts of cached tokens contradicted the index.",
            unit="short",
            queries=line(
                "sum by (worker, dp_rank) (increase(kvrouter_index_wrong_total{@model}[@rate]))",
                "{{worker}}/{{dp_rank}}",
            ),
        ),
        Panel(
            title="Blocks in the index",
            description="Blocks that workers are known to hold, by medium; the frontend that knows most.",
            unit="short",
            queries=line("max by (model, medium) (kvrouter_index_blocks{@model})", "{{model}} {{medium}}"),
        ),
        Panel(
            title="Memory of the index",
            description="By frontend.",
            unit="bytes",
            queries=line("sum by (instance) (kvrouter_index_bytes{@model})", "{{instance}}"),
        ),
        Panel(
            title="What happens in event streams",
            description="Gaps, orphans, stored and removed blocks, and what else feeds count, a second.",
            unit="ops",
            queries=line("sum by (outcome) (rate(kvrouter_feed_events_total{@model}[@rate]))", "{{outcome}}"),
        ),
        Panel(
            title="Events that are not passed on",
            description="Blocks that workers skipped and messages that routers dropped, a second.",
            unit="ops",
            queries=(
                Query(
                    expr="sum by (reason) (rate(kvrouter_kv_events_skipped_total{@model}[@rate]))",
                    legend="skipped: {{reason}}",
                ),
                Query(
                    expr="sum by (reason) (rate(kvrouter_events_dropped_total{@fleet}[@rate]))",
                    legend="dropped: {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Discovery",
            description="1 while a frontend can reach discovery.",
            unit="short",
            queries=line("min by (instance) (kvrouter_discovery_up{@fleet})", "{{instance}}"),
        ),
        Panel(
            title="Other frontends",
            description="Other frontends whose requests are counted, and those with missed requests.",
            unit="short",
            queries=(
                Query(expr="max by (instance) (kvrouter_replicas{@fleet})", legend="known to {{instance}}"),
                Query(
                    expr="max by (instance) (kvrouter_replicas_behind{@fleet})",
                    legend="behind at {{instance}}",
                ),
            ),
        ),
    ),
)
