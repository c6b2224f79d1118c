# SPDX-License-Identifier: MIT OR Apache-2.0
"""Valid messages of a front's session, of every type and with every field in use, for fuzzing."""

from __future__ import annotations

from metrale_ray.protocol.front.messages import (
    Abort,
    Ask,
    Beat,
    Bye,
    Dead,
    Finish,
    FromFront,
    FromHead,
    Open,
    Opened,
    Output,
    Outputs,
    Read,
    Submit,
    Told,
)
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import TokenParams

FULL = TokenParams(
    n=3,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    seed=2**64 - 1,
    max_tokens=70_000,
    min_tokens=2,
    ignore_eos=True,
    stop_token_ids=[2, 2**32 - 1],
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={5: -100.0, 128_000: 1.5},
    allowed_token_ids=[1, 2, 3, 70_000],
    bad_token_ids=[[7], [8, 9, 10]],
    end_token_ids=[0, 1],
    logprobs=2,
    prompt_logprobs=0,
    grammar='{"grammars":[{"lark_grammar":"start: \\"é\\""}]}',
)
SCORES = (TokenLogprobs(4, -0.5, 1, (4, 9), (-0.5, -1.5)), TokenLogprobs(70_000, -9999.0, 320))

FROM_FRONT: tuple[FromFront, ...] = (
    Open(),
    Submit(1, (1, 200, 70_000, 2**32 - 1), FULL, -(2**31), 0.5),
    Submit(2**64 - 1, (5,), TokenParams()),
    Submit(2, (5, 6), TokenParams(seed=7, logprobs=1), 2**31 - 1, 3600.0),
    Abort(1),
    Abort(2**64 - 1),
    Finish(1, 2),
    Read(0),
    Beat(),
    Bye(),
    Ask(2**40),
)
FROM_HEAD: tuple[FromHead, ...] = (
    Opened(4096, 128_000, 2**40),
    Outputs(1, (Output(1, 0, (4,)), Output(2, 0, (200, 70_000)))),
    Outputs(1, (Output(1, 0, (4, 70_000), logprobs=SCORES), Output(2, 0, (), prompt_logprobs=SCORES))),
    Outputs(1, (Output(1, 0, (5,), "stop", 5), Output(2, 0, (), "length"), Output(9, 1, (1,), "abort"))),
    Outputs(1, (Output(1, 0, (), "error", None, ("too_long", "the prompt has 9 tokens"), is_refusal=True),)),
    Outputs(2**64 - 1, ()),
    Beat(),
    Dead("rank 1 has gone: its connection ended", 1),
    Dead("the engine was stopped"),
    Told(2**40, '{"phase":"ready","ranks":[{"rank":0}]}'),
)
