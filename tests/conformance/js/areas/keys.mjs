// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import OpenAI from "openai";
import { chat, errorOf } from "../target.mjs";

export async function a_wrong_key_is_refused({ client, model }) {
  const wrong = client.withOptions({ apiKey: "sk-wrong" });
  const error = await errorOf(chat({ client: wrong, model }, { max_tokens: 1 }), OpenAI.AuthenticationError);
  assert.ok(!String(error).includes("sk-wrong"));
  await errorOf(wrong.models.list(), OpenAI.AuthenticationError);
  await errorOf(wrong.get("/no/such/route"), OpenAI.AuthenticationError);
}
