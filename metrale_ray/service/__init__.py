# SPDX-License-Identifier: MIT OR Apache-2.0
"""One model behind an HTTP server on this machine: `metrale-ray serve`.

service   `Service`: the engine, the server and the end of both
server    `HttpServer`: uvicorn on a loop of a thread of its own
stopping  `Stopping`: what signals ask of a service
"""
