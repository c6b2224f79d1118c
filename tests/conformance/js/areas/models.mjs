// SPDX-License-Identifier: MIT OR Apache-2.0
import assert from "node:assert/strict";
import OpenAI from "openai";
import { errorOf } from "../target.mjs";

export async function models_are_listed({ client, model }) {
  const models = await client.models.list();
  assert.equal(models.object, "list");
  assert.ok(models.data.map((entry) => entry.id).includes(model));
  for (const entry of models.data) {
    assert.equal(entry.object, "model");
    assert.equal(typeof entry.created, "number");
    assert.equal(typeof entry.owned_by, "string");
  }
}

export async function a_model_is_found_by_its_name({ client, model }) {
  assert.equal((await client.models.retrieve(model)).id, model);
}

export async function a_model_that_is_not_there_is_not_found({ client }) {
  const error = await errorOf(client.models.retrieve("no-such-model"), OpenAI.NotFoundError);
  assert.ok(error.error.message);
}
