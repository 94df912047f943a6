"""`make sim-cluster SEEDS=n START=s`"""

from __future__ import annotations

import sys

from tests.sim.cluster.batch import BATCH

if __name__ == "__main__":
    sys.exit(BATCH.main())
