"""Metrics of requests under the names of OpenTelemetry's semantic conventions for generative AI, v0.1.0."""

from collections.abc import Mapping
from typing import ClassVar

from kvrouter.telemetry.families import MetricSpec, MetricTable, counter, histogram, specs_of

GEN_AI_SWITCH = "OTEL_SEMCONV_STABILITY_OPT_IN"
GEN_AI_OPT_IN = "gen_ai_latest_experimental"


def wants_gen_ai(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's switch enables the names of its GenAI conventions."""
    return GEN_AI_OPT_IN in map(str.strip, environ.get(GEN_AI_SWITCH, "").split(","))


_TOKENS = tuple(float(4**power) for power in range(14))
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class GenAiMetrics(MetricTable):
    """A server's metrics under the names and bounds of OpenTelemetry's semantic conventions for generative
    AI, as Prometheus writes these names.
    """

    request_duration = histogram(
        "gen_ai_server_request_duration_seconds",
        "`gen_ai.server.request.duration`: from the head of a call to the end of its answer.",
        *_GEN_AI,
        "error_type",
        bounds=tuple(0.01 * 2**power for power in range(14)),
    )
    time_to_first_token = histogram(
        "gen_ai_server_time_to_first_token_seconds",
        "`gen_ai.server.time_to_first_token`: of requests whose first token came.",
        *_GEN_AI,
        bounds=(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    )
    time_per_output_token = histogram(
        "gen_ai_server_time_per_output_token_seconds",
        "`gen_ai.server.time_per_output_token`: the mean of an answer, from its first token on.",
        *_GEN_AI,
        bounds=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    )
    operation_input_tokens = histogram(
        "gen_ai_client_inference_operation_input_tokens",
        "`gen_ai.client.inference.operation.input_tokens`: tokens of a prompt.",
        *_GEN_AI,
        bounds=_TOKENS,
    )
    operation_output_tokens = histogram(
        "gen_ai_client_inference_operation_output_tokens",
        "`gen_ai.client.inference.operation.output_tokens`: tokens of an answer.",
        *_GEN_AI,
        bounds=_TOKENS,
    )
    input_tokens = counter(
        "gen_ai_client_inference_usage_input_tokens",
        "`gen_ai.client.inference.usage.input_tokens`: tokens of prompts, cached ones too.",
        *_GEN_AI,
        "gen_ai_token_modality",
    )
    output_tokens = counter(
        "gen_ai_client_inference_usage_output_tokens",
        "`gen_ai.client.inference.usage.output_tokens`: tokens of answers.",
        *_GEN_AI,
        "gen_ai_token_modality",
    )
    cache_read_tokens = counter(
        "gen_ai_client_inference_usage_cache_read_input_tokens",
        "`gen_ai.client.inference.usage.cache_read.input_tokens`: of the prompts' tokens those that an "
        "engine had cached.",
        *_GEN_AI,
        "gen_ai_token_modality",
    )

    SPECS: ClassVar[tuple[MetricSpec, ...]]


GenAiMetrics.SPECS = specs_of(GenAiMetrics)
