"""Write the table of settings that the command line makes its flags from.

``python -m scripts.write_flags`` writes it; with ``--check`` it writes nothing and exits 1 when the file
is not what the settings tree says.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from kvrouter.settings.setting_spec import SETTINGS_FILE, settings_text
from kvrouter.settings.tree import SETTINGS
from scripts.generated_files import write_or_check

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str], path: Path = SETTINGS_FILE, root: Path = ROOT) -> int:
    """Write the table, or check it; return the exit code."""
    return write_or_check({path: lambda: settings_text(SETTINGS)}, arguments, script="write_flags", root=root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
