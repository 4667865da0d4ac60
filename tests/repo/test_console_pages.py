"""What a page shows is compared with what was written: times, ids and counts may differ, and nothing else."""

from pathlib import Path

import pytest

from tests.testing.console_examples import absent, steps_of

PAGE = """
## One
```console
$ kubectl get dgd \\
    -o wide
NAME   READY
llm    True
$ kind create --config - <<'EOF'
a: b
EOF
$ true
```
```python
print(1)
```
## Two
```text
$ not a command
```
"""


def test_commands_are_read_with_here_documents_and_shown_output(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    found = [(step.section, step.command, step.shown, step.is_python) for step in steps_of(path)]
    assert found == [
        ("One", "kubectl get dgd \\\n    -o wide", ("NAME   READY", "llm    True"), False),
        ("One", "kind create --config - <<'EOF'\na: b\nEOF", (), False),
        ("One", "true", (), False),
        ("One", "print(1)", (), True),
    ]


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        ("llm-decode-688bdbb588-7g6c4   1/1   Running   19s", "llm-decode-5f7b9-xxgnf 1/1  Running 2m3s"),
        ("llm True zone-a 1/2, zone-b 1/2 19s", "llm  True   zone-a 1/2, zone-b 1/2   5m"),
        ("default.llm-4862337265594688 tcp://…  2s", "default.llm-17 tcp://127.0.0.1:5/17/3   7s"),
        ('n{zone="zone-a"} 14.0', 'n{zone="zone-a"} 8.0'),
        ("… is there after 0.0 s: zone=zone-…", "/etc/x is there after 1.3 s: zone=zone-b"),
        ("…", ""),
    ],
)
def test_varying_times_ids_and_counts_match(shown: str, written: str) -> None:
    assert absent([shown], f"before\n{written}\nafter") == []


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        ("llm True zone-a 1/2", "llm True zone-a 1/0"),
        ("llm True zone-a 1/2", "llm False zone-a 1/2"),
        ("HTTP/1.1 503 Service Unavailable", "HTTP/1.1 200 OK"),
        ("200", "503"),
        ("NAME READY", "NAME READY AGE"),
        ("DomainWithoutDecode …", "DomainsBalanced and more"),
    ],
)
def test_differing_output_is_reported_as_absent(shown: str, written: str) -> None:
    assert absent([shown], written) == [shown]
