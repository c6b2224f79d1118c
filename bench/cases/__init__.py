# SPDX-License-Identifier: MIT OR Apache-2.0
"""One engine each, asked the same prompts in a process and an environment of its own.

case            the arguments and the answer that all have in common
ours            ranks of this engine on Ray
transformers    Hugging Face transformers
vllm            vLLM for CPUs
llama           llama.cpp, by way of llama-cpp-python
gguf            writes the checkpoint as llama.cpp wants it
"""
