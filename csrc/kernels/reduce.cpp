#include "kernels/reduce.h"

#include "kernels/simd_level.h"

namespace tilework {

// Each is reduce_kernels.cpp, compiled for one level of the instruction set.
namespace baseline {
Reduction find(unsigned dtype, unsigned op);
}
#ifdef TILEWORK_MULTIVERSION
namespace avx2 {
Reduction find(unsigned dtype, unsigned op);
}
namespace avx512 {
Reduction find(unsigned dtype, unsigned op);
}
#endif

Reduction find_reduction(DType dtype, ReduceOp op) {
  const auto d = static_cast<unsigned>(dtype), o = static_cast<unsigned>(op);
#ifdef TILEWORK_MULTIVERSION
  if (best_simd_level() == SimdLevel::kAvx512) return avx512::find(d, o);
  if (best_simd_level() == SimdLevel::kAvx2) return avx2::find(d, o);
#endif
  return baseline::find(d, o);
}

}  // namespace tilework
