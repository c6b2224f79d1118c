// SPDX-License-Identifier: MIT OR Apache-2.0
// The conformance suite with OpenAI's JavaScript client: the checks of the files in `../areas`, under the same names.
//
//   node run.mjs --list                       the names, as one JSON list
//   node run.mjs BASE_URL MODEL [MISSING]     run them; the key is in OPENAI_API_KEY, MISSING are features to leave out
//
// Writes one line of JSON for each check: name, outcome ("ok", "failed" or "skipped") and why.

import { AREAS } from "./areas.mjs";
import { NotApplicable, makeTarget } from "./target.mjs";

const [first, model, missing] = process.argv.slice(2);

function* checks() {
  for (const { needs, functions } of AREAS) {
    for (const [name, check] of Object.entries(functions)) yield { name, needs, check };
  }
}

async function outcome({ needs, check }, target) {
  const absent = needs.filter((need) => target.missing.includes(need));
  if (absent.length > 0) return { outcome: "skipped", why: `without ${absent.join(", ")}` };
  try {
    await check(target);
  } catch (error) {
    if (error instanceof NotApplicable) return { outcome: "skipped", why: error.message };
    return { outcome: "failed", why: String(error.stack).split("\n").slice(0, 12).join(" | ") };
  }
  return { outcome: "ok", why: "" };
}

if (first === "--list") {
  console.log(JSON.stringify([...checks()].map(({ name }) => name)));
} else {
  const target = makeTarget(first, model, missing ? missing.split(",") : []);
  for (const check of checks()) console.log(JSON.stringify({ name: check.name, ...(await outcome(check, target)) }));
}
