"""The key pairs by which handlers recognise this cluster: how the first one is made, and how they are rotated.

The leader of the meta group makes the first pair as soon as every node supports it. From then on there is always one, so this
task ends. A rotation makes a second pair, which is valid beside the first one until an operator retires the older one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from holdfast.cluster.errors import Conflict
from holdfast.cluster.registry.registry import Registry
from holdfast.log.errors import ProposalError
from holdfast.sdk.signatures import KEY_BYTES, key_id
from holdfast.statemachine.identity import KEYS_MAX, AddIdentityKey, Identity, RetireIdentityKey

logger = logging.getLogger(__name__)

LEVEL: Final = 2  # From this one on the meta group has an identity.
AGAIN_S: Final = 0.5


class IdentityKeys:
    def __init__(self, registry: Registry, *, leads_meta: Callable[[], bool]) -> None:
        self._registry = registry
        self._leads_meta = leads_meta
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> Identity:
        return self._registry.state.identity

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        """Until the cluster has a key. Every node waits, because any of them may lead the meta group next."""
        while not self.state.keys:
            if self._leads_meta() and self._registry.state.level >= LEVEL:
                try:
                    await self._add()
                except (ProposalError, TimeoutError, Conflict) as error:
                    logger.debug("the cluster has no identity yet: %s", error)
            await asyncio.sleep(AGAIN_S)

    async def begin_rotation(self) -> None:
        """Raises Conflict."""
        if self._registry.state.level < LEVEL:
            raise Conflict(
                "an identity needs every node of the cluster to run this release",
                "upgrade the others; `holdfast cluster status` shows their versions",
            )
        if len(self.state.keys) >= KEYS_MAX:
            raise Conflict(
                "a rotation is under way: two keys are valid",
                "give all endpoints the new key, then `holdfast identity rotate --finish`",
            )
        await self._add()

    async def finish_rotation(self) -> None:
        """From now on only the newest key is valid. Raises Conflict."""
        if len(self.state.keys) < KEYS_MAX:
            raise Conflict("no rotation is under way: one key is valid", "`holdfast identity rotate` begins one")
        await self._propose(RetireIdentityKey(self.state.keys[0].id))

    async def _add(self) -> None:
        private = os.urandom(KEY_BYTES)
        public = Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
        await self._propose(AddIdentityKey(key_id(public), public, private, [key.id for key in self.state.keys]))

    async def _propose(self, command: AddIdentityKey | RetireIdentityKey) -> None:
        result = (await self._registry.propose(command)).result
        if result.code:
            raise Conflict(result.message, "`holdfast identity show` shows the keys as they are now")
