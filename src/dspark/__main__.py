"""`python -m dspark`: the command line.
It must never do anything else."""

from __future__ import annotations

import sys

from dspark.cli import main

if __name__ == "__main__":
    sys.exit(main())
