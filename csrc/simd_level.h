// Levels of the instruction set that the loops of reduce_kernels.cpp and random_kernels.cpp are
// compiled for; which of them this processor can run is found at run time.
#pragma once

#include <cstddef>

namespace tilework {

/// Each includes those before it.
enum class SimdLevel { kBaseline, kAvx2, kAvx512 };
constexpr const char* kSimdLevelNames[] = {"baseline", "avx2", "avx512"};

/// The highest that this processor and this build have.
SimdLevel best_simd_level();

}  // namespace tilework
