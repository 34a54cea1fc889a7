// Instruction-set levels that the loops of reduce_kernels.cpp and random_kernels.cpp are compiled
// for; the best that this processor has is chosen at run time.
#pragma once

#include <cstddef>

namespace tilework {

/// Each includes those before it.
enum class SimdLevel { kBaseline, kAvx2, kAvx512 };
constexpr const char* kSimdLevelNames[] = {"baseline", "avx2", "avx512"};

/// The highest level that this processor and this build have.
SimdLevel best_simd_level();

}  // namespace tilework
