"""`python -m parallelkit` is the `parallelkit` command."""

import sys

from parallelkit.cli.main import main

sys.exit(main())
