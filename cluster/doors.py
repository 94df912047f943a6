"""The two doors of a node that serves: the ingress for clients, and the admin API for operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from holdfast.cluster.admin.app import Admin, NodeAdmin
from holdfast.cluster.admin.approvals import ApprovalAdmin
from holdfast.cluster.admin.audit import AuditAdmin
from holdfast.cluster.admin.cluster import ClusterAdmin
from holdfast.cluster.admin.deployments import DeploymentAdmin
from holdfast.cluster.admin.events import EventAdmin
from holdfast.cluster.admin.healths import Healths
from holdfast.cluster.admin.identity import IdentityAdmin
from holdfast.cluster.admin.invocations import InvocationAdmin
from holdfast.cluster.admin.invoking import InvokingAdmin
from holdfast.cluster.admin.log_level import LogLevelAdmin
from holdfast.cluster.admin.logs import LogAdmin
from holdfast.cluster.admin.objects import ObjectAdmin
from holdfast.cluster.admin.overview import Overview
from holdfast.cluster.admin.pages import Pages
from holdfast.cluster.admin.pauses import PauseAdmin
from holdfast.cluster.admin.statistics import StatisticsAdmin
from holdfast.cluster.admin.tokens import TokenAdmin
from holdfast.cluster.admin.trees import TreeAdmin
from holdfast.cluster.admin.waiting import WaitingAdmin
from holdfast.cluster.admin.webhooks import WebhookAdmin
from holdfast.cluster.backup.metrics import of_backups
from holdfast.cluster.certificates import of_certificates
from holdfast.cluster.config import HostPort
from holdfast.cluster.ground import Ground
from holdfast.cluster.groups import META_GROUP
from holdfast.cluster.handlers.metrics import of_handlers
from holdfast.cluster.http import descriptors
from holdfast.cluster.http.access import Access, open_root, read_root
from holdfast.cluster.http.audit import Audit
from holdfast.cluster.http.exchange import Exchange
from holdfast.cluster.http.metrics import of_audit, of_doors, of_streams
from holdfast.cluster.http.not_serving import NotServing
from holdfast.cluster.http.server import HttpServer
from holdfast.cluster.http.sessions import Sessions
from holdfast.cluster.http.token_use import TokenUse
from holdfast.cluster.ingress.metrics import of_ingress
from holdfast.cluster.leading.metrics import of_webhooks
from holdfast.cluster.log_level import LogLevel
from holdfast.cluster.members.joining import Urls
from holdfast.cluster.members.metrics import of_members
from holdfast.cluster.observe.metrics import Metrics
from holdfast.cluster.observe.node_metrics import of_node, of_state
from holdfast.cluster.observe.starting import StartingMetrics, cannot_ask
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.partition.metrics import of_approvals, of_groups, of_log, of_partitions, of_queues
from holdfast.cluster.peers.metrics import of_links
from holdfast.cluster.registry.spread import Spread
from holdfast.cluster.routing.surveys import Surveys
from holdfast.cluster.routing.trees import Trees
from holdfast.cluster.serving import Serving
from holdfast.cluster.snapshotting.metrics import of_snapshots
from holdfast.cluster.sql.admin import SqlAdmin
from holdfast.cluster.sql.metrics import of_queries
from holdfast.cluster.sql.overviews import Overviews
from holdfast.cluster.sql.queries import Queries
from holdfast.cluster.sql.source import METHOD, Source
from holdfast.cluster.traces import of_traces
from holdfast.cluster.values.metrics import of_values
from holdfast.log.node import Group


class Doors:
    """One pair per node."""

    def __init__(self, ground: Ground, serving: Serving, state: Callable[[], str]) -> None:
        """`state`: of the node, one of `observe.node_metrics.STATES`."""
        self._config = config = ground.config
        registry, now_ms = ground.registry, ground.environment.clock.now_ms
        access = _open_access(ground)
        sessions = _open_sessions(ground, access)
        #: Reports to the cluster which tokens were used; None: there are no tokens.
        self.token_use = (
            TokenUse(access, lambda: registry.state.tokens, registry.propose) if access is not None else None
        )
        #: Records changes and their principals.
        self.audit = Audit(
            config.node, now_ms=now_ms, propose=registry.propose, is_open=lambda: registry.state.level >= 2
        )
        self.ingress = HttpServer(
            config.ingress,
            Exchange(config, serving.clients, source="ingress", access=access, audit=self.audit),
            connections_max=lambda: min(config.connections_max, descriptors.for_ingress()),
            per_address_max=config.connections_per_address_max,
            abandon=True,
            tls=ground.certificates.door("ingress"),
        )
        healths = _healths(ground)
        self._log_level = LogLevel(config.log_level)
        self.metrics = self._metrics(ground, serving, state)
        surveys, trees = Surveys(serving.reader), Trees(serving.reader)
        overview = _overview(ground, serving)
        self.queries = _queries(ground, serving, overview, healths)
        parts = [
            Pages(config, sessions),
            NodeAdmin(
                unhealthy=serving.health.unhealthy, warnings=serving.health.warnings, metrics=self.metrics.scrape
            ),
            DeploymentAdmin(registry, serving.reader, healths),
            ObjectAdmin(registry, serving.router, serving.reader, surveys),
            InvocationAdmin(registry, serving.router, serving.reader, trees, healths=healths, now_ms=now_ms),
            InvokingAdmin(serving.clients),
            TreeAdmin(serving.reader, trees),
            StatisticsAdmin(serving.reader, serving.approvals, now_ms),
            WaitingAdmin(surveys),
            ApprovalAdmin(serving.approvals, now_ms),
            ClusterAdmin(
                config,
                serving.router,
                serving.operations,
                cluster=overview.show,
                snapshots=ground.snapshots,
                backups=serving.backups,
            ),
            EventAdmin(config.node, serving.feed),
            TokenAdmin(registry, now_ms),
            AuditAdmin(registry, self.audit, now_ms),
            IdentityAdmin(serving.identity),
            SqlAdmin(self.queries),
            PauseAdmin(registry, Spread(config.node, ground.meta, ground.rpc, connected=ground.log.connected)),
            LogLevelAdmin(config.node, self._log_level, now_ms),
            LogAdmin(config.node, ground.logs, now_ms),
            WebhookAdmin(registry, serving.courier, serving.farings, entropy=ground.environment.entropy, now_ms=now_ms),
        ]
        admin = Admin(parts, removed=lambda: ground.removal.why)
        self.admin = HttpServer(
            config.admin,
            Exchange(config, admin, source="admin", access=access, audit=self.audit, sessions=sessions),
            connections_max=descriptors.for_admin,
            per_address_max=config.connections_per_address_max,
            abandon=False,
            tls=ground.certificates.door("admin"),
        )

    def _metrics(self, ground: Ground, serving: Serving, state: Callable[[], str]) -> Metrics:
        """The metrics of every room."""

        def partitions() -> list[Partition]:
            return [partition for _, partition in sorted(ground.replicas.hosted.items())]

        def groups() -> list[tuple[str, Group]]:
            numbered = [(str(partition.number), partition.group) for partition in partitions()]
            return [("meta", ground.log.group(META_GROUP)), *numbered]

        return Metrics(
            serving.reader.statistics_here,
            lambda: of_state(state()),
            *_early_rooms(ground),
            lambda: of_members(ground.meta.state.membership, serving.handover),
            lambda: of_partitions(partitions()),
            lambda: of_queues(partitions()),
            lambda: of_approvals(partitions()),
            lambda: of_groups(groups()),
            lambda: of_snapshots(ground.snapshots),
            lambda: of_backups(serving.backups.newest),
            lambda: of_handlers(ground.invoker),
            lambda: of_values(ground.stager, ground.objects),
            lambda: of_ingress(serving.clients, self.ingress),
            lambda: of_doors([self.ingress.exchange, self.admin.exchange]),
            lambda: of_audit(self.audit),
            lambda: of_queries(self.queries),
            lambda: of_streams(self.ingress.exchange, self.admin.exchange),
            lambda: of_webhooks(serving.farings),
            lambda: of_traces(ground.tracer),
        )

    async def open(self, not_serving: NotServing) -> None:
        """Take over the sockets of the listeners that answered until now. Raises OSError."""
        if self.token_use is not None:
            self.token_use.start()
        self.audit.start()
        await self.admin.start(not_serving.relieve("admin"))
        await self.ingress.start(not_serving.relieve("ingress"))

    def refuse(self, why: str) -> None:
        """Refuse requests, because this node was removed: they would wait for nodes that no longer talk to it."""
        self.ingress.refuse(why)
        self.admin.leave()

    def leave(self) -> None:
        """Accept no new connections."""
        self.ingress.leave()
        self.admin.leave()

    async def stop(self, finish_s: float) -> None:
        """Answer the requests that can be answered in that time, and close."""
        await self.ingress.finish(finish_s)
        await self.ingress.stop()
        self.queries.stop()
        await self.admin.stop()
        if self.token_use is not None:
            await self.token_use.stop()
        await self.audit.stop()
        self._log_level.revert()

    @property
    def urls(self) -> Urls:
        config = self._config
        return Urls(_url(config.ingress, self.ingress), _url(config.admin, self.admin))


def early_metrics(ground: Ground, state: Callable[[], str]) -> StartingMetrics:
    """The metrics of a node that has not joined yet."""

    def access() -> Access | None:
        config = ground.config
        if config.auth != "tokens":
            return None
        root = read_root(config) or ""  # Empty: the node has yet to make one. It matches no token.
        now_ms = ground.environment.clock.now_ms
        return Access(lambda: ground.meta.state.tokens, root=root, now_ms=now_ms, fresh=cannot_ask)

    return StartingMetrics(state, access, *_early_rooms(ground))


def _early_rooms(ground: Ground) -> tuple[Callable[[], Iterable[Metric]], ...]:
    """What exists from the start."""
    return (
        lambda: of_node(ground.config, ground.watchdog, ground.environment.clock.now_ms),
        lambda: of_certificates(ground.certificates),
        lambda: of_log(ground.log),
        lambda: of_links(ground.log),
    )


def _open_access(ground: Ground) -> Access | None:
    if ground.config.auth != "tokens":
        return None
    return Access(
        lambda: ground.meta.state.tokens,
        root=open_root(ground.config),
        now_ms=ground.environment.clock.now_ms,
        fresh=ground.meta_log.known,
    )


def _open_sessions(ground: Ground, access: Access | None) -> Sessions | None:
    if access is None:
        return None

    def tell_signed_out(ended: list[Any]) -> None:
        for peer in ground.log.connected():
            ground.rpc.tell(peer, "signed_out", ended)

    sessions = Sessions(
        access,
        cluster=ground.config.cluster,
        secret=ground.config.secret,
        lifetime_s=ground.config.session_lifetime,
        now_ms=ground.environment.clock.now_ms,
        secure=ground.config.admin_tls_cert is not None,
        tell=tell_signed_out,
    )
    ground.rpc.listen("signed_out", lambda peer, ended: sessions.note_ended(ended))
    return sessions


def _overview(ground: Ground, serving: Serving) -> Overview:
    return Overview(
        config=ground.config,
        log=ground.log,
        meta=ground.meta,
        meta_log=ground.meta_log,
        founding=ground.record.founding,
        router=serving.router,
        hosted=ground.replicas.hosted,
        controller=serving.controller,
        handover=serving.handover,
        operations=serving.operations,
        releases=ground.releases,
        vitals=ground.vitals,
        snapshots=ground.snapshots,
        objects=ground.objects,
    )


def _healths(ground: Ground) -> Healths:
    config = ground.config
    open_to_all = bool(config.deployment_addresses.entries) or config.auth != "tokens"
    return Healths(ground.healths.everywhere, open_to_all=open_to_all)


def _queries(ground: Ground, serving: Serving, overview: Overview, healths: Healths) -> Queries:
    source = Source(
        ground.record.partitions,
        ground.replicas.hosted,
        fresh=serving.router.fresh,
        elsewhere=serving.router.ask_replica,
        overview=Overviews(ground.registry, serving.reader, healths, partial(overview.show, reasons=False)).rows,
        level=lambda: ground.meta.state.level,
    )
    ground.rpc.serve(METHOD, source.serve)
    return Queries(source, now_ms=ground.environment.clock.now_ms)


def _url(place: HostPort, server: HttpServer) -> str:
    """The URL of an address that users can type; the wildcard address is replaced."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(place.host, place.host)
    return f"{server.scheme}://[{host}]:{server.port}" if ":" in host else f"{server.scheme}://{host}:{server.port}"
