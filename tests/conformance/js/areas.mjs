// SPDX-License-Identifier: MIT OR Apache-2.0
// All areas, in order, each with the features that it needs.

import * as chat from "./areas/chat.mjs";
import * as completions from "./areas/completions.mjs";
import * as errors from "./areas/errors.mjs";
import * as keys from "./areas/keys.mjs";
import * as logprobs from "./areas/logprobs.mjs";
import * as models from "./areas/models.mjs";
import * as sampling from "./areas/sampling.mjs";
import * as schemas from "./areas/schemas.mjs";
import * as tokenPrompts from "./areas/token_prompts.mjs";
import * as tools from "./areas/tools.mjs";

export const AREAS = [
  { needs: ["models"], functions: models },
  { needs: ["chat"], functions: chat },
  { needs: ["completions"], functions: completions },
  { needs: ["completions", "token-ids"], functions: tokenPrompts },
  { needs: ["chat", "sampling"], functions: sampling },
  { needs: ["chat", "completions", "logprobs"], functions: logprobs },
  { needs: ["chat", "schemas"], functions: schemas },
  { needs: ["chat", "tools"], functions: tools },
  { needs: ["chat", "errors"], functions: errors },
  { needs: ["chat", "keys"], functions: keys },
];
