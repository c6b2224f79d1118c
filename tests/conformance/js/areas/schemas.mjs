// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import { chat, collect, textOf } from "../target.mjs";

const SCHEMA = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] }, is_new: { type: "boolean" } },
  required: ["colour", "is_new"],
  additionalProperties: false,
};
const FORMAT = { type: "json_schema", json_schema: { name: "thing", schema: SCHEMA, strict: true } };
const ASKED = { max_tokens: 200, response_format: FORMAT };

function checkThing(thing) {
  assert.deepEqual(Object.keys(thing).toSorted(), ["colour", "is_new"]);
  assert.ok(["red", "green"].includes(thing.colour));
  assert.equal(typeof thing.is_new, "boolean");
}

export async function an_answer_has_the_schema(target) {
  const [choice] = (await chat(target, ASKED)).choices;
  checkThing(JSON.parse(choice.message.content));
  assert.equal(choice.finish_reason, "stop");
}

export async function a_stream_has_the_schema(target) {
  checkThing(JSON.parse(textOf(await collect(chat(target, { ...ASKED, stream: true })))));
}

export async function several_choices_have_the_schema(target) {
  const answer = await chat(target, { ...ASKED, n: 2, temperature: 1 });
  for (const choice of answer.choices) checkThing(JSON.parse(choice.message.content));
}

export async function parse_gives_an_object_of_the_class({ client, model }) {
  const messages = [{ role: "user", content: "Describe a thing as JSON." }];
  const answer = await client.chat.completions.parse({ model, messages, ...ASKED });
  checkThing(answer.choices[0].message.parsed);
}

export async function the_stream_helper_collects_an_object_of_the_class({ client, model }) {
  const messages = [{ role: "user", content: "Describe a thing as JSON." }];
  let numDeltas = 0;
  const stream = client.chat.completions.stream({ model, messages, ...ASKED });
  stream.on("content", () => (numDeltas += 1));
  checkThing(JSON.parse(await stream.finalContent()));
  assert.ok(numDeltas > 0);
}

export async function a_format_of_text_changes_nothing(target) {
  const [plain, text] = await Promise.all([chat(target), chat(target, { response_format: { type: "text" } })]);
  assert.equal(plain.choices[0].message.content, text.choices[0].message.content);
}

export async function a_json_object_begins_as_one(target) {
  const answer = await chat(target, { response_format: { type: "json_object" }, max_tokens: 64 });
  const text = answer.choices[0].message.content;
  assert.ok(text.trimStart().startsWith("{"));
  if (answer.choices[0].finish_reason === "stop") assert.equal(typeof JSON.parse(text), "object");
}
