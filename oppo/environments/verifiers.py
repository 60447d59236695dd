"""Tasksets of verifiers: their tasks as rows of data, and the agent that runs a task and returns its reward.

::

    task -> Chat -> verifiers' server, which records the trace -> the policy's server
    task <- the trace, which its @vf.reward methods score
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from pydantic import ValidationError

from oppo.errors import ConfigError, contained, shown
from oppo.libraries import require
from oppo.user_code import SPEC, is_of_a_file, load_function


def verifiers(taskset: str, /, **config: object) -> list[dict[str, object]]:
    """Return the tasks of a taskset as rows, for :class:`TaskAgent`.

    Args:
        taskset: an installed one, as ``gsm8k``, or ``file.py:Class``.
        config: fields of its config.

    Raises:
        ConfigError: the extra ``verifiers`` is not installed, there is no such taskset, or its tasks cannot be run
            here: each chats and calls tools of a server, in no container.
    """
    kind, settings = _taskset(taskset, config)
    what = f"the taskset {taskset!r} of verifiers"
    if kind.task_type().NEEDS_CONTAINER:
        raise ConfigError(f"{what} has tasks that need a container, and none is started: name another taskset")
    with contained(lambda words: ConfigError(f"{what} cannot be loaded: {words}"), passing=ConfigError):
        found = kind(settings)
        if not found.bounded:
            raise ConfigError(f"{what} has tasks without end, and rows are read at once: name one that ends")
        rows: list[dict[str, object]] = [
            {
                "taskset": taskset,
                "config": {**config},
                "task": task.data.model_dump(mode="json", exclude_defaults=True),
            }
            for task in found
        ]
        for row in rows:
            task = _task(kind, settings, row)
            if unfit := _unfit(task.data):
                raise ConfigError(f"task {task.data.idx} of {what} {unfit}")
        if not rows:
            raise ConfigError(f"{what} has no task")
        if not (task.hooks("reward") or task.config.judges):
            raise ConfigError(f"{what} rewards nothing: its tasks, {type(task).__name__}, have no @vf.reward")
        tools = (*task.toolsets(task.config), *kind.toolsets(settings))
        if lost := [each for each in tools if not each.config.url and is_of_a_file(type(each))]:
            raise ConfigError(
                f"{what} has tools, {type(lost[0]).__name__}, that verifiers starts as a module, and a file named by "
                "its path is none: install it, or put its folder on PYTHONPATH and name the module"
            )
    return rows


def _unfit(data: Any) -> str:
    messages = data.prompt if isinstance(data.prompt, list) else ()
    parts = [part for each in messages if isinstance(each.content, list) for part in each.content]
    faults = {
        f"needs the image {data.image!r}, and no container is started": data.image is not None,
        "limits the network, which takes a container": "*" not in data.network_allow or bool(data.network_block),
        f"runs as the user {data.agent_user!r}, which takes a container": data.agent_user is not None,
        "has skills, for programs that run code": bool(data.skills),
        "shows the policy other than text": any(part.type != "text" for part in parts),
        "has no prompt: a user opens the conversation, and there is none": data.prompt is None,
    }
    return next((fault for fault, holds in faults.items() if holds), "")


def _taskset(taskset: str, config: Mapping[str, object]) -> tuple[Any, Any]:
    require("verifiers", "a taskset of verifiers")
    import verifiers.v1 as vf  # noqa: PLC0415 - an extra
    from verifiers.v1.utils import generic, loaders  # noqa: PLC0415

    what = f"the taskset {taskset!r} of verifiers"
    if SPEC.match(taskset):
        kind: Any = load_function(taskset, ConfigError)
        if not (isinstance(kind, type) and issubclass(kind, vf.Taskset)):
            raise ConfigError(f"{taskset} is no vf.Taskset but {shown(kind)}")
        named = {}
    else:
        advice = "install it, or name the class of a file, as verifiers:sums.py:SumsTaskset"
        with contained(lambda words: ConfigError(f"{what} cannot be imported: {words}; {advice}")):
            kind = loaders.taskset_class(taskset)
            environment, harness = loaders.environment_class(taskset), loaders.default_harness_id(taskset)
        if environment is not vf.SingleAgentEnv or harness == taskset:
            own = "a harness" if environment is vf.SingleAgentEnv else f"an environment, {environment.__name__},"
            raise ConfigError(
                f"{what} brings {own} that runs its tasks, which an agent that chats does here: name another"
            )
        named = {"id": taskset}
    fields: Any = generic.concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    try:
        return kind, fields(**named, **config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        known = ", ".join(name for name in fields.model_fields if name != "id")
        raise ConfigError(
            f"{what} does not take {'.'.join(map(str, first['loc']))} = {shown(first['input'])}: {first['msg']}; "
            f"the fields of its config are {known}"
        ) from error


def _task(kind: Any, settings: Any, row: Mapping[str, Any]) -> Any:
    # As verifiers' own servers make tasks of what they are sent.
    made = kind.task_type()
    return made(made.data_type().model_validate(row["task"]), settings.task)


class TaskAgent:
    """An agent, for :class:`oppo.agents.Agents`, that runs the task of a row and returns its reward.

    It chats, and calls the tools of the task and of its taskset, until the policy calls none.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[Any, Any]] = {}

    async def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> float:
        if lacks := [name for name in ("taskset", "config", "task") if name not in row]:
            raise ValueError(f"expected a row of oppo.environments.verifiers(), got one without {lacks[0]!r}")
        import verifiers.v1 as vf  # noqa: PLC0415 - an extra
        from verifiers.v1.interception import requires_tunnel  # noqa: PLC0415
        from verifiers.v1.mcp import serve_shared  # noqa: PLC0415

        chat, relay = _parts()
        key = json.dumps([row["taskset"], row["config"]], default=repr)
        if key not in self._kinds:  # its file may change during the run
            self._kinds[key] = _taskset(row["taskset"], row["config"])
        kind, settings = self._kinds[key]
        task = _task(kind, settings, row)
        async with serve_shared(kind.toolsets(settings)) as shared:
            tunnels = requires_tunnel(True, [each.config for each in task.toolsets(task.config)], shared.values())
            secrets = [each.state_secret for each in shared.values() if each.state_secret]
            async with relay(api_key, requires_tunnel=tunnels, state_service_secrets=secrets) as server:
                client = vf.EvalClientConfig(base_url=base_url, api_key_var="")
                agent = vf.Agent(
                    vf.AgentConfig(model="policy", client=client, runtime=vf.SubprocessConfig()), interception=server
                )
                agent.harness = chat(vf.HarnessConfig(id="chat"))
                trace = await agent.run(task, tools=shared)
        if not trace.ok:
            raise RuntimeError(f"{trace.last_error.type}: {trace.last_error.message}")
        return float(trace.reward)


@cache
def _parts() -> tuple[type[Any], type[Any]]:
    import verifiers.v1 as vf  # noqa: PLC0415 - an extra, whose classes are the bases of these
    from openai import APIStatusError, AsyncOpenAI  # noqa: PLC0415
    from verifiers.v1.dialects.chat import message_to_wire  # noqa: PLC0415
    from verifiers.v1.harnesses.utils.compaction import is_context_overflow  # noqa: PLC0415
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # noqa: PLC0415
    from verifiers.v1.interception import InterceptionServer  # noqa: PLC0415

    class Chat(vf.Harness[vf.HarnessConfig]):
        # On the event loop of the run: verifiers' own harnesses start a process each.
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(  # noqa: PLR0917 - verifiers says how it is called
            self,
            ctx: vf.ModelContext,
            trace: vf.Trace,  # noqa: ARG002
            runtime: vf.Runtime,  # noqa: ARG002
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: vf.TaskData,
        ) -> vf.ProgramResult:
            system, prompt = self.resolve_prompt(data)
            said: list[Any] = [{"role": "system", "content": system}] if system else []
            said += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            async with (
                AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client,
                AsyncExitStack() as stack,
            ):
                tools, names, opened = await connect_mcp({"mcpServers": servers}, stack)
                shows: dict[str, Any] = {"tools": tools} if tools else {}
                calls: Any = True
                while calls:
                    try:
                        reply = await client.chat.completions.create(model=ctx.model, messages=said, **shows)
                    except APIStatusError as error:
                        if is_context_overflow(error):
                            break
                        raise
                    message = reply.choices[0].message
                    said.append(message.model_dump(exclude_none=True))
                    calls = message.tool_calls
                    for call in calls or ():
                        name, arguments = call.function.name, json.loads(call.function.arguments or "{}")
                        known = name in names
                        answer = await call_mcp(opened, names, name, arguments) if known else f"error: no tool {name!r}"
                        said.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    class Relay(InterceptionServer):
        def __init__(self, key: str, **others: object) -> None:
            super().__init__(**others)
            self._key = key

        def register(self, session: Any) -> tuple[str, str]:
            found: tuple[str, str] = super().register(session)
            session.client.api_key = self._key  # the library takes keys from the environment, which all rollouts share
            return found

    return Chat, Relay
