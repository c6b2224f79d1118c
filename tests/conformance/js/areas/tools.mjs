// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import { chat, collect } from "../target.mjs";

const MESSAGES = [{ role: "user", content: "Is it warm in Rome?" }];
const NAMES = ["get_weather", "get_time"];
const PARAMETERS = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const TOOLS = NAMES.map((name) => ({ type: "function", function: { name, parameters: PARAMETERS } }));
const ASKED = { messages: MESSAGES, tools: TOOLS, max_tokens: 200 };
const NAMED = { type: "function", function: { name: "get_time" } };

function checkCall(call, names) {
  assert.equal(call.type, "function");
  assert.ok(call.id);
  assert.ok(names.includes(call.function.name));
  assert.ok(["Rome", "Oslo"].includes(JSON.parse(call.function.arguments).city));
}

export async function required_tools_are_called(target) {
  const [choice] = (await chat(target, { ...ASKED, tool_choice: "required", parallel_tool_calls: false })).choices;
  assert.ok(["tool_calls", "stop"].includes(choice.finish_reason));
  assert.equal(choice.message.tool_calls.length, 1);
  checkCall(choice.message.tool_calls[0], NAMES);
}

export async function a_named_tool_is_called(target) {
  const [choice] = (await chat(target, { ...ASKED, tool_choice: NAMED })).choices;
  checkCall(choice.message.tool_calls[0], ["get_time"]);
  assert.ok(["stop", "tool_calls"].includes(choice.finish_reason));
}

export async function a_stream_has_the_call_in_pieces(target) {
  const whole = (await chat(target, { ...ASKED, tool_choice: NAMED })).choices[0].message.tool_calls[0];
  const chunks = await collect(chat(target, { ...ASKED, tool_choice: NAMED, stream: true }));
  const calls = chunks.flatMap((chunk) => chunk.choices).flatMap((choice) => choice.delta.tool_calls ?? []);
  const first = calls.filter((call) => call.index === 0);
  assert.deepEqual(first.map((call) => call.function?.name).filter(Boolean), ["get_time"]);
  assert.equal(first.filter((call) => call.id).length, 1);
  const text = first.map((call) => call.function?.arguments ?? "").join("");
  assert.deepEqual(JSON.parse(text), JSON.parse(whole.function.arguments));
}

export async function tools_that_may_be_called_do_no_harm(target) {
  for (const tool_choice of ["auto", "none"]) {
    const [choice] = (await chat(target, { ...ASKED, tool_choice, max_tokens: 12 })).choices;
    assert.ok(["stop", "length", "tool_calls"].includes(choice.finish_reason));
    if (tool_choice === "none") assert.equal(choice.message.tool_calls?.length ?? 0, 0);
  }
}

export async function a_tools_result_is_taken(target) {
  const call = { id: "call_1", type: "function", function: { name: "get_weather", arguments: '{"city": "Rome"}' } };
  const messages = [
    ...MESSAGES,
    { role: "assistant", content: null, tool_calls: [call] },
    { role: "tool", tool_call_id: "call_1", content: "warm" },
  ];
  const [choice] = (await chat(target, { ...ASKED, messages, max_tokens: 12 })).choices;
  assert.ok(["stop", "length", "tool_calls"].includes(choice.finish_reason));
}
