// SPDX-License-Identifier: MIT OR Apache-2.0
// The largest sizes that kernels have room for. Python has the same numbers, see ../library.py, and refuses more.

#pragma once

constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_EXPERTS = 1024;
constexpr int MAX_GROUP = 48;  // query heads to a kv head
