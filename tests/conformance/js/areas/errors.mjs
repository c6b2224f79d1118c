// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import OpenAI from "openai";
import { chat, errorOf } from "../target.mjs";

const WRONG = [
  { temperature: -1 },
  { temperature: "warm" },
  { top_p: 7 },
  { n: 0 },
  { max_tokens: -5 },
  { logit_bias: { 5: 1000 } },
  { messages: [] },
  { messages: "hello" },
  { messages: [{ role: "nobody", content: "one" }] },
  { top_logprobs: 2 },
  { response_format: { type: "xml" } },
  { tool_choice: "always" },
];

export async function a_wrong_field_is_a_bad_request_that_says_what_is_wrong(target) {
  for (const wrong of WRONG) {
    const error = await errorOf(chat(target, { max_tokens: 1, ...wrong }), OpenAI.BadRequestError);
    for (const name of ["message", "type", "param", "code"]) assert.ok(name in error.error, JSON.stringify(wrong));
    assert.ok(error.error.message, JSON.stringify(wrong));
  }
  assert.ok((await chat(target, { max_tokens: 1 })).choices.length > 0);
}

export async function a_wrong_stream_is_a_bad_request_before_it_begins(target) {
  await errorOf(chat(target, { stream: true, temperature: -1 }), OpenAI.BadRequestError);
}

export async function a_prompt_that_is_too_long_is_a_bad_request_with_its_code(target) {
  const messages = [{ role: "user", content: "one two ".repeat(500_000) }];
  const error = await errorOf(chat(target, { messages, max_tokens: 1 }), OpenAI.BadRequestError);
  assert.equal(error.code, "context_length_exceeded");
}

export async function another_model_is_not_found(target) {
  const error = await errorOf(chat(target, { model: "no-such-model" }), OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
}

export async function another_route_is_not_found({ client }) {
  await errorOf(client.get("/no/such/route"), OpenAI.NotFoundError);
}

export async function another_method_is_an_error_of_status_405({ client }) {
  const error = await errorOf(client.delete("/chat/completions"), OpenAI.APIError);
  assert.equal(error.status, 405);
  assert.ok(error.error.message);
}

export async function every_answer_has_a_request_id(target) {
  const answer = await chat(target, { max_tokens: 1 });
  assert.ok(answer._request_id);
  const error = await errorOf(chat(target, { temperature: -1 }), OpenAI.BadRequestError);
  assert.ok(error.requestID);
  assert.notEqual(error.requestID, answer._request_id);
}
