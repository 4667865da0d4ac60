"""The flags of workers next to engines that run already, that contradict each other, or say nothing."""

from pathlib import Path

import pytest

from kvrouter.cli import main

URL = ("--url", "http://127.0.0.1:1")


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "--url"),
        (("--url", "127.0.0.1:8000"), "--url: must be http://HOST:PORT, or https, not '127.0.0.1:8000'"),
        (("--url", "http://a:x"), "--url: must be http://HOST:PORT, or https, not 'http://a:x'"),
        (("--url", "http://me:secret@a"), "KVROUTER_ENGINE_API_KEY, not 'http://…@a'"),
        (("--url", "http://a:8000/v1"), "--url: must be the server's own URL, without /v1"),
        ((*URL, "--no-kv-events", "--kv-events", "tcp://h:1"), "--no-kv-events and --kv-events contradict"),
        ((*URL, "--kv-events-replay", "tcp://h:1"), "--kv-events-replay: only together with --kv-events"),
        ((*URL, "--worker-id", "-1"), "--worker-id: must be in 0..2**63-1, not -1"),
        ((*URL, "--role", "both?"), "role"),
        ((*URL, "--context-length", "0"), "--context-length"),
        ((*URL, "--tokenizer", "/nowhere/at/all"), "--tokenizer"),
        ((*URL, "--engine-wait-s", "0"), "--url: no engine answered: http"),
    ],
)
def test_worker_flag_mistake_is_reported_in_one_line(
    kind: str,
    flags: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("KVROUTER_DISCOVERY_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_EVENT_PLANE", "zmq")
    assert main(["worker", kind, *flags]) == 2
    reported = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvrouter: ")]
    assert len(reported) == 1
    assert says in reported[0]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
def test_worker_help_names_its_engine_flags(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", kind, "--help"]) == 0
    said = capsys.readouterr().out
    for flag in (
        "--url",
        "--kv-events",
        "--no-kv-events",
        "--role",
        "--domain",
        "--block-size",
        "--context-length",
    ):
        assert flag in said
    assert "KVROUTER_ENGINE_API_KEY" in said
