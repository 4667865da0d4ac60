"""``python -m kvrouter``."""

import sys

from kvrouter.cli import main

sys.exit(main())
