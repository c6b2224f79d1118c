// SPDX-License-Identifier: MIT OR Apache-2.0
// The kernels of the instruction set MR_ISA, of MR_WIDTH lanes. Compiled once for each set, see ../compile.py.

#include "kernels.h"

#include "limits.h"
#include "vectors.h"

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "pack.h"
#include "quantize.h"
#include "sums.h"

#define MR_JOINED(a, b) a##b
#define MR_TABLE(isa) MR_JOINED(kernels_of_, isa)

extern const Kernels MR_TABLE(MR_ISA);
const Kernels MR_TABLE(MR_ISA) = {
    MR_ISA::pack,   MR_ISA::quantize, MR_ISA::unpack_rows, MR_ISA::linear, MR_ISA::experts, MR_ISA::norm,
    MR_ISA::rotate, MR_ISA::route,    MR_ISA::store_kv,    MR_ISA::attend, MR_ISA::add_up,
};
