"""Ten replays come to what they came to before: a change of structure changes no choice and no figure."""

import pytest

from tests.testing.golden_replays import FOLDER, REPLAYS, ROOT, figures_of


@pytest.mark.parametrize("name", REPLAYS)
def test_a_replay_reproduces_its_recorded_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert figures_of(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_each_file_of_figures_belongs_to_a_replay() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(REPLAYS)
