"""`holdfast cert ...`: certificates for a cluster, without openssl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.client import Failed
from holdfast.cli.output import fields, json_option, print_json

if TYPE_CHECKING:
    from holdfast.cli.authority import Pair

folder_option = click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("certs"),
    show_default=True,
    help="The folder of the authority and of what it signs.",
)
force_option = click.option("--force", is_flag=True, help="Replace files that exist.")


def days_option(default: int) -> Callable[[Any], Any]:
    return click.option(
        "--days", type=click.IntRange(1, 36500), default=default, show_default=True, help="How long it is valid."
    )


@click.group()
def cert() -> None:
    """Make and inspect the certificates of a cluster.

    \b
    holdfast cert ca                                    an authority: ca.pem and ca.key
    holdfast cert node n1 --host n1.internal            for a node: n1.pem and n1.key
    holdfast cert client ada                            for a user of an admin API that requires one

    The certificate of a node serves for the link between nodes, for the ingress and for the admin API. Copy
    only ca.pem and the node's two files to its machine. ca.key signs new certificates: keep it offline.
    """


@cert.command()
@click.option("--name", default="holdfast", show_default=True, help="The name of the authority, as programs show it.")
@folder_option
@days_option(3650)
@force_option
@json_option
def ca(name: str, folder: Path, days: int, force: bool, as_json: bool) -> None:
    """Make a certificate authority, which signs the certificates of nodes and clients."""
    from holdfast.cli import authority

    _make(lambda: authority.make_authority(folder, name, days=days, force=force), as_json)


@cert.command()
@click.argument("name")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="A host name or IP address at which clients reach the node; may be repeated. localhost is always included.",
)
@folder_option
@days_option(825)
@force_option
@json_option
def node(name: str, hosts: tuple[str, ...], folder: Path, days: int, force: bool, as_json: bool) -> None:
    """Make a certificate for the node NAME, signed by the authority in the same folder."""
    from holdfast.cli import authority

    _make(lambda: authority.make_for_node(folder, name, hosts, days=days, force=force), as_json)


@cert.command()
@click.argument("name")
@folder_option
@days_option(825)
@force_option
@json_option
def client(name: str, folder: Path, days: int, force: bool, as_json: bool) -> None:
    """Make a client certificate for NAME, for an admin API with admin_tls_client_ca. Nodes do not accept it from peers."""
    from holdfast.cli import authority

    _make(lambda: authority.make_for_client(folder, name, days=days, force=force), as_json)


def _make(make: Callable[[], Pair], as_json: bool) -> None:
    from holdfast.cli.authority import Refused

    try:
        made = make()
    except Refused as error:
        raise Failed(str(error)) from None
    except OSError as error:
        raise Failed(f"{error.filename}: {error.strerror}") from None
    shown = {**_describe(made.cert)[0], "key": str(made.key)}
    if as_json:
        print_json(shown)
        return
    click.echo(f"{made.cert}: valid until {shown['valid_until']}{_for(shown)}")
    click.echo(f"{made.key}: its private key, readable by you alone")


def _for(shown: dict[str, Any]) -> str:
    return f", for {', '.join(shown['names'])}" if shown["names"] else ""


@cert.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@json_option
def show(files: tuple[Path, ...], as_json: bool) -> None:
    """Show the names in certificates and when they expire."""
    shown = [each for path in files for each in _describe(path)]
    if as_json:
        print_json({"certificates": shown})
        return
    for offset, each in enumerate(shown):
        if offset:
            click.echo()
        fields((key.replace("_", " "), ", ".join(value) if key == "names" else value) for key, value in each.items())


def _describe(path: Path) -> list[dict[str, Any]]:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from None
    except ValueError:
        raise Failed(
            f"{path} is not a certificate in PEM", "name the file of a certificate (.pem), not of a key"
        ) from None
    return [
        {
            "certificate": str(path),
            "subject": each.subject.rfc4514_string(),
            "issuer": each.issuer.rfc4514_string(),
            "names": _names(each),
            "valid_from": f"{each.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}",
            "valid_until": f"{each.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}",
        }
        for each in found
    ]


def _names(found: Any) -> list[str]:
    from cryptography import x509

    try:
        alternatives = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [str(each.value) for each in alternatives]
