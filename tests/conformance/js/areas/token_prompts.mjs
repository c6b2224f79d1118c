// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import { complete } from "../target.mjs";

export async function token_ids_are_a_prompt(target) {
  const answer = await complete(target, { prompt: [5, 6, 7], max_tokens: 2 });
  assert.equal(answer.usage.prompt_tokens, 3);
}

export async function lists_of_token_ids_are_several_prompts(target) {
  const answer = await complete(target, { prompt: [[5, 6, 7], [8]], max_tokens: 2 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  assert.equal(answer.usage.prompt_tokens, 4);
}
