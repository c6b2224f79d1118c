// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import { chat, collect, complete } from "../target.mjs";

const FEW = { max_tokens: 6 };

function isLogprob(value) {
  return typeof value === "number" && Number.isFinite(value) && value <= 0;
}

export async function a_chat_has_the_logprobs_of_each_token(target) {
  const answer = await chat(target, { ...FEW, logprobs: true, top_logprobs: 3 });
  const { content } = answer.choices[0].logprobs;
  const count = answer.usage.completion_tokens;
  assert.ok([count, count - 1].includes(content.length));
  for (const entry of content) {
    assert.ok(isLogprob(entry.logprob));
    assert.equal(entry.top_logprobs.length, 3);
    const values = entry.top_logprobs.map((top) => top.logprob);
    assert.deepEqual(values, values.toSorted((a, b) => b - a));
    assert.equal(entry.logprob, values[0]); // the most likely token was taken
  }
}

export async function the_bytes_of_the_tokens_are_the_text(target) {
  const answer = await chat(target, { ...FEW, logprobs: true });
  const { content } = answer.choices[0].logprobs;
  const raw = Buffer.from(content.flatMap((entry) => entry.bytes ?? [])).toString("utf8");
  assert.ok(raw.startsWith(answer.choices[0].message.content.replace(/\ufffd+$/, "")));
  assert.ok(content.every((entry) => entry.top_logprobs.length === 0));
}

export async function a_chat_stream_has_the_same_logprobs(target) {
  const asked = { ...FEW, logprobs: true, top_logprobs: 2 };
  const whole = (await chat(target, asked)).choices[0].logprobs.content;
  const chunks = await collect(chat(target, { ...asked, stream: true }));
  const streamed = chunks.flatMap((chunk) => chunk.choices).flatMap((choice) => choice.logprobs?.content ?? []);
  assert.deepEqual(streamed.map((entry) => entry.token), whole.map((entry) => entry.token));
}

export async function without_the_field_a_chat_has_no_logprobs(target) {
  assert.equal((await chat(target, FEW)).choices[0].logprobs, null);
}

export async function a_completion_has_logprobs_in_columns(target) {
  const found = (await complete(target, { ...FEW, logprobs: 2 })).choices[0].logprobs;
  assert.ok(found.tokens.length > 0);
  for (const column of ["token_logprobs", "top_logprobs", "text_offset"]) {
    assert.equal(found[column].length, found.tokens.length);
  }
  assert.ok(found.token_logprobs.every(isLogprob));
  assert.deepEqual(found.text_offset, found.text_offset.toSorted((a, b) => a - b));
}

export async function an_echo_has_the_prompts_logprobs_and_none_for_its_first_token(target) {
  const answer = await complete(target, { ...FEW, logprobs: 1, echo: true });
  const { tokens, token_logprobs: values } = answer.choices[0].logprobs;
  assert.equal(values[0], null);
  assert.ok(values.slice(1).every(isLogprob));
  assert.ok(tokens.length >= answer.usage.prompt_tokens + 1);
}
