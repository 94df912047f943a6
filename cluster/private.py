"""File permissions: keep the files of a node private to its user, and refuse secrets that other users can read.

The files of a node are for its user alone: directories have the mode 0700, files 0600. A file with a secret must be private
too, if this user owns it and others could reach it. Two kinds of files are accepted as they are. A container runtime made a
file on a read-only mount: Docker and Kubernetes show secrets as files of root that every process of the container can read.
And this user cannot change the file of another user: if all users can read it, there is a warning.
"""

from __future__ import annotations

import logging
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.cluster.config import BadConfig, Config

logger = logging.getLogger(__name__)

#: Settings that name a file with a secret.
SECRET_FILES: Final = ("secret_file", "tls_key", "ingress_tls_key", "admin_tls_key", "admin_token_file")
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_READ_OR_WRITE: Final = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
_ENTER: Final = stat.S_IXGRP | stat.S_IXOTH
NAMED_MAX: Final = 3


def find_exposure(path: Path, *, anywhere: bool = False) -> str | None:
    """Why a file with a secret is refused, and the command that helps. None: it is not.

    `anywhere`: also in a directory that others cannot enter.
    """
    found = path.stat()
    if found.st_uid != os.geteuid() or not found.st_mode & _READ_OR_WRITE or not _is_reachable(path, anywhere=anywhere):
        return None
    return f"other users of this machine can read or write {path}; run: chmod 600 {shlex.quote(str(path))}"


def find_foreign_exposure(path: Path) -> str | None:
    """What to know about a file with a secret that another user owns."""
    found = path.stat()
    if found.st_uid == os.geteuid() or not found.st_mode & (stat.S_IROTH | stat.S_IWOTH) or not _is_reachable(path):
        return None
    return f"every user of this machine can read or write {path}, and user {found.st_uid} owns it; have it made private"


def _is_reachable(path: Path, *, anywhere: bool = False) -> bool:
    real = path.resolve()
    if os.statvfs(real).f_flag & os.ST_RDONLY:
        return False
    return anywhere or all(folder.stat().st_mode & _ENTER for folder in real.parents)


def check_secrets(config: Config) -> None:
    """Raises BadConfig for a file that others can read; logs what cannot be changed from here."""
    for name, path in secret_files(config):
        if (exposed := find_exposure(path)) is not None:
            raise BadConfig(f"{name}: {exposed}")
        if (foreign := find_foreign_exposure(path)) is not None:
            logger.warning("%s: %s", name, foreign)


def secret_files(config: Config) -> Iterator[tuple[str, Path]]:
    for name in SECRET_FILES:
        path = getattr(config, name)
        if path is not None:
            yield name, path


def find_foreign_owner(data: Path) -> str | None:
    """Why a data directory is refused: the owner of a directory can replace its files. A volume may belong to root."""
    try:
        owner = data.stat().st_uid
    except FileNotFoundError:
        return None
    if owner in (os.geteuid(), 0):
        return None
    quoted = shlex.quote(str(data))
    return (
        f"data: {data} belongs to user {owner}, and this node runs as user {os.geteuid()}; "
        f"run: chown -R {os.geteuid()} {quoted}, run the node as its owner, or name another directory"
    )


def make_private(data: Path) -> None:
    """Take from others what an older release, or a copy, left open to them below the data directory. Raises BadConfig."""
    if (foreign := find_foreign_owner(data)) is not None:
        raise BadConfig(foreign)
    changed = []
    for path in _below(data):
        found = path.lstat()
        if found.st_uid == os.geteuid() and found.st_mode & OTHERS and not stat.S_ISLNK(found.st_mode):
            path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
            changed.append(path)
    if changed:
        named = ", ".join(str(path) for path in changed[:NAMED_MAX])
        more = f" and {len(changed) - NAMED_MAX} more" if len(changed) > NAMED_MAX else ""
        logger.warning("other users could look into %s%s; now only user %d can", named, more, os.geteuid())


def _below(data: Path) -> Iterator[Path]:
    """The directory itself first: once it is private, no other user reaches the rest. Links are not followed."""
    yield data
    for folder, folders, files in os.walk(data):
        for name in (*folders, *files):
            yield Path(folder, name)
