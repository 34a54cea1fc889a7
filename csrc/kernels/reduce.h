// Reductions over any number of sources, one per rank, always in the order 0, 1, … N-1: the
// result has the same bits whichever rank computes it, in whatever pieces.
//
// 16-bit floats accumulate in float32 and are rounded once, to nearest even; integers wrap; min
// and max propagate NaN. The loops are plain and vectorised by the compiler, which compiles them
// once per level of the instruction set (reduce_kernels.cpp); the best level that this processor
// has is chosen at run time.
#pragma once

#include <cstddef>

#include "kernels/op_types.h"

namespace tilework {

/// destination[i] = reduction over r of sources[r][i], for `count` elements. The destination may
/// be one of the sources. `factors` holds a factor per source; only premul_sum reads it.
using Reduction = void (*)(void* destination, const void* const* sources, const double* factors,
                           int ranks, size_t count);

/// Null where the dtype has no such reduction.
Reduction find_reduction(DType dtype, ReduceOp op);

}  // namespace tilework
