"""The reference pages, made from the code: SDK, settings, command line, admin API and metrics.

`docs/conf.py` calls `generate` when the site is built, so the pages cannot be stale and are not checked in. The admin API is
asked of a node that is started for the purpose: what it serves is what there is. docs/metrics.md alone is checked in, because
dashboards and alerts refer to it: `make metrics` writes it, and tests/docs/test_metrics_page.py reports when it is stale.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tokenize
import typing
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric

# Modules of Holdfast are imported here, and nowhere else in this file.
from holdfast import sdk
from holdfast.cli.main import main as command_line
from holdfast.cluster.config import Config, HostPort, describe
from holdfast.cluster.node import Node

ROOT: Final = Path(__file__).resolve().parent.parent
START_S: Final = 60.0

#: How the names of the SDK are grouped. What is named nowhere comes last, under "More".
SDK_GROUPS: Final = {
    "Services": ("Service", "VirtualObject", "Workflow", "ServiceRef", "RetryPolicy"),
    "Contexts": ("Context", "ObjectContext", "WorkflowContext", "current_context", "current_step", "durable_tool"),
    "What operations return": (
        "Operation",
        "DurablePromise",
        "Approval",
        "Decision",
        "Awakeable",
        "Selected",
        "Settled",
        "Sent",
    ),
    "Serving": ("serve", "serve_async", "Server", "endpoint"),
    "Client": ("Client", "SyncClient", "SendHandle"),
    "Payloads": ("Serde", "JsonSerde", "TypeSerde", "RAW_JSON"),
}
#: Of these classes, which have more for the SDK itself, only the named methods are for users.
SDK_METHODS: Final[dict[str, tuple[str, ...]]] = {"Operation": ("done", "result"), "RetryPolicy": ()}
#: How metrics are grouped: by the word that follows `holdfast_`. The rest is about the process.
METRIC_GROUPS: Final = {
    "node": "Node", "disk": "Node", "clock": "Node", "loop": "Node", "certificate": "Node", "": "Node", "member": "Cluster",
    "peer": "Cluster", "handovers": "Cluster", "log": "Log", "partition": "Partitions", "timers": "Partitions",
    "approvals": "Invocations",
    "invocations": "Invocations", "attempts": "Invocations", "attempt": "Invocations", "steps": "Invocations",
    "completed": "Invocations", "deployment": "Handlers", "endpoint": "Handlers", "invoker": "Handlers",
    "ingress": "HTTP", "http": "HTTP", "audit": "HTTP", "snapshot": "Snapshots and backups",
    "backup": "Snapshots and backups", "backups": "Snapshots and backups", "traces": "Traces",
    "blob": "Large values", "blobs": "Large values",
}  # fmt: skip
METRICS_HEAD: Final = """\
# Metrics

`GET /metrics` of the admin port serves them for Prometheus. If the node asks for tokens, the role
`read` is enough. Each node reports what it sees itself: add counters up over the nodes, and take
the largest of a gauge that concerns the cluster. This page is generated from the collectors:
`make metrics`.

A node that has not joined its cluster yet serves the groups Node (without its disk's state in the
cluster), Log and Process. With `auth = "tokens"` it can check no token of the cluster before it has
joined: it then serves everything to its own admin token, and to all others `holdfast_node_state`
alone.

Dashboards and alerts are in `deploy/`, and the [runbook](runbook.md) says what to do.

The latency of Holdfast and that of the handlers are measured apart. A request waits for
`holdfast_ingress_accept_seconds` until it is durable. Its attempt waits for
`holdfast_attempt_start_seconds` until it is sent to the handler. Then the attempt takes
`holdfast_attempt_ours_seconds` while steps become durable, and `holdfast_attempt_handler_seconds`
for the handler's own work. `holdfast_ingress_seconds` is the whole, from request to response."""
_NO_SETTINGS: Final = {"secret"}  # It is read from `secret_file`.
_SENTINEL: Final = re.compile(r"<object object at 0x[0-9a-f]+>")


def generate(folder: Path) -> None:
    """Write all pages below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_node() as ask:
        pages = {
            "sdk": sdk_page(),
            "settings": settings_page(),
            "cli": cli_page(),
            "admin-api": admin_page(json.loads(ask("/openapi.json"))),
        }
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # The site is built again only where something changed.
            path.write_text(text)


# -- the SDK ---------------------------------------------------------------------------------------------------------


def sdk_page() -> str:
    lines = ["# SDK", "", "Everything here is imported from `holdfast.sdk`.", ""]
    errors = [name for name in sdk.__all__ if _is_error(getattr(sdk, name))]
    named = {name for names in SDK_GROUPS.values() for name in names}
    rest = [name for name in sdk.__all__ if name not in named and name not in errors]
    for title, names in {**SDK_GROUPS, "Errors": tuple(errors), "More": tuple(rest)}.items():
        if names:
            lines += [f"## {title}", ""]
        for name in names:
            lines += _member(name, getattr(sdk, name))
    return "\n".join(lines) + "\n"


def _is_error(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)


def _member(name: str, found: Any) -> Iterator[str]:
    yield from (f"### {name}", "")
    if not isinstance(found, type) and not callable(found):  # A constant.
        yield from markdown(inspect.getdoc(type(found)) or "")
        return
    if not isinstance(found, type):
        yield from _code(f"{_async(found)}{name}{_signature(found)}")
        yield from markdown(inspect.getdoc(found) or "")
        return
    bases = [base.__name__ for base in found.__mro__[1:] if base.__name__ in sdk.__all__ or base is TimeoutError]
    if not getattr(found, "_is_protocol", False):
        yield from _code(f"{name}{_signature(found)}")
    if bases:
        yield from (f"Has everything of {' and '.join(f'`{base}`' for base in bases[:2])}.", "")
    own_doc = vars(found).get("__doc__")
    yield from markdown(inspect.cleandoc(own_doc) if own_doc else "")
    for method_name, method in _public(found):
        if isinstance(method, property):
            yield from (f"#### {name}.{method_name}", "")
        else:
            yield from (f"#### {name}.{method_name}()", "")
            yield from _code(f"{_async(method)}{method_name}{_signature(method, bound=True)}")
        yield from markdown(inspect.getdoc(method) or "")


def _public(found: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties that a class adds to its public bases."""
    inherited = {name for base in found.__mro__[1:] if base.__name__ in sdk.__all__ for name in vars(base)}
    for name, member in vars(found).items():
        if name not in SDK_METHODS.get(found.__name__, (name,)):
            continue
        if (
            not name.startswith("_")
            and name not in inherited
            and (inspect.isfunction(member) or isinstance(member, property))
        ):
            yield name, member


def _async(found: Any) -> str:
    return "async " if inspect.iscoroutinefunction(found) else ""


def _signature(found: Callable[..., Any], *, bound: bool = False) -> str:
    """As it is written. Types that only say `Any` are left out, and so are defaults that stand for "not given"."""
    try:
        signature = inspect.signature(found)
    except ValueError:
        return "()"
    if "options" in signature.parameters:  # Which ones there are is in the declarations for type checkers.
        declared = [inspect.signature(each) for each in typing.get_overloads(found)]
        signature = max([signature, *declared], key=lambda each: len(each.parameters))
    parameters = []
    for offset, each in enumerate(signature.parameters.values()):
        if bound and offset == 0:
            continue
        if each.annotation in ("Any", typing.Any):
            each = each.replace(annotation=inspect.Parameter.empty)
        if type(each.default) is object:
            each = each.replace(default=...)
        parameters.append(each)
    result = signature.return_annotation
    private = isinstance(result, str) and result.startswith("_")
    returns = inspect.Signature.empty if private or result in ("Any", "None", None) else result
    text = str(inspect.Signature(parameters, return_annotation=returns))
    text = text.replace("Ellipsis", "...").replace("typing.", "")
    return _SENTINEL.sub("...", re.sub(r"'([A-Za-z_][\w\[\], .|*]*)'(?=[,)\s]|$)", r"\1", text))


def _code(text: str) -> tuple[str, ...]:
    """A signature, one parameter on a line if it is long."""
    if len(text) > 96:
        head, _, rest = text.partition("(")
        inside, _, tail = rest.rpartition(")")
        text = "\n".join([f"{head}(", *(f"    {part}," for part in _split(inside)), f"){tail}"])
    return ("```python", text, "```", "")


def _split(text: str) -> list[str]:
    """At commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def markdown(text: str) -> Iterator[str]:
    """A docstring as Markdown. After a line that ends in `::` comes code: what is indented, or else what is Python."""
    paragraphs = re.split(r"\n\s*\n", text) if text else []
    code: list[str] = []
    expected = False
    for paragraph in paragraphs:
        if expected and (paragraph.startswith("    ") or _is_python(paragraph)):
            code.append(paragraph)
            continue
        if code:
            yield from _fenced(code)
            code, expected = [], False
        expected = paragraph.endswith("::")
        yield from (paragraph.removesuffix("::") + ":" if expected else paragraph, "")
    if code:
        yield from _fenced(code)


def _fenced(paragraphs: list[str]) -> tuple[str, ...]:
    return ("```python", inspect.cleandoc("\n" + "\n\n".join(paragraphs)), "```", "")


def _is_python(paragraph: str) -> bool:
    try:
        ast.parse(paragraph)
    except SyntaxError:
        return paragraph.startswith("@")  # A decorator whose function is in the next paragraph.
    return True


# -- settings --------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    defaults = describe(Config())
    comments = field_comments(Config)
    lines = [
        "# Settings",
        "",
        "A setting is a line of `node.toml`, or a variable of the environment, which wins: `data` is `HOLDFAST_DATA`.",
        "Durations are seconds or text such as `90s` and `1h`; sizes are bytes. An unknown or wrong setting is an",
        "error, and `holdfast config check --config node.toml` explains it.",
        "",
        "| setting | default | meaning |",
        "|---|---|---|",
    ]
    for each in fields(Config):
        if each.name not in _NO_SETTINGS:
            is_duration = isinstance(each.default, float) and not each.name.endswith("_ratio")
            default = f"{each.default:g} s" if is_duration else defaults[each.name]
            lines.append(f"| `{each.name}` | {_cell(default)} | {_cell(comments.get(each.name, ''))} |")
    return "\n".join(lines) + "\n"


def field_comments(found: type) -> dict[str, str]:
    """What stands behind `#` at each field of a dataclass: on its line, or on the lines above it."""
    source = inspect.getsource(found)
    comments: dict[str, str] = {}
    above: list[str] = []
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.start[1] == 4 and token.line.strip().startswith(f"{token.string}:"):
            name = token.string
            comments[name] = " ".join(above)
            above = []
        elif token.type == tokenize.COMMENT:
            text = token.string.lstrip("#: ")
            if token.line.strip().startswith("#"):
                above.append(text)
            elif name:
                comments[name] = f"{comments[name]} {text}".strip()
        elif token.type == tokenize.NL and not token.line.strip():
            above = []
    return comments


# -- the command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    lines = ["# Command line", ""]
    for path, command in _commands("holdfast", command_line):
        level = min(4, 1 + len(path.split()))
        lines += [f"{'#' * level} {path}", ""]
        with click.Context(command, info_name=path) as context:
            usage = " ".join([path, *command.collect_usage_pieces(context)])
            parameters = [each for each in command.get_params(context) if each.name != "help"]
            records = [record for each in parameters if (record := each.get_help_record(context))]
        lines += ["```text", usage, "```", "", *_help(command.help or "")]
        if records:
            lines += ["| option | |", "|---|---|", *(f"| `{flags}` | {_cell(text)} |" for flags, text in records), ""]
    return "\n".join(lines) + "\n"


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, each in sorted(command.commands.items()):
            yield from _commands(f"{path} {name}", each)


def _help(text: str) -> Iterator[str]:
    """Paragraphs; those that begin with a backspace keep their lines (as click has it)."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.lstrip().startswith("\b"):
            yield from ("```text", inspect.cleandoc(paragraph.replace("\b", "", 1)), "```", "")
        else:
            yield from (_cell(paragraph), "")


# -- the admin API and the metrics -----------------------------------------------------------------------------------


def admin_page(document: dict[str, Any]) -> str:
    lines = [
        "# Admin API",
        "",
        "From the OpenAPI document that each node serves at `/openapi.json` of its admin port (9070). The requests of",
        "clients, what errors look like, and how to generate a client are in [HTTP](../http.md). [Bodies](#bodies) has the",
        "fields of all bodies.",
        "",
    ]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += [f"## {method.upper()} {path}", "", f"{operation['summary'].rstrip('.')}.", ""]
            rows = [(each["name"], each["in"], _text_of(each)) for each in operation.get("parameters", [])]
            if rows:
                lines += ["| parameter | in | |", "|---|---|---|"]
                lines += [f"| `{name}` | {where} | {_cell(text)} |" for name, where, text in rows]
                lines.append("")
            if body := _bodies(operation.get("requestBody", {})):
                lines += [f"The body of the request is {body}.", ""]
            answers = {code: each for code, each in operation["responses"].items() if "description" in each}
            lines += [
                f"- **{code}**: {_cell(each['description'])}" + (f" ({body})" if (body := _bodies(each)) else "")
                for code, each in answers.items()
            ]
            lines.append("")
    lines += ["(bodies)=", "## Bodies", "", "Every error has the body [Error](#body-error).", ""]
    for name, schema in sorted(schemas.items()):
        lines += [f"(body-{name.lower()})=", f"### {name}", ""]
        if "description" in schema:
            lines += [_cell(schema["description"]), ""]
        lines += ["| field | type | |", "|---|---|---|"]
        required = schema.get("required", [])
        for field, each in schema["properties"].items():
            optional = "" if field in required else " (optional)"
            lines.append(f"| `{field}`{optional} | {_type_of(each)} | {_cell(_text_of(each))} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def _bodies(described: dict[str, Any]) -> str:
    """Of a request or an answer, with links to their fields."""
    found = []
    for kind, media in described.get("content", {}).items():
        if "x-holdfast-events" in media:
            found += [f"`{event}`: {_type_of(data)}" for event, data in media["x-holdfast-events"].items()]
        else:
            is_described = kind == "application/json" and media["schema"].keys() & {"$ref", "anyOf"}
            found.append(_type_of(media["schema"]) if is_described else f"`{kind}`")
    return ", ".join(found)


def _type_of(schema: dict[str, Any]) -> str:
    """In a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#body-{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type_of(each) for each in schema["anyOf"])
    kinds = schema.get("type", "any JSON")
    words = []
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind == "array":
            words.append(f"list of {_type_of(schema['items'])}")
        elif kind == "object" and "additionalProperties" in schema:
            words.append(f"object of {_type_of(schema['additionalProperties'])}")
        else:
            words.append("time" if kind == "string" and schema.get("format") == "date-time" else kind)
    return " or ".join(words)


def _text_of(described: dict[str, Any]) -> str:
    """Of a parameter or a field."""
    schema = described.get("schema", described)
    text = described.get("description") or schema.get("description") or ""
    allowed = ", ".join(f"`{json.dumps(each).strip(chr(34))}`" for each in schema.get("enum", []))
    found = ": ".join(part for part in (text, allowed) if part)
    if "minimum" in schema and "maximum" in schema:
        found = f"{found}, {schema['minimum']} to {schema['maximum']}".removeprefix(", ")
    return f"{found}; {schema['default']} if not given" if "default" in schema else found


def metrics_page(families: Sequence[Metric]) -> str:
    """docs/metrics.md, which is checked in, so that it can be read without building the site."""
    lines = [METRICS_HEAD]
    groups: dict[str, list[Metric]] = {}
    for family in families:
        groups.setdefault(METRIC_GROUPS.get(family.name.partition("_")[2].split("_")[0], "Process"), []).append(family)
    for title in dict.fromkeys([*METRIC_GROUPS.values(), "Process"]):
        lines += ["", f"## {title}", "", "| name | type | labels | meaning |", "|---|---|---|---|"]
        for family in groups[title]:
            suffix = "_total" if family.type == "counter" else "_info" if family.type == "info" else ""
            labels = ", ".join(f"`{label}`" for label in _labels(family))
            lines.append(f"| `{family.name}{suffix}` | {family.type} | {labels} | {_cell(family.documentation)} |")
    return "\n".join(lines) + "\n"


def _labels(family: Metric) -> list[str]:
    if family.type == "info" or not hasattr(family, "_labelnames"):  # Of the process: they have samples.
        return sorted({label for sample in family.samples for label in sample.labels})
    return list(family._labelnames)


async def metric_families() -> list[Metric]:
    """Of the collectors of a node."""
    with tempfile.TemporaryDirectory() as folder:
        nowhere = HostPort("127.0.0.1", 0)
        node = Node(Config(data=Path(folder), partitions=1, ingress=nowhere, admin=nowhere, peer=nowhere))
        await node.start()
        try:
            found = await node.doors.metrics.families()
        finally:
            await node.stop()
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return [*found, *registry.collect()]


@contextmanager
def running_node() -> Iterator[Callable[[str], str]]:
    """A node of its own, to be asked over its admin API."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "dev", "--port", "0", "--admin-port", "0", "--partitions", "1"],
                cwd=folder, stdout=output, stderr=subprocess.STDOUT, env={**environment, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"^ *admin +(http://\S+)", log.read_text(), re.MULTILINE)):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no node to ask: {log.read_text()}")
                time.sleep(0.05)
            address = found[1]

            def ask(path: str) -> str:
                with urllib.request.urlopen(f"{address}{path}", timeout=START_S) as answer:  # noqa: S310 - our own node
                    return str(answer.read().decode())

            yield ask
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(START_S)


def _cell(text: str) -> str:
    """Text on one line, in which nothing ends a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    (ROOT / "docs" / "metrics.md").write_text(metrics_page(asyncio.run(metric_families())))
