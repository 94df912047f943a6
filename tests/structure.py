"""The rules of the tree: who may import whom, what is pure, what is never evaluated.

Each rule is a function from one module's source to sentences about what breaks it. `test_structure.py` shows every rule
a bad source first, so a rule that sees nothing is found out, and then every file of the tree.
"""

import ast
import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OF_EVERY_ROOM = ("holdfast.__version__", "holdfast.require_asserts", "holdfast.AssertsDisabled")

# What the state machine and the SDK have in common. Frames are not part of it: a second handler protocol has its own.
JOURNAL = ("holdfast.sdk.ids", "holdfast.sdk.journal")

# Room -> what of ours it may import besides itself. An entry covers everything below it.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "sdk": (),
    "log": ("holdfast.sdk.bounds", "holdfast.sdk.ids"),
    "console": (),
    "statemachine": JOURNAL,
    "snapshots": ("holdfast.log", "holdfast.statemachine", *JOURNAL, "holdfast.sdk.bounds"),
    "cluster": (
        "holdfast.snapshots",
        "holdfast.log",
        "holdfast.statemachine",
        *JOURNAL,
        "holdfast.sdk.frames",
        "holdfast.sdk.pongs",
        "holdfast.sdk.signatures",
        "holdfast.sdk.bounds",
        "holdfast.sdk.json_lines",  # What a node keeps of its log has the form of the log.
        "holdfast.sdk.trace_context",  # Nodes and handlers derive the same ids of spans.
        "holdfast.console",  # Served by the admin API.
    ),
    "cli": (
        "holdfast.cluster",
        "holdfast.snapshots",
        "holdfast.log",
        "holdfast.statemachine",
        *JOURNAL,
        "holdfast.sdk.json_lines",  # Logs of nodes and of handlers have one form.
        "holdfast.sdk.loop",  # The event loop that nodes and handlers run on.
    ),
    "chaos": ("holdfast",),
    "ext": ("holdfast.sdk",),  # Agent frameworks, and
    "testing": ("holdfast.sdk", "holdfast.statemachine", "holdfast.cluster"),  # tests of users, once they are there.
}
ROOMS = tuple(room for room in MAY_IMPORT if (ROOT / room).is_dir())

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
    "peers", "partition", "environment", "snapshotting", "values", "registry", "routing", "handlers", "leading", "http",
    "ingress", "members", "backup", "events", "admin", "sql", "observe", "ground", "serving", "doors", "node",
)  # fmt: skip

# The state machine may import these and nothing else: none of them has a clock, a random number or a door to the world.
PURE_IMPORTS = {
    "__future__", "abc", "base64", "binascii", "bisect", "collections", "copy", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "hmac", "itertools", "json", "math", "msgpack", "operator", "re", "string", "struct", "types",
    "typing", "zlib",
}  # fmt: skip
PURE_PREFIXES = (
    "holdfast.require_asserts", "holdfast.statemachine", *JOURNAL, "holdfast.sdk.bounds", "holdfast.sdk.fields",
)  # fmt: skip
# `hash` and `id` differ between processes; the others touch the world.
IMPURE_BUILTINS = {"hash", "id", "input", "open", "print", "breakpoint"}

# Modules of cluster/ that are pure as well: policies, which are told the time. They may import each other.
POLICIES = ("holdfast.cluster.backoff", "holdfast.cluster.handlers.queue")

# Inside the log, only these touch disk, sockets, clocks or entropy. Whatever else is there, now or later, is handed
# the time and the messages and returns what should happen: so the simulator runs the real code.
LOG_OUTSIDE = {"store", "lmdb_file", "sockets", "handshake", "connection", "link", "writer", "environment", "node"}
LOG_FORBIDDEN = {
    "aiohttp", "asyncio", "boto3", "concurrent", "ctypes", "datetime", "fcntl", "http", "io", "lmdb", "mmap",
    "multiprocessing", "os", "queue", "random", "sched", "secrets", "select", "selectors", "shutil", "signal",
    "socket", "socketserver", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid", "uvloop",
    "_thread",
}  # fmt: skip
# All of them but the store, whose operations and interface the rest is written against.
LOG_DRIVERS = tuple(f"holdfast.log.{name}" for name in sorted(LOG_OUTSIDE - {"store"}))

# The rows of operations, in two halves, and the functions of `apply` that carry operations out.
ROWS_OF_OPERATIONS = ("holdfast.sdk.journal", "holdfast.statemachine.ops", "holdfast.statemachine.journal")

# Questions to the machine, and the modules of cluster/ that may ask them: the environment itself, and what stands at the
# doors of a node or beside it, where no simulated node has anything.
MACHINE = {"time.time", "time.time_ns", "time.monotonic", "os.urandom", "uuid.uuid4", "random.Random", "Random"}
ASKS_THE_MACHINE = {
    f"holdfast.cluster.{name}"
    for name in (
        "clock", "entropy", "admin.actions", "handlers.protocols.native.requests", "handlers.protocols.native.signing",
        "http.access", "http.audit", "http.sessions", "partition.state", "registry.identity",
    )
}  # fmt: skip

# What fields and arguments that hold an id are called.
NAMES_OF_IDS = {"id", "id_", "ids", "ident", "idents", "invocation", "caller", "new_id", "oid", "holder"}

# A call with more arguments names them.
POSITIONAL_MAX = 4

# What takes any number of arguments, which have no names: those of a callback, of a process, parts of a hash or of a path,
# names of parameters.
TAKES_ANY = {
    "call_at", "call_later", "call_soon", "run_in_executor", "to_thread", "create_subprocess_exec", "derive",
    "client.path", "Parameters",
}  # fmt: skip

UNSAFE_MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "joblib",
}  # fmt: skip
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
UNSAFE_YAML = {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"}


# Who knows what stands where in a packed outcome: its face, the references in it, the wire, and where speed decides.
KNOW_OUTCOMES = (
    "holdfast.statemachine.outcomes", "holdfast.statemachine.refs", "holdfast.cluster.handlers.large",
    "holdfast.cluster.handlers.protocols.native",
)  # fmt: skip


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

    @property
    def path(self) -> str:
        name = self.name.removeprefix("holdfast.") if self.room in ROOMS else self.name
        return name.replace(".", "/") + ("/__init__.py" if self.is_package else ".py")


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
        module.name: {name for found in imports(module) if (name := known(found.target)) is not None} - {module.name}
        for module in checked
    }

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            fresh = graph[pending.pop()] - seen
            seen |= fresh
            pending += fresh
        return seen

    reach = {name: reached(name) for name in graph}
    return [
        f"{name} and {other} import each other"
        for name, targets in sorted(graph.items())
        for other in sorted(target for target in targets if name in reach[target])
    ]


def bare_rooms(module: Module) -> list[str]:
    """`import log` would make a second copy of every class of holdfast.log."""
    return [
        f"{module.name}:{found.line} imports {found.target}: say holdfast.{found.target.split('.')[0]}"
        for found in imports(module)
        if found.target.split(".")[0] in ROOMS
    ]


def impurities(module: Module, also: tuple[str, ...] = ()) -> list[str]:
    """The state machine is a function of its arguments: no clock, randomness, I/O, await."""
    found = [
        f"{module.name}:{found.line} imports {found.target}, which is not among PURE_IMPORTS"
        for found in imports(module)
        if not found.for_types_only
        and found.target.split(".")[0] not in PURE_IMPORTS
        and not any(covers(prefix, found.target) for prefix in (*PURE_PREFIXES, *also))
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            found.append(f"{module.name}:{node.lineno} is asynchronous")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in IMPURE_BUILTINS:
            found.append(f"{module.name}:{node.lineno} uses {node.id}")
    return found


def impure_policies(module: Module) -> list[str]:
    """A policy of a node decides and never acts: it knows no socket, no event loop and no partition."""
    return impurities(module, also=POLICIES) if module.name in POLICIES else []


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


def machine_asked(module: Module) -> list[str]:
    """What the simulator runs asks its environment for time and random bytes, or a seed is not a run.

    An argument may default to the machine's: the caller hands in another one.
    """
    if module.name in ASKS_THE_MACHINE:
        return []
    return [
        f"{module.name}:{node.lineno} calls {dotted(node.func)}: ask the environment"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and (dotted(node.func) in MACHINE or dotted(node.func).startswith("secrets."))
    ]


def ids_of_bytes(module: Module) -> list[str]:
    """Ids have types of their own (`sdk.ids`), so that nobody takes an object's for an invocation's, or a key of a table."""
    found = []
    for node in ast.walk(module.tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as hint):
                pass
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=hint):
                pass
            case _:
                continue
        if name in NAMES_OF_IDS and any(isinstance(part, ast.Name) and part.id == "bytes" for part in ast.walk(hint)):
            found.append(f"{module.name}:{node.lineno} says bytes for {name}: say whose id it is")
    return found


def unnamed_arguments(module: Module) -> set[str]:
    """What the module calls with more positional arguments than a reader can tell apart. The arguments of a log message
    have no names."""
    return {
        name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and sum(not isinstance(argument, ast.Starred) for argument in node.args) > POSITIONAL_MAX
        and not (name := dotted(node.func)).startswith("logger.")
        and not {name, name.rpartition(".")[2]} & TAKES_ANY
    }


def outcomes_opened(module: Module) -> list[str]:
    """An outcome is read and made by `statemachine.outcomes` (or, at an SDK, by `sdk.journal`), never by numbers."""
    if any(covers(name, module.name) for name in KNOW_OUTCOMES):
        return []
    found = []
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name | ast.Attribute)
            and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr) in ("outcome", "failure")
            and (isinstance(node.slice, ast.Slice) or isinstance(getattr(node.slice, "value", None), int))
        ):
            found.append(f"{module.name}:{node.lineno} reads an outcome by number: use statemachine.outcomes")
    return found


def lists_of_operations(module: Module) -> list[str]:
    """What is true of some operations of a journal and not of others stands in their rows, not in lists elsewhere."""
    if "Op." not in module.source or module.name in ROWS_OF_OPERATIONS:
        return []
    found = []
    for node in ast.walk(module.tree):
        match node:
            case ast.Set(elts=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                named = parts
            case ast.Dict(keys=keys):
                named = [key for key in keys if key is not None]
            case ast.MatchOr(patterns=patterns):
                named = [pattern.value for pattern in patterns if isinstance(pattern, ast.MatchValue)]
            case _:
                continue
        operations = [name for name in map(dotted, named) if name.startswith("Op.")]
        if len(operations) > 1:
            found.append(f"{module.name}:{node.lineno} lists {', '.join(operations)}: say it in their rows")
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


def forget_files() -> None:
    files_of.cache_clear()
    imports.cache_clear()


def broken(rule: Callable[[Module], list[str]], checked: list[Module]) -> list[str]:
    assert checked, "a rule that is shown no file proves nothing"
    return [sentence for module in checked for sentence in rule(module)]
