# SPDX-License-Identifier: MIT OR Apache-2.0
"""Load for any server that speaks OpenAI's API over HTTP, and what it measured.

    lengths    how long prompts and answers are        question   one request: a prompt, an answer's length, a time
    trace      lengths and times from a recording      questions  the requests of one run, in order
    arrivals   when requests are sent                  words      prompts made up, of words or token ids
    server     what the server is: model, tokenizer    dialect    how requests are written for it
    events     server-sent events out of bytes         exchange   one request and its answer, as a `sample`
    drive      all requests of one run                 lag        whether this process keeps up
    session    the HTTP client
    bar        what a person sees meanwhile            report     what all samples say together

Rules: one process and one event loop. Nothing is computed from a token's text. Numbers of tokens are the server's own
where it tells them. It knows nothing of an engine: it sees what any client sees.
"""
