// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import { MESSAGES, chat, collect, textOf } from "../target.mjs";

export async function a_chat_is_answered(target) {
  const answer = await chat(target);
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.model, target.model);
  assert.ok(answer.id);
  assert.ok(answer.created > 0);
  assert.equal(answer.choices.length, 1);
  const [choice] = answer.choices;
  assert.equal(choice.index, 0);
  assert.equal(choice.message.role, "assistant");
  assert.equal(typeof choice.message.content, "string");
  assert.ok(["stop", "length"].includes(choice.finish_reason));
}

export async function a_chat_counts_its_tokens(target) {
  const { usage } = await chat(target);
  const longer = await chat(target, { messages: [{ role: "user", content: "one two three ".repeat(4) }] });
  assert.ok(usage.completion_tokens > 0 && usage.completion_tokens <= 12);
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
  assert.ok(longer.usage.prompt_tokens > usage.prompt_tokens);
}

export async function a_chat_stream_has_the_role_first_and_one_end(target) {
  const chunks = await collect(chat(target, { stream: true }));
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.ok(chunks.every((chunk) => chunk.object === "chat.completion.chunk" && chunk.model === target.model));
  assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
  const reasons = chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.finish_reason);
  assert.ok(["stop", "length"].includes(reasons.at(-1)));
  assert.ok(reasons.slice(0, -1).every((reason) => reason === null));
  assert.ok(chunks.every((chunk) => chunk.usage == null));
}

export async function a_chat_stream_has_the_text_of_the_whole_answer(target) {
  const whole = await chat(target);
  assert.equal(textOf(await collect(chat(target, { stream: true }))), whole.choices[0].message.content);
}

export async function a_chat_stream_ends_with_usage_where_it_is_asked_for(target) {
  const whole = await chat(target);
  const chunks = await collect(chat(target, { stream: true, stream_options: { include_usage: true } }));
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.ok(chunks.slice(0, -1).every((chunk) => chunk.usage === null));
  assert.equal(chunks.at(-1).usage.prompt_tokens, whole.usage.prompt_tokens);
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
}

export async function a_chat_stream_may_be_left(target) {
  const stream = await chat(target, { stream: true, max_tokens: 200 });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break; // the client then aborts the request
  }
  assert.ok((await chat(target)).choices[0].finish_reason);
}

export async function a_system_message_and_turns_are_taken(target) {
  const messages = [
    { role: "system", content: "Be short." },
    { role: "user", content: "one" },
    { role: "assistant", content: "two" },
    { role: "user", content: "three" },
  ];
  const long = await chat(target, { messages });
  const short = await chat(target, { messages: messages.slice(-1) });
  assert.ok(long.usage.prompt_tokens > short.usage.prompt_tokens);
}

export async function a_developer_message_is_a_system_message(target) {
  const [one, other] = await Promise.all(
    ["system", "developer"].map((role) => chat(target, { messages: [{ role, content: "Be short." }, ...MESSAGES] })),
  );
  assert.equal(one.choices[0].message.content, other.choices[0].message.content);
  assert.equal(one.usage.prompt_tokens, other.usage.prompt_tokens);
}

export async function parts_of_text_are_a_text(target) {
  const parts = [{ role: "user", content: [{ type: "text", text: "one two three" }] }];
  const [one, other] = await Promise.all([chat(target), chat(target, { messages: parts })]);
  assert.equal(one.choices[0].message.content, other.choices[0].message.content);
  assert.deepEqual(one.usage, other.usage);
}
