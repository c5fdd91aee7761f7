"""Does the AI SDK (opencode, many apps) complete a two-turn tool task? Under node, with packages from npm."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine
from tests.runtime.test_http_messages import CALLS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here"),
]
PACKAGES = ("ai@6", "@ai-sdk/openai-compatible@2", "zod@4")
PROGRAM = """
import { streamText, tool, stepCountIs } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { z } from 'zod';
const provider = createOpenAICompatible({ name: 'strata', baseURL: process.argv[2] + '/v1', includeUsage: true });
const result = streamText({
  model: provider('tiny'),
  prompt: 'How is the weather?',
  tools: {
    weather: tool({
      description: 'd', inputSchema: z.object({ city: z.string() }), execute: async ({ city }) => city + ': sunny',
    }),
    now: tool({ description: 'd', inputSchema: z.object({}), execute: async () => 'noon' }),
  },
  stopWhen: stepCountIs(3),
});
const parts = [];
for await (const part of result.fullStream) if (part.type === 'error') parts.push(String(part.error));
const steps = (await result.steps).map((step) => ({
  text: step.text, reasoning: step.reasoningText, finish: step.finishReason, usage: step.usage,
  calls: step.toolCalls.map((call) => ({ name: call.toolName, input: call.input, id: call.toolCallId })),
}));
console.log(JSON.stringify({ steps, errors: parts }));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ai_sdk")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    (folder / "task.mjs").write_text(PROGRAM)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", *PACKAGES], cwd=folder, check=True, capture_output=True
    )
    return folder


def test_a_two_turn_tool_task(folder: Path, scripted: tuple[Client, ScriptedEngine]) -> None:
    server, engine = scripted
    engine.requests.clear()
    engine.script = [f"Two tools.</think>\n\n{CALLS}", "Good.</think>\n\nIt is sunny at noon."]
    done = subprocess.run(
        ["node", "task.mjs", server.url], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    first, second = told["steps"]
    assert not told["errors"] and (first["finish"], second["finish"]) == ("tool-calls", "stop")
    assert (first["reasoning"], second["reasoning"]) == ("Two tools.", "Good.")
    assert [(call["name"], call["input"]) for call in first["calls"]] == [
        ("weather", {"city": "Paris"}),
        ("now", {}),
    ]
    assert len({call["id"] for call in first["calls"]}) == 2
    assert (first["text"], second["text"]) == ("", "It is sunny at noon.")
    assert second["usage"]["inputTokens"] > first["usage"]["inputTokens"] > 0
    prompt = bytes(i for i in engine.requests[1].prompt_token_ids if i < 256).decode(errors="replace")
    assert "Paris: sunny" in prompt and "noon" in prompt
