"""Durable agents of Pydantic AI: each model request and each tool call is a step.

    agent = Agent("openai:gpt-5", name="scout", capabilities=[HoldfastDurability()])

    @scout.handler
    async def ask(ctx: Context, question: str) -> str:
        return (await agent.run(question)).output

It is an engine for the framework's own interface (`pydantic_ai.durable_exec`). Outside of handlers it does nothing. Steps
have keys of run, turn, call and retry, so tools of one turn run in parallel, and an upgrade that changes the helper tasks
of the framework changes no keys. The names of agents and toolsets are in the journal: renaming one strands running
invocations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Literal

from pydantic_ai import RunContext, ToolDenied
from pydantic_ai.capabilities import WrapToolExecuteHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    DurabilityEngineSpec,
    DurableOperationBackend,
    DurableOperationId,
    JournalCallableOperationBackend,
    RoleBasedOperationConfig,
    ToolsetCallToolId,
    conversation_id_from_run_id,
)
from pydantic_ai.exceptions import AgentRunError, ModelHTTPError, ToolFailed, UserError
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.tools import AgentDepsT, DeferredToolRequests, DeferredToolResults, ToolApproved, ToolDefinition
from pydantic_core import PydanticSerializationError

from holdfast.ext.core import TOOL_RETRY, durable_call, keys_of, warn_of_thread
from holdfast.sdk import BadPayload, Context, RetriesExhausted, RetryPolicy, TerminalError, current_context
from holdfast.sdk.errors import fails_for_good
from holdfast.sdk.here import is_in_handler
from holdfast.sdk.scopes import current_scope
from holdfast.sdk.tools import is_durable_tool

# Everything that could differ is in the journal, so another attempt would end the same way.
fails_for_good(AgentRunError, code=502)
fails_for_good(UserError, code=500)

Approve = Callable[[Context, ToolCallPart], Awaitable[bool | ToolApproved | ToolDenied]]
Config = Mapping[str, Any]

#: Statuses of model providers that another try may change. Others fail the run at once.
RETRIED_STATUSES: Final = frozenset({408, 409, 425, 429})
_METADATA: Final = "holdfast"


@dataclass(init=False, kw_only=True)
class HoldfastDurability(BaseDurabilityCapability[AgentDepsT]):
    """Makes an agent durable in handlers. Pass it in `Agent(..., name="scout", capabilities=[HoldfastDurability()])`.

    `model_retry` and `tool_retry` say when failed steps are tried again. A tool that fails for good is reported to the
    model, and results of other tools are kept. `@agent.tool(metadata={"holdfast": {"retry": RetryPolicy(...)}})` changes
    it for one tool; `metadata={"holdfast": False}` and `@durable_tool` make its body handler code instead of a step.

    `approve` decides calls of tools with `requires_approval=True`. `inbox()` asks people, in the inbox of the cluster.
    A function of yours is handler code, and may wait for days::

        async def approve(ctx: Context, call: ToolCallPart) -> bool:
            return await ctx.call(policy.allows, call.args_as_dict())
    """

    engine_spec: ClassVar[DurabilityEngineSpec] = DurabilityEngineSpec(
        engine_name="Holdfast",
        durable_unit_noun="step",
        durable_container_noun="handler",
        codec=JSON_CODEC,
        serialization_failure=lambda error: BadPayload(str(error)),
        wrapped_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        tool_config_key=_METADATA,
    )

    def __init__(
        self,
        *,
        models: Mapping[str, Model] | None = None,
        name: str | None = None,
        model_retry: RetryPolicy | None = None,
        tool_retry: RetryPolicy = TOOL_RETRY,
        approve: Approve | None = None,
    ) -> None:
        super().__init__(models=models, name=name)
        self._model_retry = model_retry
        self._tool_retry = tool_retry
        self._approve = approve

    # -- the run

    @property
    def in_durable_context(self) -> bool:
        return is_in_handler()

    def get_default_run_id(self) -> str | None:
        context = current_context()
        if context is None:
            warn_of_thread(f"agent {self.name!r}")
            return None
        return keys_of(context).new_run(context, f"agent {self.name}")

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if is_in_handler() else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        context = current_context()
        return context.now() if context is not None else None

    # -- tools

    async def wrap_tool_execute(
        self,
        ctx: RunContext[AgentDepsT],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: WrapToolExecuteHandler,
    ) -> Any:
        context = current_context()
        if context is None:
            return await handler(args)
        keys = keys_of(context)
        with context.scope(keys.unique(_key_of(context, ctx, call.tool_call_id))) as scope:
            keys.tools.add(scope.path)
            return await handler(args)

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[AgentDepsT], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        context, approve = current_context(), self._approve
        if context is None or approve is None or not requests.approvals:
            return None

        async def decide(call: ToolCallPart) -> bool | ToolApproved | ToolDenied:
            with context.scope(keys_of(context).unique(_key_of(context, ctx, f"approve {call.tool_call_id}"))):
                return await approve(context, call)

        decisions = await asyncio.gather(*(decide(call) for call in requests.approvals))
        approvals = {call.tool_call_id: each for call, each in zip(requests.approvals, decisions, strict=True)}
        return DeferredToolResults(approvals=approvals)

    # -- the engine

    def get_durable_operation_backend(self) -> DurableOperationBackend[Config]:
        def resolve(operation: DurableOperationId, tool: Any, tool_name: str) -> Config | Literal[False]:
            if tool is not None and is_durable_tool(_function_of(tool)):
                return False
            config: Config | Literal[False] = self._build_resolve_tool_config({"retry": self._tool_retry})(
                tool, tool_name
            )
            if config is not False and (unknown := config.keys() - {"retry"}):
                raise UserError(
                    f"tool {tool_name!r}: {min(unknown)!r} is no option of metadata['holdfast'], only 'retry'"
                )
            return config

        return _Backend(
            agent_name=self.name,
            default_model_id=self.default_model_id,
            config=RoleBasedOperationConfig(
                model={"retry": self._model_retry},
                event={},
                capability={"retry": self._tool_retry},
                tool={"retry": self._tool_retry},
                resolve_tool=resolve,
            ),
        )


class _Backend(JournalCallableOperationBackend[Config]):
    """Runs each operation of the framework as a step."""

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: Config,
    ) -> object:
        context = current_context()
        if context is None:
            return await body()
        keys = keys_of(context)
        run: RunContext[Any] | None = next((each for each in cache_key if isinstance(each, RunContext)), None)
        is_call = isinstance(operation_id, ToolsetCallToolId)
        scope = current_scope()
        if is_call and scope is not None and scope.name in keys.tools:
            key = keys.unique("call")  # It is relative to the scope.
        elif run is not None:
            part = f"{run.tool_call_id}/{name}" if run.tool_call_id else name
            key = keys.unique(_key_of(context, run, part))
        else:
            key = keys.unique(name)

        async def step() -> object:
            try:
                return await body()
            except (UserError, PydanticSerializationError) as error:  # A mistake in the code of the agent.
                raise TerminalError(str(error), kind=type(error).__name__) from error
            except ModelHTTPError as error:
                if error.status_code < 500 and error.status_code not in RETRIED_STATUSES:
                    code = error.status_code if error.status_code >= 400 else 500
                    raise TerminalError(str(error), code=code, kind="ModelHTTPError") from error
                raise

        try:
            return await durable_call(name, step, key=key, retry=config.get("retry"))
        except RetriesExhausted as error:
            if not is_call:
                raise
            raise ToolFailed(f"The tool failed: {error.message}") from error


def inbox(
    *,
    assignee: str | None = None,
    timeout: float | timedelta | None = None,
    remind_after: float | timedelta | None = None,
    editable: bool = True,
) -> Approve:
    """Asks people about calls of tools: `HoldfastDurability(approve=inbox(assignee="finance", timeout=timedelta(days=2)))`.

    Each call is an approval with the arguments as its payload, which people may edit. The model is told of a call that
    they reject, with their comment, and of one that nobody decided before the timeout.
    """

    async def approve(ctx: Context, call: ToolCallPart) -> bool | ToolApproved | ToolDenied:
        decision = await ctx.approval(
            f"Call the tool {call.tool_name:.100}?",
            call.args_as_dict(),
            assignee=assignee,
            timeout=timeout,
            remind_after=remind_after,
            editable=editable,
        )
        if decision.timed_out:
            return ToolDenied("Nobody decided about the call in time.")
        if not decision.approved:
            return ToolDenied(decision.comment or "The call was rejected.")
        return ToolApproved(override_args=decision.payload) if decision.edited else True

    return approve


def _key_of(context: Context, run: RunContext[Any], part: str) -> str:
    """The key of a part of a run: run, turn and part."""
    return f"{keys_of(context).of_run(run.run_id or '')}/{run.run_step}/{part}" + (f"/{run.retry}" if run.retry else "")


def _function_of(tool: Any) -> object:
    """The function behind a tool of a toolset, if it is one."""
    tools = getattr(tool.toolset, "tools", {})
    found = tools.get(getattr(tool, "original_name", None) or tool.tool_def.name) if isinstance(tools, dict) else None
    return getattr(found, "function", None)
