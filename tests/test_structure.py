"""The rules of the tree, as tests: who may import whom, what is pure, what is never evaluated.

Each rule is a function from one module's source to sentences about what breaks it. Every rule is shown
a bad source first, so a rule that sees nothing is found out, and then every file of the tree.
"""

import ast
import gc
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast import __version__
from tests import modules_page
from tests.__main__ import NOT_QUICK, QUICK

ROOT = Path(__file__).resolve().parent.parent
OF_EVERY_ROOM = ("holdfast.__version__", "holdfast.require_asserts", "holdfast.AssertsDisabled")

# What the state machine and the SDK have in common. Frames are not part of it: a second handler protocol has its own.
JOURNAL = ("holdfast.sdk.ids", "holdfast.sdk.journal")

# Room -> what of ours it may import besides itself. An entry covers everything below it.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "sdk": (),
    "log": ("holdfast.sdk.bounds",),
    "console": (),
    "statemachine": JOURNAL,
    "snapshots": ("holdfast.log", "holdfast.statemachine", *JOURNAL, "holdfast.sdk.bounds"),
    "cluster": (
        "holdfast.snapshots",
        "holdfast.log",
        "holdfast.statemachine",
        *JOURNAL,
        "holdfast.sdk.frames",
        "holdfast.sdk.bounds",
        "holdfast.console",  # Served by the admin API.
    ),
    "cli": (
        "holdfast.cluster",
        "holdfast.snapshots",
        "holdfast.log",
        "holdfast.statemachine",
        *JOURNAL,
        "holdfast.sdk.loop",  # The event loop that nodes and handlers run on.
    ),
    "chaos": ("holdfast",),
}
ROOMS = tuple(MAY_IMPORT)

# The import name itself, and what stands beside the rooms and is not imported by them.
MAY_IMPORT_BESIDE: dict[str, tuple[str, ...]] = {
    "holdfast": ("holdfast.cli",),
    "examples": ("holdfast.sdk",),
    "bench": ("holdfast",),
    "docs": ("holdfast",),
    "tests": ("holdfast",),
}

# Inside cluster/, a layer may import itself and those before it. Modules beside the packages are leaves, except those named.
LAYERS: tuple[str, ...] = (
    "peers", "partition", "snapshotting", "values", "registry", "routing", "handlers", "leading", "http", "ingress",
    "members", "backup", "admin", "observe", "node",
)  # fmt: skip

# The state machine may import these and nothing else: none of them has a clock, a random number or a door to the world.
PURE_IMPORTS = {
    "__future__", "abc", "base64", "binascii", "bisect", "collections", "copy", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "itertools", "json", "math", "msgpack", "operator", "re", "string", "struct", "types",
    "typing", "zlib",
}  # fmt: skip
PURE_PREFIXES = (
    "holdfast.require_asserts", "holdfast.statemachine", *JOURNAL, "holdfast.sdk.bounds", "holdfast.sdk.fields",
)  # fmt: skip
# `hash` and `id` differ between processes; the others touch the world.
IMPURE_BUILTINS = {"hash", "id", "input", "open", "print", "breakpoint"}

# Inside the log, only these touch disk, sockets, clocks or entropy. Whatever else is there, now or later, is handed
# the time and the messages and returns what should happen: so the simulator runs the real code.
LOG_OUTSIDE = {"store", "lmdb_file", "sockets", "handshake", "connection", "link", "writer", "node"}
LOG_FORBIDDEN = {
    "aiohttp", "asyncio", "boto3", "concurrent", "ctypes", "datetime", "fcntl", "http", "io", "lmdb", "mmap",
    "multiprocessing", "os", "queue", "random", "sched", "secrets", "select", "selectors", "shutil", "signal",
    "socket", "socketserver", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid", "uvloop",
    "_thread",
}  # fmt: skip
# All of them but the store, whose operations and interface the rest is written against.
LOG_DRIVERS = tuple(f"holdfast.log.{name}" for name in sorted(LOG_OUTSIDE - {"store"}))

UNSAFE_MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "joblib",
}  # fmt: skip
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
UNSAFE_YAML = {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"}


class Module(NamedTuple):
    name: str
    """The dotted import name; for files beside the rooms, their path with dots."""
    tree: ast.Module
    is_package: bool = False
    source: str = ""

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return parts[1] if parts[0] == "holdfast" and len(parts) > 1 and parts[1] in ROOMS else parts[0]


class Import(NamedTuple):
    line: int
    target: str
    """Full dotted name; `from a import b` is `a.b`, because b may be a module."""
    bound: str
    """The name it has in the module."""
    for_types_only: bool


def parse(source: str, name: str, *, is_package: bool = False) -> Module:
    return Module(name, ast.parse(source), is_package, source)


@cache
def imports(module: Module) -> tuple[Import, ...]:
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[Import]:
    # Imports are statements; only a call of import_module is an expression, and looking at all of those takes long.
    everything = [*(ast.walk if "import_module" in module.source else statements)(module.tree)]
    type_checking = {
        id(inner)
        for node in everything
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in everything:
        only_types = id(node) in type_checking
        match node:
            case ast.Import(names=names):
                for alias in names:
                    bound = alias.asname or alias.name.split(".")[0]
                    yield Import(node.lineno, alias.name, bound, only_types)
            case ast.ImportFrom(module=source, names=names, level=level):
                base = source or ""
                if level:
                    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
                    base = ".".join([*package[: len(package) - level + 1], *([source] if source else [])])
                for alias in names:
                    yield Import(node.lineno, f"{base}.{alias.name}", alias.asname or alias.name, only_types)
            case ast.Call(func=func, args=[ast.Constant(value=str(target)), *_]) if dotted(func).endswith(
                "import_module"
            ):
                yield Import(node.lineno, target, "", only_types)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for inner in getattr(node, block, ()):
            yield inner
            yield from statements(inner)


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of attributes on a name, else an empty string."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            prefix = dotted(value)
            return f"{prefix}.{attr}" if prefix else ""
        case _:
            return ""


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def wrong_directions(module: Module) -> list[str]:
    """Imports point one way: cli, cluster, snapshots, then log and statemachine, then sdk.{ids,journal}."""
    room = module.room
    allowed = (*MAY_IMPORT[room], f"holdfast.{room}") if room in MAY_IMPORT else MAY_IMPORT_BESIDE[room]
    return [
        f"{module.name}:{found.line} imports {found.target}: {room} may not"
        for found in imports(module)
        if covers("holdfast", found.target)
        and found.target not in OF_EVERY_ROOM
        and not any(covers(prefix, found.target) for prefix in allowed)
    ]


def layer_of(name: str) -> int:
    """The layer of a module of cluster/: 0 for leaves."""
    part = [*name.split("."), ""][2]
    return LAYERS.index(part) + 1 if part in LAYERS else 0


def wrong_layers(module: Module) -> list[str]:
    """Inside cluster/, imports point from later layers to earlier ones."""
    here = layer_of(module.name)
    return [
        f"{module.name}:{found.line} imports {found.target}, which is of a later layer"
        for found in imports(module)
        if covers("holdfast.cluster", found.target) and layer_of(found.target) > here
    ]


def cycles(checked: list[Module]) -> list[str]:
    """Modules that import each other, directly or through others, also for types only."""
    names = {module.name for module in checked}

    def known(target: str) -> str | None:
        return next((name for name in (target, target.rpartition(".")[0]) if name in names), None)

    graph = {
        module.name: {name for found in imports(module) if (name := known(found.target)) not in (None, module.name)}
        for module in checked
    }

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            fresh = {name for name in graph[pending.pop()] if name is not None} - seen
            seen |= fresh
            pending += fresh
        return seen

    reach = {name: reached(name) for name in graph}
    return [
        f"{name} and {other} import each other"
        for name, targets in sorted(graph.items())
        for other in sorted(target for target in targets if target is not None and name in reach[target])
    ]


def bare_rooms(module: Module) -> list[str]:
    """`import log` would make a second copy of every class of holdfast.log."""
    return [
        f"{module.name}:{found.line} imports {found.target}: say holdfast.{found.target.split('.')[0]}"
        for found in imports(module)
        if found.target.split(".")[0] in ROOMS
    ]


def impurities(module: Module) -> list[str]:
    """The state machine is a function of its arguments: no clock, randomness, I/O, await."""
    found = [
        f"{module.name}:{found.line} imports {found.target}, which is not among PURE_IMPORTS"
        for found in imports(module)
        if not found.for_types_only
        and found.target.split(".")[0] not in PURE_IMPORTS
        and not any(covers(prefix, found.target) for prefix in PURE_PREFIXES)
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            found.append(f"{module.name}:{node.lineno} is asynchronous")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in IMPURE_BUILTINS:
            found.append(f"{module.name}:{node.lineno} uses {node.id}")
    return found


def io_in_the_log(module: Module) -> list[str]:
    """The log's brain is handed time and messages; it never fetches them."""
    found = [
        f"{module.name}:{found.line} imports {found.target}: only {sorted(LOG_OUTSIDE)} may"
        for found in imports(module)
        if not found.for_types_only
        and (found.target.split(".")[0] in LOG_FORBIDDEN or any(covers(prefix, found.target) for prefix in LOG_DRIVERS))
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in ("open", "input"):
            found.append(f"{module.name}:{node.lineno} uses {node.id}")
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            found.append(f"{module.name}:{node.lineno} is asynchronous")
    return found


def unsafe(module: Module) -> list[str]:
    """Nothing is unpickled or evaluated.

    holdfast.log.audit may name `pysyncobj.pickle`, to put a refusal in its place; it may not call into it.
    """
    may_name = module.name == "holdfast.log.audit"
    bound_to_unsafe = set()
    found = []
    for item in imports(module):
        parts = item.target.split(".")
        if UNSAFE_MODULES.intersection(parts):
            bound_to_unsafe.add(item.bound)
            if not (may_name and parts[0] == "pysyncobj"):
                found.append(f"{module.name}:{item.line} imports {item.target}")
        if parts[0] == "yaml" and parts[-1] in UNSAFE_YAML:
            found.append(f"{module.name}:{item.line} imports {item.target}")
    for node in ast.walk(module.tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in UNSAFE_BUILTINS:
                found.append(f"{module.name}:{node.lineno} uses {name}")
            case ast.Attribute():
                parts = dotted(node).split(".")
                if parts[0] == "builtins" and parts[-1] in UNSAFE_BUILTINS:
                    found.append(f"{module.name}:{node.lineno} uses {'.'.join(parts)}")
                if parts[0] == "yaml" and parts[-1] in UNSAFE_YAML:
                    found.append(f"{module.name}:{node.lineno} uses {'.'.join(parts)}")
                if UNSAFE_MODULES.intersection(parts) and not may_name:
                    found.append(f"{module.name}:{node.lineno} uses {'.'.join(parts)}")
            case ast.Call(func=func) if may_name:
                parts = dotted(func).split(".")
                if UNSAFE_MODULES.intersection(parts) or (parts[0] != "pysyncobj" and parts[0] in bound_to_unsafe):
                    found.append(f"{module.name}:{node.lineno} calls {'.'.join(parts)}")
    return found


def unasserted_name(module: Module) -> list[str]:
    """A room that is imported by another name than its own refuses."""
    for node in module.tree.body:
        match node:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value=module.name)]
                )
            ):
                return []
    return [f"{module.name} does not assert that it is imported as {module.name}"]


@cache
def files_of(folder: str) -> tuple[Module, ...]:
    gc.disable()  # A tree of syntax is nothing but containers, and all of them stay: looking at them takes twice the time.
    try:
        return tuple(_files_of(folder))
    finally:
        gc.enable()


def _files_of(folder: str) -> Iterator[Module]:
    prefix = "holdfast." if folder in ROOMS else ""
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = prefix + ".".join(parts[:-1] if is_package else parts)
        yield parse(path.read_text(encoding="utf-8"), name, is_package=is_package)


def modules(*folders: str) -> list[Module]:
    """Every module of these folders. `rglob` does not follow the symlinks in holdfast/, so each file comes once."""
    return [module for folder in folders for module in files_of(folder)]


def broken(rule: Callable[[Module], list[str]], checked: list[Module]) -> list[str]:
    assert checked, "a rule that is shown no file proves nothing"
    return [sentence for module in checked for sentence in rule(module)]


EVERYTHING = (*ROOMS, *MAY_IMPORT_BESIDE)
SHIPPED = (*ROOMS, "holdfast", "bench", "examples")


def test_imports_between_rooms_point_one_way() -> None:
    assert broken(wrong_directions, modules(*EVERYTHING)) == []


def test_imports_inside_cluster_follow_its_layers() -> None:
    checked = modules("cluster")

    assert broken(wrong_layers, checked) == []
    packages = {module.name.split(".")[2] for module in checked if module.is_package and module.name.count(".") > 1}
    assert packages == {*LAYERS} - {"node"}


def test_an_import_of_a_later_layer_is_found() -> None:
    early = parse("from holdfast.cluster.admin.app import Admin", "holdfast.cluster.routing.router")
    leaf = parse("from holdfast.cluster.node import Node", "holdfast.cluster.clock")

    assert len(wrong_layers(early)) == len(wrong_layers(leaf)) == 1
    assert wrong_layers(parse("from holdfast.cluster.peers import rpc", "holdfast.cluster.node")) == []


def test_no_modules_import_each_other() -> None:
    assert cycles(modules(*ROOMS)) == []


def test_a_cycle_is_found_also_for_types_only() -> None:
    first = parse("if TYPE_CHECKING:\n    from holdfast.log.link import Link", "holdfast.log.node")
    second = parse("from holdfast.log import node", "holdfast.log.link")
    third = parse("from holdfast.log import link", "holdfast.log.host")

    assert len(cycles([first, second, third])) == 2
    assert cycles([second, third]) == []


#: Files over 600 lines and functions over 70, each with the reason why it stays so.
LARGE = {
    "cluster/node.py": "the wiring of a node; joining, addresses and removal are still in it, and have to move to members/",
    "cluster/handlers/invoker.py": "seven lines over",
    "chaos/cluster.py": "a cluster of processes, not shipped",
    "chaos/linearizable.py": "one algorithm, not shipped",
}
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70


def test_files_and_functions_can_be_read_at_one_sitting() -> None:
    too_long = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            functions = (
                node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            longest = max(((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions), default=0)
            if source.count("\n") > FILE_LINES_MAX or longest > FUNCTION_LINES_MAX:
                too_long.add(path.relative_to(ROOT).as_posix())

    assert too_long == LARGE.keys(), "split it, or say in LARGE why not; what became short leaves LARGE"


def test_the_page_of_modules_is_fresh() -> None:
    assert modules_page.PAGE.read_text(encoding="utf-8") == modules_page.page(), "run `make modules`"


def test_no_room_is_imported_by_its_bare_name() -> None:
    assert broken(bare_rooms, modules(*EVERYTHING)) == []


def test_the_state_machine_is_pure() -> None:
    assert broken(impurities, modules("statemachine")) == []


def test_the_protocol_that_the_state_machine_may_import_is_pure_too() -> None:
    shared = (*JOURNAL, "holdfast.sdk.frames", "holdfast.sdk.fields", "holdfast.sdk.bounds")
    protocol = [module for module in modules("sdk") if any(covers(name, module.name) for name in shared)]

    assert [sentence for module in protocol for sentence in impurities(module)] == []


def test_the_log_touches_the_world_only_in_its_named_modules() -> None:
    brain = [module for module in modules("log") if module.name.removeprefix("holdfast.log.") not in LOG_OUTSIDE]

    assert broken(io_in_the_log, brain) == []


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert broken(unsafe, modules(*SHIPPED)) == []


def test_every_room_asserts_its_import_name() -> None:
    doors = [module for module in modules(*ROOMS) if module.is_package and module.name.count(".") == 1]

    assert sorted(module.room for module in doors) == sorted(ROOMS)
    assert broken(unasserted_name, doors) == []


def test_every_room_is_reached_through_its_symlink() -> None:
    links = {path.name: path for path in (ROOT / "holdfast").iterdir() if path.is_symlink()}

    assert sorted(links) == sorted(ROOMS)
    assert {name: path.readlink().as_posix() for name, path in links.items()} == {room: f"../{room}" for room in ROOMS}


def test_no_folder_with_code_escapes_the_rules() -> None:
    with_code = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")}

    assert with_code - set(EVERYTHING) - {"build", "dist"} == set()


def test_every_room_is_banned_by_its_bare_name_in_the_linter_too() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    banned = settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]

    assert set(ROOMS) <= set(banned)


def test_the_quick_tests_leave_out_only_files_that_exist() -> None:
    parts = [name for part in QUICK for name in part]

    assert [name for name in (*parts, *NOT_QUICK) if not (ROOT / name).exists()] == []
    assert [name for name in NOT_QUICK if not name.startswith(tuple(f"{part}/" for part in parts))] == []


def test_the_import_name_runs_as_the_command() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "holdfast", "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert (answer.returncode, answer.stdout) == (0, f"holdfast {__version__}\n"), answer.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_importing_a_room_by_its_bare_name_fails(room: str) -> None:
    by_name, by_bare_name = (
        subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False)
        for name in (f"holdfast.{room}", room)
    )

    assert by_name.returncode == 0, by_name.stderr
    assert f"import holdfast.{room}, not {room}" in by_bare_name.stderr
    assert by_bare_name.returncode != 0


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("holdfast.log.journal", "from holdfast.sdk.journal import Step"),
        ("holdfast.statemachine.journal", "from holdfast.sdk.frames import Frame"),
        ("holdfast.log.journal", "from holdfast import cluster"),
        ("holdfast.log.journal", "import holdfast"),
        ("holdfast.log.journal", "from ..statemachine import apply"),
        ("holdfast.log.journal", "def f():\n    import holdfast.snapshots"),
        ("holdfast.log.journal", "if TYPE_CHECKING:\n    from holdfast.cluster.node import Node"),
        ("holdfast.log.journal", "import_module('holdfast.cluster')"),
        ("holdfast.sdk.client", "import holdfast.log.errors"),
        ("holdfast.statemachine.timers", "from holdfast.log import errors"),
        ("holdfast.statemachine.timers", "from holdfast.sdk import Context"),
        ("holdfast.snapshots.cut", "from holdfast.cluster import node"),
        ("holdfast.cluster.node", "from holdfast.cli import main"),
        ("holdfast.cluster.node", "from holdfast.sdk import client"),
        ("holdfast.console.pages", "from holdfast.cluster import admin"),
        ("holdfast.__main__", "from holdfast.cluster import node"),
        ("examples.trips", "from holdfast.cluster import node"),
    ],
)
def test_an_import_against_the_direction_is_seen(name: str, source: str) -> None:
    assert len(wrong_directions(parse(source, name))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("holdfast.log.journal", "from holdfast.log.errors import Corrupt"),
        ("holdfast.log.journal", "from . import errors"),
        ("holdfast.sdk.endpoint", "from holdfast import __version__"),
        ("holdfast.statemachine.timers", "from holdfast.sdk import journal"),
        ("holdfast.statemachine.timers", "from holdfast.sdk.journal import Step"),
        ("holdfast.cluster.admin", "from holdfast import console, log"),
        ("holdfast.cli.main", "import holdfast.cluster.node"),
        ("holdfast.chaos.log", "from holdfast.cluster import node"),
        ("tests.log.test_journal", "from holdfast.log import journal"),
    ],
)
def test_an_import_along_the_direction_is_allowed(name: str, source: str) -> None:
    assert wrong_directions(parse(source, name)) == []


def test_a_relative_import_in_a_package_starts_at_the_package() -> None:
    door = parse("from . import node\nfrom ..cluster import admin", "holdfast.log", is_package=True)

    assert [found.target for found in imports(door)] == ["holdfast.log.node", "holdfast.cluster.admin"]


@pytest.mark.parametrize("source", ["import log", "import log.journal", "from cluster import node", "import sdk as s"])
def test_a_bare_room_is_seen(source: str) -> None:
    assert len(bare_rooms(parse(source, "tests.log.test_journal"))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import datetime",
        "from random import Random",
        "import secrets",
        "import os.path",
        "import io",
        "import socket",
        "import asyncio",
        "import threading",
        "import uuid",
        "from pathlib import Path",
        "import ssl",
        "import select",
        "import subprocess",
        "import logging",
        "import lmdb",
        "from holdfast.log import errors",
        "def f():\n    import time",
        "async def f(): pass",
        "x = hash('a')",
        "key = map(hash, 'a')",
        "print(1)",
        "open('f')",
    ],
)
def test_an_impurity_is_seen(source: str) -> None:
    assert len(impurities(parse(source, "holdfast.statemachine.timers"))) == 1


def test_what_is_imported_for_types_only_is_not_an_impurity() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lmdb\nimport struct"

    assert impurities(parse(source, "holdfast.statemachine.timers")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import socket",
        "import asyncio.events",
        "from threading import Lock",
        "import os",
        "import ssl",
        "from random import randrange",
        "import lmdb",
        "from holdfast.log.node import Node",
        "from . import link",
        "if TYPE_CHECKING:\n    import struct\nelse:\n    import time",
        "def f():\n    return open('f')",
        "async def f(): pass",
    ],
)
def test_io_inside_the_brain_of_the_log_is_seen(source: str) -> None:
    assert len(io_in_the_log(parse(source, "holdfast.log.replica"))) == 1


def test_the_brain_of_the_log_may_name_the_type_of_what_it_is_handed() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from random import Random"

    assert io_in_the_log(parse(source, "holdfast.log.replica")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal",
        "import shelve",
        "import pysyncobj.pickle",
        "from pysyncobj import pickle as p",
        "import pysyncobj\npysyncobj.pickle",
        "eval('1')",
        "exec('1')",
        "f = eval",
        "import builtins\nbuiltins.exec",
        "__import__('pickle')",
        "import yaml\nyaml.load",
        "from yaml import unsafe_load",
        "import_module('pickle')",
    ],
)
def test_what_unpickles_or_evaluates_is_seen(source: str) -> None:
    assert len(unsafe(parse(source, "holdfast.cluster.admin"))) == 1


def test_a_compiled_pattern_and_safe_yaml_are_not_evaluation() -> None:
    source = "import re\nimport yaml\nre.compile('a')\nyaml.safe_load('a')"

    assert unsafe(parse(source, "holdfast.cluster.admin")) == []


def test_the_engine_may_disable_the_pickle_of_pysyncobj_but_not_call_it() -> None:
    disable = "import pysyncobj.pickle\nimport pysyncobj.pickle as engine_pickle\n"
    disable += "engine_pickle.loads = refuse\npysyncobj.pickle.dumps = refuse\npysyncobj.SyncObj()\n"

    assert unsafe(parse(disable, "holdfast.log.audit")) == []
    assert len(unsafe(parse(disable + "engine_pickle.loads(b'')", "holdfast.log.audit"))) == 1
    assert len(unsafe(parse(disable + "pysyncobj.pickle.loads(b'')", "holdfast.log.audit"))) == 1
    assert len(unsafe(parse("import pickle", "holdfast.log.audit"))) == 1
    assert len(unsafe(parse(disable, "holdfast.log.journal"))) > 0


@pytest.mark.parametrize(
    "source", ["", "assert __name__ == 'holdfast.log'", "assert __name__", "if __name__ == 'holdfast.cluster': pass"]
)
def test_a_room_that_does_not_assert_its_name_is_seen(source: str) -> None:
    assert len(unasserted_name(parse(source, "holdfast.cluster", is_package=True))) == 1
