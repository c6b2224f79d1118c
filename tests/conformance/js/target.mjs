// SPDX-License-Identifier: MIT OR Apache-2.0
// The server that is checked, and what many checks do: collect a stream, wait for an error.

import assert from "node:assert/strict";
import OpenAI from "openai";

export const MESSAGES = [{ role: "user", content: "one two three" }];

/** A check has nothing to look at in this server's answers. */
export class NotApplicable extends Error {}

/** A client that never asks twice, and what it asks for. */
export function makeTarget(baseURL, model, missing) {
  const client = new OpenAI({ baseURL, maxRetries: 0, timeout: 120_000 });
  return { client, model, missing };
}

/** A chat of `MESSAGES` with further fields. */
export function chat({ client, model }, fields) {
  return client.chat.completions.create({ model, messages: MESSAGES, temperature: 0, max_tokens: 12, ...fields });
}

/** A completion with further fields. */
export function complete({ client, model }, fields) {
  return client.completions.create({ model, prompt: "one two", temperature: 0, max_tokens: 8, ...fields });
}

/** All chunks of a stream that is promised. */
export async function collect(promise) {
  const chunks = [];
  for await (const chunk of await promise) chunks.push(chunk);
  return chunks;
}

/** The text that the chunks of a chat have for one choice. */
export function textOf(chunks, index = 0) {
  const choices = chunks.flatMap((chunk) => chunk.choices).filter((choice) => choice.index === index);
  return choices.map((choice) => choice.delta.content ?? "").join("");
}

/** The error of class `kind` with which `promise` fails. */
export async function errorOf(promise, kind) {
  let found;
  await assert.rejects(promise, (error) => {
    found = error;
    return error instanceof kind;
  });
  return found;
}
