// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import { NotApplicable, chat, collect, textOf } from "../target.mjs";

export async function n_choices_are_numbered(target) {
  const answer = await chat(target, { n: 3, max_tokens: 4, temperature: 1 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2]);
  assert.ok(answer.choices.every((choice) => choice.finish_reason));
  assert.ok(answer.usage.completion_tokens >= 3 && answer.usage.completion_tokens <= 12);
}

export async function n_choices_of_a_stream_have_a_role_and_an_end_each(target) {
  const whole = await chat(target, { max_tokens: 4 });
  const chunks = await collect(chat(target, { n: 2, max_tokens: 4, stream: true }));
  for (const index of [0, 1]) {
    const choices = chunks.flatMap((chunk) => chunk.choices).filter((choice) => choice.index === index);
    assert.equal(choices[0].delta.role, "assistant");
    const reasons = choices.map((choice) => choice.finish_reason).filter(Boolean);
    assert.deepEqual(reasons, [choices.at(-1).finish_reason]);
    assert.equal(textOf(chunks, index), whole.choices[0].message.content);
  }
}

export async function the_same_seed_gives_the_same_answer(target) {
  const answers = await Promise.all([1, 2, 3].map(() => chat(target, { seed: 7, temperature: 1, max_tokens: 8 })));
  assert.equal(new Set(answers.map((answer) => answer.choices[0].message.content)).size, 1);
}

export async function a_stop_text_ends_the_answer_before_itself(target) {
  const text = (await chat(target, { max_tokens: 24 })).choices[0].message.content;
  const clean = [...text.split("\ufffd")[0]]; // what is no whole character is no text to stop at
  if (clean.length < 3) throw new NotApplicable(`the answer ${JSON.stringify(text)} has no text to stop at`);
  const stop = clean.slice(Math.floor(clean.length / 2)).slice(0, 2).join("");
  const whole = (await chat(target, { max_tokens: 24, stop: [stop] })).choices[0];
  const chunks = await collect(chat(target, { max_tokens: 24, stop, stream: true }));
  assert.equal(whole.message.content, text.split(stop)[0]);
  assert.equal(whole.finish_reason, "stop");
  assert.equal(textOf(chunks), whole.message.content);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
}

export async function a_limit_of_tokens_is_kept_under_both_names(target) {
  const newer = await chat(target, { max_tokens: undefined, max_completion_tokens: 1 });
  const older = await chat(target, { max_tokens: 1 });
  assert.equal(newer.usage.completion_tokens, 1);
  assert.equal(older.usage.completion_tokens, 1);
}

export async function parameters_of_sampling_are_taken(target) {
  const fields = { max_tokens: 4, temperature: 0.7, top_p: 0.9, presence_penalty: 0.5, frequency_penalty: -0.5 };
  const answer = await chat(target, { ...fields, logit_bias: { 5: -100 }, user: "someone" });
  assert.ok(["stop", "length"].includes(answer.choices[0].finish_reason));
}
