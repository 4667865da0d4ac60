"""``python -m kvrouter.cli``."""

import sys

from kvrouter.cli import main

sys.exit(main())
