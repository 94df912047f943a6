"""The rules of the tree (`structure.py`) see what breaks them, and nothing in the tree does."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

from holdfast import __version__
from holdfast.cluster.admin.routes import ROUTES as ADMIN_ROUTES
from holdfast.cluster.http.routes import Route
from holdfast.cluster.http.shapes import Health
from holdfast.cluster.ingress.routes import ROUTES as INGRESS_ROUTES
from tests import modules_page
from tests.__main__ import BESIDE, NOT_QUICK, QUICK, SIMULATORS
from tests.structure import (
    JOURNAL,
    LAYERS,
    LOG_OUTSIDE,
    MAY_IMPORT_BESIDE,
    POLICIES,
    ROOMS,
    ROOT,
    Module,
    bare_rooms,
    broken,
    covers,
    cycles,
    forget_files,
    ids_of_bytes,
    imports,
    impure_policies,
    impurities,
    io_in_the_log,
    lists_of_operations,
    machine_asked,
    modules,
    outcomes_opened,
    parse,
    statements,
    unasserted_name,
    unnamed_arguments,
    unsafe,
    wrong_directions,
    wrong_layers,
)

EVERYTHING = (*ROOMS, *MAY_IMPORT_BESIDE)
SHIPPED = (*ROOMS, "holdfast", "bench", "examples")


@pytest.fixture(scope="module", autouse=True)
def let_go_of_the_tree() -> Iterator[None]:
    """Millions of objects, which every later run of the garbage collector would look at."""
    yield
    forget_files()


def test_imports_between_rooms_point_one_way() -> None:
    assert broken(wrong_directions, modules(*EVERYTHING)) == []


def test_imports_inside_cluster_follow_its_layers() -> None:
    checked = modules("cluster")

    assert broken(wrong_layers, checked) == []
    packages = {module.name.split(".")[2] for module in checked if module.is_package and module.name.count(".") > 1}
    assert packages == {*LAYERS} - {"environment", "ground", "serving", "doors", "node"}


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


#: Files over 600 lines, and files of rooms with functions over 70, each with the reason why it stays so.
LARGE = {
    "chaos/linearizable.py": "one search, with its state in local names, where it is fast; not shipped",
    "bench/e2e.py": "one benchmark, run as a script",
}
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70


def is_large(module: Module) -> bool:
    if module.source.count("\n") > FILE_LINES_MAX:
        return True
    if module.room not in ROOMS:
        return False  # A test may tell a long story.
    functions = (node for node in statements(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return any((node.end_lineno or node.lineno) - node.lineno >= FUNCTION_LINES_MAX for node in functions)


def test_files_and_functions_can_be_read_at_one_sitting() -> None:
    large = {module.path for module in modules(*EVERYTHING) if is_large(module)}

    assert large == LARGE.keys(), "split it, or say in LARGE why not; what became short leaves LARGE"


@pytest.mark.parametrize(
    ("name", "source", "large"),
    [
        ("tests.log.test_journal", "\n" * 600, False),
        ("tests.log.test_journal", "\n" * 601, True),
        ("holdfast.log.journal", "\n" * 601, True),
        ("holdfast.log.journal", "def f():\n" + "    pass\n" * 69, False),
        ("holdfast.log.journal", "def f():\n" + "    pass\n" * 70, True),
        ("tests.log.test_journal", "def f():\n" + "    pass\n" * 70, False),
    ],
    ids=["tests", "long tests", "long file", "function", "long function", "long function of tests"],
)
def test_overlong_files_and_functions_are_found(name: str, source: str, large: bool) -> None:
    assert is_large(parse(source, name)) is large


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


def test_policies_of_a_node_are_pure() -> None:
    checked = modules("cluster")

    assert broken(impure_policies, checked) == []
    assert {*POLICIES} <= {module.name for module in checked}


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "import aiohttp",
        "import time",
        "from random import Random",
        "from holdfast.cluster.partition.door import Partition",
        "from holdfast.cluster.handlers.attempts import Ticket",
        "async def f(): pass",
    ],
)
def test_a_policy_that_touches_the_node_is_found(source: str) -> None:
    assert len(impure_policies(parse(source, "holdfast.cluster.handlers.queue"))) == 1
    assert impure_policies(parse(source, "holdfast.cluster.handlers.endpoint")) == []


def test_the_log_touches_the_world_only_in_its_named_modules() -> None:
    brain = [module for module in modules("log") if module.name.removeprefix("holdfast.log.") not in LOG_OUTSIDE]

    assert broken(io_in_the_log, brain) == []


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert broken(unsafe, modules(*SHIPPED)) == []


def test_only_their_rows_list_operations_of_the_journal() -> None:
    assert broken(lists_of_operations, modules(*ROOMS)) == []


@pytest.mark.parametrize(
    "source",
    [
        "KEYED = frozenset({Op.GET, Op.SET})",
        "NAMES = {Op.GET: 'get', Op.SET: 'set'}",
        "def f(op):\n    return op in (Op.GET, Op.SET)",
        "match op:\n    case Op.GET | Op.SET:\n        pass",
    ],
)
def test_a_list_of_operations_is_seen(source: str) -> None:
    assert len(lists_of_operations(parse(source, "holdfast.cluster.admin.views"))) == 1
    assert lists_of_operations(parse(source, "holdfast.statemachine.ops")) == []


def test_a_single_operation_is_no_list() -> None:
    source = "_GET: Final = Op.GET\ndef f(op):\n    return op == Op.SET or (op, Op.GET)"

    assert lists_of_operations(parse(source, "holdfast.cluster.admin.views")) == []


def test_ids_have_types_of_their_own() -> None:
    assert broken(ids_of_bytes, modules("statemachine", "cluster", "sdk")) == []


@pytest.mark.parametrize(
    "source",
    [
        "class Kill(NamedTuple):\n    id: bytes",
        "def load(state: State, ident: bytes) -> None: ...",
        "def paused(ids: list[bytes] | None) -> None: ...",
        "self.holder: bytes = b''",
    ],
)
def test_an_id_of_bytes_is_found(source: str) -> None:
    assert len(ids_of_bytes(parse(source, "holdfast.statemachine.queries"))) == 1
    assert ids_of_bytes(parse(source.replace("bytes", "InvocationId"), "holdfast.statemachine.queries")) == []


#: Where calls with many arguments name them.
NAMING = ("sdk", "log", "statemachine", "snapshots", "cluster", "cli", "console")

#: What is called with more than four positional arguments, each with the reason why it stays so.
UNNAMED = {
    ("statemachine/invocation.py", "Invocation"): "names would cost every invocation a microsecond on every replica",
    ("statemachine/invocation.py", "First"): "made with the record: see there",
    ("statemachine/journal.py", "SendCompletion"): "names would double its price, for every step that waits",
    ("statemachine/steps.py", "SendCompletion"): "the same effect",
    ("cluster/admin/routes_of_approvals.py", "Route"): "a table: every row has the same columns",
    ("cluster/routing/approvals.py", "self._reader.ask"): "takes the arguments of any question",
    ("sdk/attempt/claims.py", "StepFrame"): "names would double its price, for every step",
    ("sdk/replay.py", "Recorded"): "the same, for every step of a replay",
    ("sdk/run.py", "CurrentStep"): "the same, for every run",
    ("sdk/run.py", "RunDone"): "the same, for every run",
    ("log/following.py", "self.follow"): "a microsecond here is one per entry on every follower",
    ("log/host.py", "engine.follow"): "the same, for the entries of many groups in one message",
    ("log/host.py", "Append"): "the same entries, on their way to the engine",
    ("log/messages.py", "Append"): "decodes each of them",
    ("cluster/admin/routes_of_cluster.py", "Route"): "the same",
    ("cluster/admin/routes.py", "Route"): "a table: every row has the same columns",
    ("cluster/ingress/routes.py", "Route"): "the same",
    ("cluster/doors.py", "Metrics"): "takes any number of rooms",
    ("cluster/peers/rpc.py", "self._rpc._answer"): "takes the parts of a message, whatever they are",
    ("cluster/peers/rpc.py", "self._say"): "takes the parts of a message, whatever they are",
    ("cluster/routing/reader.py", "self._ask"): "takes the arguments of any question",
    ("cluster/routing/reader.py", "self._slice_of"): "takes the arguments of any question",
    ("cluster/routing/surveys.py", "self._reader.ask"): "takes the arguments of any question",
    ("cluster/routing/trees.py", "self._reader.ask"): "takes the arguments of any question",
}


def test_calls_with_many_arguments_name_them() -> None:
    unnamed = {(module.path, called) for module in modules(*NAMING) for called in unnamed_arguments(module)}

    assert unnamed == UNNAMED.keys(), "name the arguments, or say in UNNAMED why not; what got names leaves UNNAMED"


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("Retry(1, 2, 3, 4, 5)", {"Retry"}),
        ("steps.finish(state, record, index, step, size, outcome)", {"steps.finish"}),
        ("steps.finish(state, record, index, step, size=size, outcome=outcome)", set()),
        ("Health(a, b, c, d, *rest)", set()),
        ("logger.info('%s %s %s %s', a, b, c, d)", set()),
        ("self.loop.call_later(1, f, a, b, c)", set()),
        ("derive(12, a, b, c, d)", set()),
        ("client.path(a, b, c, d, e)", set()),
        ("requests.path(a, b, c, d, e)", {"requests.path"}),
    ],
)
def test_arguments_without_names_are_found(call: str, found: set[str]) -> None:
    assert unnamed_arguments(parse(call, "holdfast.cluster.node")) == found


def test_outcomes_are_read_by_their_face() -> None:
    assert broken(outcomes_opened, modules("cluster", "statemachine", "cli")) == []


@pytest.mark.parametrize("source", ["outcome[0]", "step.outcome[1:]", "f(found.failure[2])"])
def test_an_outcome_that_is_read_by_number_is_found(source: str) -> None:
    assert len(outcomes_opened(parse(source, "holdfast.cluster.node"))) == 1
    assert outcomes_opened(parse(source, "holdfast.statemachine.outcomes")) == []


def test_a_node_asks_its_environment_for_time_and_random_bytes() -> None:
    assert broken(machine_asked, modules("cluster")) == []


@pytest.mark.parametrize(
    "source",
    ["now = time.time()", "def f():\n    return os.urandom(8)", "name = secrets.token_hex(4)", "rng = random.Random()"],
)
def test_a_question_to_the_machine_is_found(source: str) -> None:
    assert len(machine_asked(parse(source, "holdfast.cluster.routing.router"))) == 1
    assert machine_asked(parse(source, "holdfast.cluster.entropy")) == []


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


def test_the_tests_that_run_in_parallel_exist() -> None:
    assert [name for name in (*BESIDE, SIMULATORS) if not (ROOT / name).is_dir()] == []


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
        ("holdfast.ext.langgraph", "from holdfast.cluster.node import Node"),
        ("holdfast.ext.langgraph", "from holdfast.statemachine import machine"),
        ("holdfast.sdk.context", "from holdfast.ext import langgraph"),
        ("holdfast.testing.plugin", "from holdfast.chaos import cluster"),
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


def test_type_only_imports_are_not_an_impurity() -> None:
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
def test_unpickling_and_evaluating_code_is_found(source: str) -> None:
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


WHAT_TO_DO = (
    "give each status below 400 in `answers` of the Route the shape of its body, as in (200, 'the token', Token), and the "
    "Route the shape of the request's `body` if it reads one: a TypedDict of cluster/admin/shapes, or Raw or EventStream of "
    "cluster/http/routes.py (CONTRIBUTING.md, An endpoint of the admin API)"
)


def undescribed(route: Route) -> list[str]:
    """What OpenAPI could not say about a route."""
    what = f"{route.method} {route.path}"
    success = [reply for reply in route.answers if reply[0] < 400]
    found = [] if success else [f"{what}: `answers` names no status for a success"]
    for reply in success:
        if reply[0] not in (204, 304) and len(reply) == 2:
            found.append(f"{what}: the answer {reply[0]} has no shape")
    if route.method == "PUT" and route.body is None:
        found.append(f"{what}: there is no `body`")
    return found


def test_every_route_says_what_its_bodies_are() -> None:
    assert [each for route in (*ADMIN_ROUTES, *INGRESS_ROUTES) for each in undescribed(route)] == [], WHAT_TO_DO


def test_a_route_without_shapes_is_found() -> None:
    assert undescribed(Route("GET", "/a", "a", "A", "read")) == ["GET /a: `answers` names no status for a success"]
    assert undescribed(Route("GET", "/a", "a", "A", "read", answers=((200, "it"),))) == [
        "GET /a: the answer 200 has no shape"
    ]
    assert len(undescribed(Route("PUT", "/a", "a", "A", "read", answers=((200, "it", Health),)))) == 1
    assert undescribed(Route("HEAD", "/a", "a", "A", "read", answers=((200, "it", None), (404, "none")))) == []
