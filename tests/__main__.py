"""The whole suite, as `make test` runs it.

The simulators only compute: virtual time does not care how fast they are. The other tests mostly wait, for real clocks, disks
and processes. So the simulators run beside them, at the lowest priority, on the processor time that is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Final

SIMULATORS: Final = "tests/sim"
PYTEST: Final = (sys.executable, "-m", "pytest", "-q")


def main() -> int:
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(
            [*PYTEST, "-p", "no:cacheprovider", "--durations=10", SIMULATORS],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # So that its workers can be ended with it.
            preexec_fn=lambda: os.nice(19),
        )
        try:
            code = subprocess.call([*PYTEST, "--durations=30", f"--ignore={SIMULATORS}", *sys.argv[1:]])
            print("==> simulators, which ran beside the others", flush=True)
            code = beside.wait() or code
        finally:
            with suppress(ProcessLookupError):
                os.killpg(beside.pid, signal.SIGKILL)
        output.seek(0)
        print(output.read().decode(errors="replace"), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
