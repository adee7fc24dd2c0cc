"""``python -m dovetail.cli``."""

import sys

from dovetail.cli.main import main

sys.exit(main())
