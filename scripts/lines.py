"""``make lines``: the lines of each room of ``src/kvrouter``, beside the lines that are planned for it.

The plan estimates what each room needs for what it does. A change that gives a room a new capability raises
the number of the room here.
"""

from collections import Counter
from pathlib import Path

PLANNED = {
    "core": 2420,
    "kernel": 10480,
    "api": 920,
    "text": 3890,
    "engines": 9760,
    "transports": 10690,
    "kube": 1570,
    "telemetry": 1890,
    "recording": 750,
    "settings": 2550,
    "fleetfile": 1870,
    "router": 5720,
    "frontend": 8730,
    "worker": 1600,
    "sim": 10510,
    "operator": 10920,
    "app": 4040,
    "cli": 11270,
    "library": 1240,
}
"""Lines of Python by room."""

TOLERANCE = 0.1
"""The share of its plan by which a room may differ, and is not marked."""


def lines_by_room(sources: Path) -> Counter[str]:
    """Return how many lines the Python files below each folder of ``sources`` have."""
    lines: Counter[str] = Counter()
    for path in sources.glob("*/**/*.py"):
        lines[path.relative_to(sources).parts[0]] += path.read_bytes().count(b"\n")
    return lines


def main() -> None:
    """Print a row for each room and one for all."""
    lines = lines_by_room(Path("src/kvrouter"))
    print(f"{'room':12} {'lines':>7} {'planned':>7}  ratio")
    for room in sorted(lines.keys() | PLANNED.keys()):
        planned = PLANNED.get(room)
        if planned is None:
            print(f"{room:12} {lines[room]:7,}       -      -  not planned")
            continue
        ratio = lines[room] / planned
        mark = "" if abs(ratio - 1) <= TOLERANCE else "  more than a tenth apart"
        print(f"{room:12} {lines[room]:7,} {planned:7,}  {ratio:5.2f}{mark}")
    total, planned_total = lines.total(), sum(PLANNED.values())
    print(f"{'all':12} {total:7,} {planned_total:7,}  {total / planned_total:5.2f}")


if __name__ == "__main__":
    main()
