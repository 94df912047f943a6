"""`holdfast profile ...`: the clusters that a user works with, each under a name.

A profile has the addresses of a cluster and a token for it. The profiles of a user are one file that only this user can
read. Options and `HOLDFAST_*` variables win over a profile. The token of a profile is sent to the addresses of that profile
and to no other, so a command that names another cluster does not reveal it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from holdfast.cli import client
from holdfast.cli.client import Failed, refuse_credentials
from holdfast.cli.output import json_option, print_json, table

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
FILE_BYTES_MAX: Final = 1024 * 1024


@dataclass(frozen=True)
class Profile:
    """One cluster. An empty field is not set."""

    admin_url: str = ""
    ingress_url: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    ca_file: str = ""
    client_cert_file: str = ""
    client_key_file: str = ""

    def urls(self) -> tuple[str, ...]:
        return tuple(url for url in (self.admin_url, self.ingress_url) if url)


@dataclass(frozen=True)
class Profiles:
    """A file of profiles. `current` is the one that commands use when they name none."""

    by_name: Mapping[str, Profile]
    current: str = ""

    def get(self, name: str) -> Profile:
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise Failed(f"there is no profile {name!r:.80} in {path()}", f"profiles there: {known}")
        return self.by_name[name]


def path() -> Path:
    """`HOLDFAST_PROFILES`, or `holdfast/profiles.toml` in the user's settings directory."""
    if named := os.environ.get("HOLDFAST_PROFILES"):
        return Path(named)
    settings = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(settings) / "holdfast" / "profiles.toml"


def choose(name: str | None) -> Profile | None:
    """The profile for this command: the named one, or else the current one. None: no file, or no current profile."""
    profiles = read()
    name = name or profiles.current
    return profiles.get(name) if name else None


def complete_name(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What the shell offers for the name of a profile."""
    try:
        known = read().by_name
    except Failed:
        return []
    return [
        CompletionItem(name, help=each.admin_url or None)
        for name, each in sorted(known.items())
        if name.startswith(incomplete) and _NAME.fullmatch(name)
    ]


def offer(profile: Profile) -> None:
    """Use its certificates, and its token for its addresses, unless the command was given its own."""
    client.offer_certificates(profile.ca_file, profile.client_cert_file, profile.client_key_file)
    if profile.token:
        client.offer_token(profile.token, profile.urls())
    elif profile.token_file:
        client.offer_token(client.read_token(Path(profile.token_file), "token_file of the profile"), profile.urls())


def read() -> Profiles:
    """Read the file. Raises Failed if it is unusable or others can read it."""
    file = path()
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Profiles({})
    except OSError as error:
        if isinstance(error, PermissionError) and not os.environ.get("HOLDFAST_PROFILES"):
            return Profiles({})  # HOME belongs to another user, as after `sudo -u`.
        raise Failed(f"the profiles in {file} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise Failed(
            f"other users of this machine can read or write the profiles in {file}",
            f"chmod 600 {shlex.quote(str(file))}",
        )
    try:
        if len(text) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX} bytes")
        return _parse(tomllib.loads(text.decode()))
    except ValueError as error:  # Not TOML, not UTF-8, or not profiles.
        raise Failed(f"the profiles in {file} cannot be used: {error}", "correct the file, or remove it") from None


def _parse(found: Mapping[str, Any]) -> Profiles:
    if unknown := found.keys() - {"current", "profiles"}:
        raise ValueError(f"unknown key {min(unknown)!r:.80}; `current` and `profiles` are known")
    tables = found.get("profiles", {})
    if not isinstance(tables, dict):
        raise ValueError("`profiles` must be a table")
    known = {each.name for each in fields(Profile)}
    by_name = {}
    for name, values in tables.items():
        if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
            raise ValueError(f"the profile {name!r:.80} must be a table of texts")
        if unknown := values.keys() - known:
            raise ValueError(f"unknown key {min(unknown)!r:.80} in the profile {name!r:.80}")
        by_name[name] = Profile(**values)
    current = found.get("current", "")
    if current and current not in by_name:
        raise ValueError(f"`current` is {current!r:.80}, and there is no such profile")
    return Profiles(by_name, current)


def write(profiles: Profiles) -> None:
    """Replace the file atomically, readable by its user alone."""
    file = path()
    lines = [f"current = {_quoted(profiles.current)}"] if profiles.current else []
    for name, profile in sorted(profiles.by_name.items()):
        lines += ["", f"[profiles.{_quoted(name)}]"]
        lines += [f"{key} = {_quoted(value)}" for key, value in asdict(profile).items() if value]
    making = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                opened.write("\n".join(lines).lstrip() + "\n")
                opened.flush()
                os.fsync(descriptor)
            making.replace(file)
        except BaseException:
            making.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Failed(f"the profiles in {file} cannot be written: {error.strerror}") from None


def _quoted(text: str) -> str:
    """A string in TOML, which is the same as in JSON if it is valid Unicode."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@click.group()
def profile() -> None:
    """Addresses and tokens of clusters, each under a name.

    \b
    holdfast profile set prod --admin-url https://holdfast.internal:9070 --token-file -
    holdfast --profile prod cluster status
    holdfast profile use prod       make it the default

    Profiles are in ~/.config/holdfast/profiles.toml (or the file in HOLDFAST_PROFILES), which only you can read.
    Options and HOLDFAST_* variables win over a profile.
    """


@profile.command("set")
@click.argument("name", shell_complete=complete_name)
@click.option("--admin-url", help="The admin API of any node of the cluster.")
@click.option("--ingress-url", help="The ingress of any node of the cluster.")
@click.option(
    "--token-file",
    help="A file with the token, which every command reads; - reads the token from standard input and stores it.",
)
@click.option("--ca-file", help="A file with the authority that signed the nodes' certificates.")
@click.option("--client-cert-file", help="A client certificate for an admin API that requires one.")
@click.option("--client-key-file", help="Its private key, unless it is in the same file.")
@json_option
def set_profile(
    name: str,
    admin_url: str | None,
    ingress_url: str | None,
    token_file: str | None,
    ca_file: str | None,
    client_cert_file: str | None,
    client_key_file: str | None,
    as_json: bool,
) -> None:
    """Create the profile NAME, or change the given values. An empty value is removed."""
    if not _NAME.fullmatch(name):
        raise Failed(
            f"{name!r:.80} is not a name of a profile", "use up to 64 letters, digits, hyphens and underscores"
        )
    profiles = read()
    values = asdict(profiles.by_name.get(name, Profile()))
    for key, value in (("admin_url", admin_url), ("ingress_url", ingress_url)):
        if value is not None:
            values[key] = _checked_url(key, value) if value else ""
    certificates = {"ca_file": ca_file, "client_cert_file": client_cert_file, "client_key_file": client_key_file}
    values |= {key: _absolute(file) for key, file in certificates.items() if file is not None}
    if token_file == "-":  # noqa: S105 - the name of standard input
        values |= {"token": _read_token(), "token_file": ""}
    elif token_file is not None:
        values |= {"token": "", "token_file": _absolute(token_file)}
    write(Profiles({**profiles.by_name, name: Profile(**values)}, profiles.current))
    _say(as_json, f"The profile {name} is in {path()}", name)


def _absolute(file: str) -> str:
    return str(Path(file).absolute()) if file else ""


def _checked_url(key: str, url: str) -> str:
    option = f"--{key.replace('_', '-')}"
    refuse_credentials(url, "a profile keeps the token: --token-file")
    if re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?", url) is None:
        raise Failed(
            f"{option}: {url!r:.200} is not the address of a node", "for example https://holdfast.internal:9070"
        )
    return url


def _read_token() -> str:
    if sys.stdin.isatty():
        token = str(click.prompt("Token", hide_input=True, err=True)).strip()
    else:
        token = sys.stdin.readline().strip()
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise Failed("standard input has no token", "a token is one line, as in hf_<id>_<secret>")
    return token


@profile.command("list")
@json_option
def list_profiles(as_json: bool) -> None:
    """List the profiles. Tokens are not shown."""
    profiles = read()
    rows = [
        {
            "name": name,
            "current": name == profiles.current,
            "admin_url": each.admin_url or None,
            "ingress_url": each.ingress_url or None,
            "token": "stored" if each.token else each.token_file or None,
            "ca_file": each.ca_file or None,
            "client_cert_file": each.client_cert_file or None,
        }
        for name, each in sorted(profiles.by_name.items())
    ]
    if as_json:
        print_json({"file": str(path()), "profiles": rows})
        return
    table(
        ("NAME", "CURRENT", "ADMIN", "INGRESS", "TOKEN"),
        (
            (row["name"], "yes" if row["current"] else "", row["admin_url"], row["ingress_url"], row["token"])
            for row in rows
        ),
        empty="No profiles. Create one: holdfast profile set NAME --admin-url URL --token-file -",
    )


@profile.command()
@click.argument("name", required=False, shell_complete=complete_name)
@click.option("--none", "nothing", is_flag=True, help="Use no profile when --profile is not given.")
@json_option
def use(name: str | None, nothing: bool, as_json: bool) -> None:
    """Use the profile NAME when --profile is not given."""
    if nothing == (name is not None):
        raise click.UsageError("give the NAME of a profile, or --none")
    profiles = read()
    if name is not None:
        profiles.get(name)
    write(Profiles(profiles.by_name, name or ""))
    _say(as_json, f"Commands use the profile {name}." if name else "Commands use no profile.", name)


@profile.command()
@click.argument("name", shell_complete=complete_name)
@json_option
def remove(name: str, as_json: bool) -> None:
    """Remove the profile NAME from the file. A token file that it names is kept."""
    profiles = read()
    profiles.get(name)
    rest = {other: each for other, each in profiles.by_name.items() if other != name}
    write(Profiles(rest, profiles.current if profiles.current != name else ""))
    _say(as_json, f"Removed the profile {name}.", name)


def _say(as_json: bool, sentence: str, name: str | None) -> None:
    print_json({"file": str(path()), "name": name}) if as_json else click.echo(sentence)
