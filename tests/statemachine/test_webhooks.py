"""Webhooks in the meta group: their bound, their versions, and that nothing prints their secrets."""

from __future__ import annotations

from holdfast.sdk.ids import NodeId
from holdfast.statemachine import meta
from holdfast.statemachine.meta import MetaState, Proposal, RestoreCluster
from holdfast.statemachine.webhooks import HOOKS_MAX, CreateWebhook, DeleteWebhook, HookId, Webhooks

HOOK = CreateWebhook(HookId(b"8 bytes!"), "https://alerts.example/path-secret", 1, ["shop"], "whsec_SECRET", "ada")


def test_each_change_is_a_newer_version() -> None:
    made = Webhooks()

    versions = [made.version]
    made.create(HOOK, 5)
    versions.append(made.version)
    made.create(HOOK._replace(id=HookId(b"another.")), 5)
    versions.append(made.version)
    made.delete(DeleteWebhook(HOOK.id), 2)
    versions.append(made.version)

    assert versions == sorted(set(versions)) and list(made.by_id) == [b"another."]


def test_ids_are_taken_once_and_the_number_of_webhooks_is_bounded() -> None:
    made = Webhooks()
    codes = [
        made.create(HOOK._replace(id=HookId(number.to_bytes(8, "big"))), 1).code for number in range(HOOKS_MAX + 1)
    ]

    assert codes == [0] * HOOKS_MAX + [507]
    assert made.create(HOOK._replace(id=HookId(bytes(8))), 1).code == 409
    assert made.create(HOOK._replace(id=HookId(b"short")), 1).code == 409
    assert made.delete(DeleteWebhook(HookId(b"unknown.")), 1).code == 404


def test_nothing_that_is_printed_has_the_secret_or_the_path() -> None:
    made = Webhooks()
    made.create(HOOK, 1)

    for text in (repr(HOOK), str(made.by_id), f"{Proposal(b'', 1, 1, HOOK)}"):
        assert "SECRET" not in text and "path-secret" not in text


def test_a_webhook_survives_the_log_and_a_cluster_from_a_backup_has_none_but_a_newer_version() -> None:
    state = MetaState()
    meta.apply(state, 50, meta.decode(meta.encode(Proposal(b"o", 1, 50, HOOK))).command)
    assert state.webhooks.by_id[HOOK.id].secret == "whsec_SECRET" and state.webhooks.version == 50

    restored = meta.decode_state(meta.encode_state(state))
    meta.apply(restored, 100, RestoreCluster("c", [[NodeId("n1")]], 1, {}, {}, 2))

    assert not restored.webhooks.by_id and restored.webhooks.version == 100
