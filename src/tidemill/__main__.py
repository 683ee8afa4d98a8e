"""`python -m tidemill` is the command `tidemill`."""

import sys

from tidemill.cli.main import main

sys.exit(main())
