"""``python -m lighttransfer.cli``."""

import sys

from . import main

sys.exit(main())
