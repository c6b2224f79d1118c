# SPDX-License-Identifier: MIT OR Apache-2.0
"""The HTTP side of a service: who may ask, what a request's bytes may be, and which route answers it.

app         `create_app`: all of it put together
settings    `HttpSettings`: what the owner of a service decides of it
service     `Service`: what all routes share
visit       `Visit`: one request as it passes through; access writes its line in the log
turnstile   a few requests in each turn of the loop
auth        keys; body and json_text: from bytes to one object; span: until when a request may take; drain: the end
answer      sends what `serve.openai` made, whole or as a stream
errors      every failure in OpenAI's shape
routes_*    the routes; openapi the document that describes them
"""
