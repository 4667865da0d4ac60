"""``kvrouter up --engine KIND --url URL``: the fleet that its flags make, and what they refuse."""

import pytest

from kvrouter.cli import main
from kvrouter.cli.fleet.template import url_document
from kvrouter.core.workers import Role
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec
from kvrouter.fleetfile.worker_options import EngineUrls
from kvrouter.settings.sources import load_settings
from kvrouter.settings.tree import TokenizeFallback

VLLM = ("--engine", "vllm")


def test_urls_make_a_fleet_whose_engines_are_asked_for_all_else() -> None:
    urls = ("prefill@a=http://h:1", "decode@a=http://h:2", "decode@a=http://h:3/")
    document = url_document(EngineUrls(engine="sglang", urls=urls))
    fleet = load_fleet(document).fleet
    assert [(each.role, dict(each.domains)) for each in fleet.workers] == [
        (Role.PREFILL, {"zone": "a"}),
        (Role.DECODE, {"zone": "a"}),
    ]
    engines = [each.engine for each in fleet.workers]
    urls_of = [each.all_urls for each in engines if isinstance(each, AttachedEngineSpec)]
    assert urls_of == [("http://h:1",), ("http://h:2", "http://h:3")]
    (model,) = fleet.models
    assert (model.name, model.tokenizer, model.block_size, model.context_length) == (None,) * 4
    settings = load_settings(flags={}, environ={}, document=document).settings
    assert settings.frontend.tokenize_fallback is TokenizeFallback.ENGINE


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--url", "http://h:1"), "--url: mock engines have none: name the kind with --engine"),
        (VLLM, "--url: is required, once for each vllm server"),
        ((*VLLM, "--url", "h:1"), "--url: must be http://HOST:PORT, or https, not 'h:1'"),
        ((*VLLM, "--url", "http://h:1/v1"), "--url: must be the server's own URL, without /v1"),
        ((*VLLM, "--url", "prefil=http://h:1"), "--url: the role must be one of prefill, decode, both"),
        ((*VLLM, "--url", "http://h:1", "--url", "http://h:1/"), "--url: http://h:1 is given twice"),
        ((*VLLM, "--url", "prefill@a=http://h:1"), "--url: no worker decodes"),
        ((*VLLM, "--url", "http://h:1", "--fleet", "f.yaml"), "--url: not with --fleet"),
        ((*VLLM, "--fleet", "f.yaml"), "--engine: not with --fleet"),
        ((*VLLM, "--url", "http://h:1", "--engine-pods"), "--url: not with --engine-pods"),
        ((*VLLM, "--url", "http://h:1", "--replicas", "2"), "by kvrouter fleet init with the same --engine"),
        ((*VLLM, "--url", "http://h:1", "--nats"), "--url: not with --replicas or --nats"),
        (("--model-path", "m=/m"), "--model-path: only with --url or --engine-pods"),
    ],
)
def test_contradicting_flags_are_refused_by_name(
    flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *flags]) == 2
    assert line in capsys.readouterr().err
