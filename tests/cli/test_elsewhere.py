"""Other people's machines: odd paths, another locale, no home, a proxy in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.test_dev import APP, PATIENCE_S, ROOT, dev

#: The locale of a container that has none, and a home that cannot be written, not even by root.
ODD = {
    "LC_ALL": "C",
    "LANG": "tr_TR.UTF-8",
    "HOME": "/proc/nowhere",
    "XDG_CONFIG_HOME": "/proc/nowhere/config",
    "HTTP_PROXY": "http://127.0.0.1:1",
    "http_proxy": "http://127.0.0.1:1",
    "ALL_PROXY": "socks5://127.0.0.1:1",
}


def test_a_node_and_its_handlers_run_with_an_odd_path_and_environment(tmp_path: Path) -> None:
    folder = tmp_path / "Ada's Ünterlagen (copy) 100%"
    folder.mkdir()
    (folder / "things.py").write_text(APP, encoding="utf-8")

    with dev(folder, environment=ODD) as it:
        it.handlers_pid()
        assert it.call("work/go", "Żółw") == "VERSION Żółw"

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "holdfast", *arguments],
                cwd=folder, capture_output=True, timeout=PATIENCE_S,
                env={**os.environ, **ODD, "PYTHONPATH": str(ROOT), "HOLDFAST_PROFILES": "",
                     "HOLDFAST_ADMIN_URL": f"http://127.0.0.1:{it.admin_port}",
                     "HOLDFAST_INGRESS_URL": f"http://127.0.0.1:{it.port}"},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return done.stdout.decode(errors="replace")

        assert "work" in run("services", "list")
        assert "VERSION" in run("call", "work/go", '"Żółw"')
        assert "succeeded" in run("invocations", "list")
        assert "dev" in run("cluster", "status")

    assert (folder / ".holdfast").is_dir()
