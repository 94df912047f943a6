"""Tokens at the listeners of a node: which requests are accepted, as which user, and with which permissions."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli.main import main
from holdfast.cluster.config import BadConfig, Config
from holdfast.cluster.errors import Forbidden, Unauthorized, Unavailable
from holdfast.cluster.http.access import ROOT, STRANGER, Access, Principal, find_token_faults, make_token, open_root
from holdfast.log.errors import NotLeader
from holdfast.statemachine.access import (
    ADMIN,
    INVOKE,
    OPERATE,
    READ,
    ROLES,
    CreateToken,
    RevokeToken,
    RotateToken,
    Tokens,
)


class World:
    """The tokens of a meta group, one node's view of them, and a clock."""

    def __init__(self) -> None:
        self.now_ms = 1000
        self.committed: list[CreateToken | RotateToken] = []  # Not applied on this node yet.
        self.asked = 0
        self.down = False
        self.tokens = Tokens()
        _, self.root, _ = make_token(ROOT)
        self.access = Access(lambda: self.tokens, root=self.root, now_ms=lambda: self.now_ms, fresh=self.fresh)

    async def fresh(self) -> None:
        self.asked += 1
        if self.down:
            raise NotLeader(None)
        while self.committed:
            match self.committed.pop():
                case CreateToken() as command:
                    self.tokens.create(command, self.now_ms)
                case RotateToken() as command:
                    self.tokens.rotate(command, self.now_ms)

    def create(self, *roles: str, services: tuple[str, ...] = (), expires_ms: int = 0, here: bool = True) -> str:
        id_, text, digest = make_token()
        command = CreateToken(id_, "ci", list(roles), list(services), digest, "node", expires_ms)
        if here:
            assert self.tokens.create(command, self.now_ms).code == 0
        else:
            self.committed.append(command)
        return text

    async def who(self, token: str) -> Principal:
        return await self.access.authenticate(f"Bearer {token}")

    async def refuses(self, token: str) -> bool:
        try:
            await self.who(token)
        except Unauthorized as error:
            assert token not in f"{error} {error.hint}"
            return True
        return False


@pytest.fixture
def world() -> World:
    return World()


async def test_a_token_authenticates_its_owner(world: World) -> None:
    token = world.create(INVOKE, services=("trips",))

    principal = await world.who(token)

    assert (principal.name, principal.roles, principal.services) == ("ci", (INVOKE,), frozenset({"trips"}))
    assert token.split("_")[1] == principal.id and world.access.take_used() == {principal.id: 1000}
    assert world.access.take_used() == {} and world.asked == 0


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", "Bearer ", "Basic aGY6aGY=", "Bearer hf", "Bearer hf_", "Bearer hf__", "Bearer hf_node",
        "Bearer hf_node_", "Bearer hf_node_wrong", "Bearer hf_abc_def", "Bearer xx_abc_def", "Bearer " + "x" * 10_000,
        "Bearer hf_\udc80_\x00", "Bearer hf_node_\udc80",
    ],
)  # fmt: skip
async def test_a_header_without_a_valid_token_is_refused(world: World, header: str) -> None:
    world.create(ADMIN)

    with pytest.raises(Unauthorized):
        await world.access.authenticate(header)


async def test_without_a_token_nothing_is_permitted(world: World) -> None:
    principal = await world.access.authenticate(None)

    assert principal is STRANGER
    for role in ROLES:
        with pytest.raises(Unauthorized, match="this request needs a token"):
            principal.check(role)
    with pytest.raises(Unauthorized):
        principal.check_service("trips")


async def test_another_secret_under_a_known_id_is_refused(world: World) -> None:
    _, id_, _ = world.create(READ).split("_")
    _, _, secret = world.create(READ).split("_")

    assert await world.refuses(f"hf_{id_}_{secret}")
    assert world.asked == 1 and world.access.refused == 1


async def test_an_expired_token_is_refused_without_a_read(world: World) -> None:
    token = world.create(READ, expires_ms=2000)
    world.now_ms = 2000

    assert await world.refuses(token) and world.asked == 0


async def test_a_token_ends_when_it_expires_and_when_it_is_revoked(world: World) -> None:
    expires, revoked = world.create(READ, expires_ms=2000), world.create(READ)
    world.now_ms = 1999
    assert not await world.refuses(expires) and not await world.refuses(revoked)

    world.now_ms = 2000
    world.tokens.revoke(RevokeToken(revoked.split("_")[1]))

    assert await world.refuses(expires) and await world.refuses(revoked)


async def test_a_rotated_token_has_two_secrets_for_a_while(world: World) -> None:
    old = world.create(READ)
    id_, new, digest = make_token(old.split("_")[1])
    world.tokens.rotate(RotateToken(id_, digest, old_until_ms=5000), world.now_ms)

    assert not await world.refuses(old) and not await world.refuses(new)
    world.now_ms = 5000
    assert await world.refuses(old) and not await world.refuses(new)


async def test_a_token_that_was_created_on_another_node_a_moment_ago_is_known(world: World) -> None:
    token = world.create(READ, here=False)

    assert (await world.who(token)).roles == (READ,)
    assert world.asked == 1


async def test_a_token_that_was_rotated_on_another_node_a_moment_ago_is_known(world: World) -> None:
    id_ = world.create(READ).split("_")[1]
    _, rotated, digest = make_token(id_)
    world.committed.append(RotateToken(id_, digest, old_until_ms=0))

    assert (await world.who(rotated)).id == id_


async def test_a_token_that_cannot_be_checked_for_want_of_a_majority_may_be_sent_again(world: World) -> None:
    world.down = True

    with pytest.raises(Unavailable, match="cannot check the token now"):
        await world.who("hf_abcdefghijkl_secret")


async def test_known_tokens_and_the_own_token_of_the_node_work_without_a_majority(world: World) -> None:
    token = world.create(READ)
    world.down = True

    assert (await world.who(token)).roles == (READ,)
    assert (await world.who(world.root)).roles == (ADMIN,)
    assert await world.refuses("hf_node_wrong")


def test_a_role_is_needed_and_a_token_for_some_services_is_for_no_other() -> None:
    operator = Principal("t1", "ops", (OPERATE,))
    caller = Principal("t2", "ci", (INVOKE,), frozenset({"trips"}))

    operator.check(READ)
    caller.check_service("trips")
    Principal("t3", "any", (INVOKE,)).check_service("other")
    with pytest.raises(Forbidden, match="has the roles operate, but this request needs admin"):
        operator.check(ADMIN)
    with pytest.raises(Forbidden, match="may invoke trips, but not other"):
        caller.check_service("other")
    with pytest.raises(Forbidden):
        operator.check_service("trips")


def test_the_own_token_of_a_node_is_made_once_in_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    first = open_root(Config(data=tmp_path))

    assert open_root(Config(data=tmp_path)) == first and first.startswith("hf_node_")
    assert (tmp_path / "admin-token").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["admin-token"]


def test_a_damaged_file_of_the_node_s_token_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "admin-token").touch()

    with pytest.raises(BadConfig, match="delete it, and the node creates a new one") as refused:
        open_root(Config(data=tmp_path))
    assert find_token_faults(Config(data=tmp_path, auth="tokens")) == [str(refused.value)]


@pytest.mark.parametrize("text", ["", "secret", "hf_node_short", "hf_other_" + "x" * 40, "hf_node_" + "x" * 200])
def test_an_invalid_configured_token_is_refused_with_the_expected_form(tmp_path: Path, text: str) -> None:
    file = tmp_path / "given"
    file.write_text(text)

    file.chmod(0o600)

    with pytest.raises(BadConfig, match="must hold a token as in hf_node_<secret>") as refused:
        open_root(Config(data=tmp_path, admin_token_file=file))
    assert find_token_faults(Config(data=tmp_path, auth="tokens", admin_token_file=file)) == [str(refused.value)]
    assert find_token_faults(Config(data=tmp_path, auth="off", admin_token_file=file)) == [], "it is not used"


async def test_a_given_token_is_accepted_instead_of_one_of_the_nodes_own(tmp_path: Path, world: World) -> None:
    file = tmp_path / "given"
    file.write_text(make_token(ROOT)[1] + "\n")
    root = open_root(Config(data=tmp_path, admin_token_file=file))

    access = Access(lambda: world.tokens, root=root, now_ms=lambda: 0, fresh=world.fresh)

    assert (await access.authenticate(f"Bearer {file.read_text()}")).roles == (ADMIN,)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def test_config_check_refuses_the_token_that_serve_refuses(tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text("hf_node_short")
    file.chmod(0o600)
    settings = tmp_path / "node.toml"
    settings.write_text(f'data = "{tmp_path / "data"}"\nauth = "tokens"\nadmin_token_file = "{file}"\n')

    done = CliRunner().invoke(main, ["config", "check", "--config", str(settings)])

    assert done.exit_code == 1 and "must hold a token as in hf_node_<secret>" in done.output
