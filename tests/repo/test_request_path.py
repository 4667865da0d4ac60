"""A prompt's way from HTTP's first byte to the sent leg can be printed, file by file."""

import subprocess
import sys


def test_the_request_path_is_printed_from_http_to_the_sent_leg() -> None:
    command = [sys.executable, "-m", "scripts.request_path"]
    *files, total = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert total.startswith(f"{len(files)} files")
    assert files[0].startswith("frontend/http/")
    assert "kernel/routing/costs/time.py" in files
    assert files[-1].startswith("transports/requests/"), "it ends with the leg that is sent"
