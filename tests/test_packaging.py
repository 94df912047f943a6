"""What is in the wheel, what it needs, and what it says when something is missing.

The environments are real: `venv` makes them, pip installs our wheel into them, and of the dependencies they get those that the
wheel's metadata asks for, as links to the installed ones. So nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from holdfast import __version__

ROOT = Path(__file__).resolve().parent.parent
ROOMS_SHIPPED = {"cli", "cluster", "console", "ext", "log", "sdk", "snapshots", "statemachine"}
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: *; *(?P<marker>[^\\]+?))? *\\?$")
LOCKS = {"requirements/dev.txt": None, "requirements/image.txt": {"server", "s3", "otel"}}


class Environment:
    """A virtual environment with the wheel, and what the wheel needs with these extras."""

    def __init__(self, path: Path, wheel: Path, extras: Iterable[str]) -> None:
        venv.create(path, with_pip=False, symlinks=True)
        self.bin = path / "bin"
        self.site = next((path / "lib").glob("python3.*")) / "site-packages"
        for name in needed([requirement(line) for line in wheel_metadata(wheel).get_all("Requires-Dist")], {*extras}):
            link_distribution(name, self.site)
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet", "--no-index"]
        subprocess.run([*pip, "--no-deps", "--no-warn-script-location", str(wheel)], check=True)

    def run(
        self, *command: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=cwd,
            env=bare_environment() | dict(environment or {}),
            capture_output=True,
            text=True,
            check=False,
        )


def bare_environment() -> dict[str, str]:
    """Without what makes the checkout importable."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOLDFAST"))}


def requirement(line: str) -> Requirement:
    return Requirement(line)


def needed(requirements: Iterable[Requirement], extras: set[str]) -> set[str]:
    """The names of all distributions that these need, and that those need, as far as they are installed."""
    found: set[str] = set()
    waiting = [(one, extras) for one in requirements]
    while waiting:
        one, of_extras = waiting.pop()
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in ("", *of_extras)):
            continue
        name = canonicalize_name(one.name)
        if name == "holdfast" or (name in found and not one.extras):
            continue
        found.add(name)
        waiting += [(Requirement(line), set(one.extras)) for line in metadata.requires(name) or ()]
    return found


def link_distribution(name: str, to: Path) -> None:
    distribution = metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        (to / top).symlink_to(Path(str(distribution.locate_file(top))))


def wheel_metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(to), "-t", "wheel"], cwd=ROOT, check=True)
    return next(to.glob("*.whl"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("base") / "venv", wheel, [])


@pytest.fixture(scope="module")
def server(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("server") / "venv", wheel, ["server"])


def test_the_wheel_has_every_room_but_chaos(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        parts = [name.split("/") for name in archive.namelist()]

    assert {part[0] for part in parts} == {"holdfast", f"holdfast-{__version__}.dist-info"}
    assert {part[1] for part in parts if len(part) > 2 and part[0] == "holdfast"} == ROOMS_SHIPPED


def test_the_wheel_has_every_file_of_the_console(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("holdfast/console/")}

    files = {f"holdfast/{path.relative_to(ROOT)}" for path in (ROOT / "console").rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} == shipped


def test_the_wheel_and_the_code_have_one_version(wheel: Path) -> None:
    assert wheel_metadata(wheel)["Version"] == __version__


def test_without_extras_the_wheel_needs_aiohttp_and_msgpack_alone(wheel: Path) -> None:
    always = [line for line in wheel_metadata(wheel).get_all("Requires-Dist") if "extra ==" not in line]

    assert {requirement(line).name for line in always} == {"aiohttp", "msgpack"}


def test_without_the_identity_extra_an_endpoint_with_keys_says_what_to_install(
    base: Environment, tmp_path: Path
) -> None:
    code = (
        f"from holdfast.sdk import Service, endpoint; endpoint([Service('shop')], identity_keys=['ed25519:{'A' * 43}'])"
    )

    answer = base.run("python", "-c", code, cwd=tmp_path)

    assert answer.returncode == 1
    assert answer.stderr.endswith("identity keys need the package cryptography: pip install 'holdfast[identity]'\n")


@pytest.mark.parametrize("command", ["dev", "serve", "version"])
def test_without_the_server_extra_the_command_names_what_to_install(
    base: Environment, tmp_path: Path, command: str
) -> None:
    answer = base.run("holdfast", command, cwd=tmp_path)

    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and "pip install 'holdfast[server]'" in answer.stderr


APP = """
import asyncio, sys
from holdfast.sdk import Context, Service

hello = Service("hello")

@hello.handler
async def greet(ctx: Context, name: str) -> str:
    return f"Hello, {name}"

async def main():
    import aiohttp
    from holdfast.sdk import Server
    server = Server([hello])
    await server.start(host="127.0.0.1", port=0)
    async with aiohttp.ClientSession() as session, session.get(f"{server.uri}/discover") as answer:
        print((await answer.json())["sdk"])
    await server.stop()

asyncio.run(main())
"""


def test_handlers_are_served_without_extras(base: Environment, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)

    answer = base.run("python", "app.py", cwd=tmp_path)

    assert answer.stdout == f"holdfast-python/{__version__}\n", answer.stderr


IMPORT_ALL = """
import importlib, pkgutil, holdfast
names = [found.name for found in pkgutil.walk_packages(holdfast.__path__, "holdfast.")]
for name in names:
    if name.startswith(tuple(%r)) and not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


def test_the_sdk_imports_nothing_of_an_extra(base: Environment, tmp_path: Path) -> None:
    answer = base.run("python", "-c", IMPORT_ALL % (["holdfast.sdk"],), cwd=tmp_path)

    assert answer.returncode == 0, answer.stderr


def test_every_module_of_the_wheel_can_be_imported_with_its_extras_and_without_chaos(
    wheel: Path, tmp_path: Path
) -> None:
    everything = Environment(tmp_path / "venv", wheel, ["server", "s3", "pydantic-ai"])

    answer = everything.run("python", "-c", IMPORT_ALL % (["holdfast."],), cwd=tmp_path)

    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) > 100


def test_without_the_s3_extra_a_bucket_is_refused_with_a_hint(server: Environment, tmp_path: Path) -> None:
    answer = server.run(
        "holdfast",
        "serve",
        cwd=tmp_path,
        environment={"HOLDFAST_NODE": "n1", "HOLDFAST_SNAPSHOTS": "s3://bucket/prefix"},
    )

    assert answer.returncode == 1 and "Traceback" not in answer.stderr
    assert "pip install 'holdfast[s3]'" in answer.stderr


def test_without_the_s3_extra_a_node_works_with_a_directory_of_snapshots(server: Environment, tmp_path: Path) -> None:
    settings = {
        "HOLDFAST_NODE": "n1",
        "HOLDFAST_DATA": str(tmp_path / "data"),
        "HOLDFAST_SNAPSHOTS": str(tmp_path / "snapshots"),
        **{f"HOLDFAST_{door}": "127.0.0.1:0" for door in ("INGRESS", "ADMIN", "PEER")},
    }
    node = subprocess.Popen(
        [str(server.bin / "holdfast"), "serve"],
        cwd=tmp_path,
        env=bare_environment() | settings,
        stdout=subprocess.PIPE,
        text=True,
    )

    with node:
        assert node.stdout is not None
        first = node.stdout.readline()
        node.send_signal(signal.SIGTERM)

    assert first.startswith(f"Holdfast {__version__}: node n1")
    assert node.returncode == 0


def optimized(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-O", *arguments]
    return subprocess.run(command, cwd=ROOT, env=bare_environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("room", ["statemachine", "log", "snapshots", "cluster"])
def test_a_room_of_the_node_is_not_imported_without_asserts(room: str) -> None:
    answer = optimized("-c", f"import holdfast.{room}")

    assert answer.returncode == 1 and "AssertsDisabled: A Holdfast node does not run under python -O" in answer.stderr


def test_the_command_refuses_to_run_without_asserts() -> None:
    answer = optimized("-m", "holdfast", "serve")

    assert answer.returncode == 2 and answer.stderr.count("\n") == 1 and "python -O" in answer.stderr


def test_handlers_are_not_served_without_asserts() -> None:
    answer = optimized("-m", "holdfast.sdk", "examples.hello:app")

    assert answer.returncode != 0 and "A Holdfast endpoint does not run under python -O" in answer.stderr


def test_a_client_works_without_asserts() -> None:
    code = "from holdfast.sdk import SyncClient\nwith SyncClient('http://127.0.0.1:1') as client: print(__debug__)"

    assert optimized("-c", code).stdout == "False\n"


def declared() -> Mapping[str, list[Requirement]]:
    """By extra; the empty one is what every installation needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        extra: [requirement(line) for line in lines if requirement(line).name != "holdfast"]
        for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items()
    }


def pins(lock: str) -> Iterator[tuple[str, Version, str]]:
    """Name, version and the text with the hashes, of each pinned distribution."""
    for block in re.split(r"\n(?=\S)", (ROOT / lock).read_text(encoding="utf-8")):
        head = block.splitlines()[0]
        if not head.startswith("#"):
            found = PIN.match(head)
            assert found is not None, f"{lock}: {head!r} is not name==version"
            yield canonicalize_name(found["name"]), Version(found["version"]), block


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_file_has_a_version_and_a_hash_of_all_that_is_declared(lock: str) -> None:
    extras = LOCKS[lock]
    wanted = [
        one for extra, ones in declared().items() if not extra or extras is None or extra in extras for one in ones
    ]
    locked: dict[str, list[Version]] = {}
    for name, version, block in pins(lock):
        locked.setdefault(name, []).append(version)
        assert "--hash=sha256:" in block, f"{name} has no hash"

    stale = [
        str(one)
        for one in wanted
        if not all(
            one.specifier.contains(version) for version in locked.get(canonicalize_name(one.name), [Version("0")])
        )
    ]

    assert stale == [], f"{lock} is older than pyproject.toml: run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_file_names_no_registry(lock: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8")

    assert not re.search(r"index-url|find-links|https?:|file:", text)


def test_every_dependency_has_an_upper_bound() -> None:
    unbounded = [
        str(one)
        for ones in declared().values()
        for one in ones
        if not any(part.operator in ("<", "==") for part in one.specifier)
    ]

    assert unbounded == []
