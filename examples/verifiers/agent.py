"""A taskset of verifiers as the agent of a run: ``pip install 'oppo[agents]' verifiers``, then this file.

::

    python examples/verifiers/agent.py [SECTION.KEY=VALUE ...]
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

import oppo

TASKSET = "sums"  # any that is installed, or beside this file
TASKS = list(vf.load_taskset(vf.taskset_config_type(TASKSET)(id=TASKSET)))


class Chat(vf.Harness[vf.HarnessConfig]):
    """Chats, and calls the tools of a task, on the event loop of the run: verifiers' own start a process each."""

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
        """Return once the policy calls no tool, or the response is full."""
        system, prompt = self.resolve_prompt(data)
        chat: list[Any] = [{"role": "system", "content": system}] if system else []
        chat += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client, AsyncExitStack() as stack:
            tools, names, opened = await connect_mcp({"mcpServers": servers}, stack)
            shown = {"tools": tools} if tools else {}
            calls: Any = True
            while calls:
                try:
                    reply = await client.chat.completions.create(model=ctx.model, messages=chat, **shown)
                except openai.APIStatusError as error:
                    if is_context_overflow(error):
                        break
                    raise
                message = reply.choices[0].message
                chat.append(message.model_dump(exclude_none=True))
                calls = message.tool_calls
                for call in calls or ():
                    name, arguments = call.function.name, json.loads(call.function.arguments)
                    known = name in names
                    answer = await call_mcp(opened, names, name, arguments) if known else f"error: no tool {name!r}"
                    chat.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return the reward of a task's trace."""
    variable = f"{api_key}-API_KEY"  # verifiers takes keys from the environment, and keeps such names from programs
    os.environ[variable] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
    try:
        agent = vf.Agent(vf.AgentConfig(model="policy", client=client, runtime=vf.SubprocessConfig()))
        agent.harness = Chat(vf.HarnessConfig(id="chat"))
        trace = await agent.run(TASKS[row["idx"]])
    finally:
        del os.environ[variable]
    if not trace.ok:
        raise RuntimeError(f"{trace.last_error.type}: {trace.last_error.message}")
    return float(trace.reward)


if __name__ == "__main__":
    rows = [{"idx": each.data.idx} for each in TASKS]
    oppo.train(Path(__file__).with_name("config.toml"), sys.argv[1:], prompts=rows)
