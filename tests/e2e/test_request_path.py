"""A prompt's way from HTTP's first byte to its sent leg stays short enough to be read in an hour."""

import subprocess
import sys

FILES_MAX = 35


def test_a_prompts_way_runs_through_few_files() -> None:
    command = [sys.executable, "-m", "scripts.request_path"]
    *files, total = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert total.startswith(f"{len(files)} files")
    assert files[0].startswith("frontend/http/")
    assert files[-1].startswith("transports/requests/"), "it ends with the leg that is sent"
    assert len(files) <= FILES_MAX
