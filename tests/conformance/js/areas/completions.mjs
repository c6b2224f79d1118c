// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import { collect, complete } from "../target.mjs";

export async function a_prompt_is_completed(target) {
  const answer = await complete(target);
  assert.equal(answer.object, "text_completion");
  assert.equal(answer.model, target.model);
  assert.equal(answer.choices.length, 1);
  const [choice] = answer.choices;
  assert.equal(choice.index, 0);
  assert.equal(choice.logprobs, null);
  assert.ok(["stop", "length"].includes(choice.finish_reason));
  assert.ok(answer.usage.completion_tokens > 0 && answer.usage.completion_tokens <= 8);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
}

export async function a_completion_stream_has_the_text_of_the_whole_answer(target) {
  const whole = await complete(target);
  const chunks = await collect(complete(target, { stream: true, stream_options: { include_usage: true } }));
  const text = chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.text).join("");
  assert.equal(text, whole.choices[0].text);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
}

export async function several_prompts_are_completed_in_order(target) {
  const prompts = ["one", "two two", "three three three"];
  const together = await complete(target, { prompt: prompts });
  const alone = await Promise.all(prompts.map((prompt) => complete(target, { prompt })));
  assert.deepEqual(together.choices.map((choice) => choice.index), [0, 1, 2]);
  assert.deepEqual(
    together.choices.map((choice) => choice.text),
    alone.map((answer) => answer.choices[0].text),
  );
  const counts = alone.map((answer) => answer.usage.prompt_tokens);
  assert.equal(together.usage.prompt_tokens, counts[0] + counts[1] + counts[2]);
}

export async function several_prompts_of_several_choices_are_numbered_through(target) {
  const answer = await complete(target, { prompt: ["one", "two"], n: 2, max_tokens: 2, temperature: 1 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
}

export async function an_echo_begins_with_the_prompt(target) {
  const [echo, plain] = await Promise.all([complete(target, { echo: true }), complete(target)]);
  assert.equal(echo.choices[0].text, "one two" + plain.choices[0].text);
}
