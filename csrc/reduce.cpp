#include "reduce.h"

#ifdef TILEWORK_MULTIVERSION
#include <cpuid.h>
#endif

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

#ifdef TILEWORK_MULTIVERSION
/// Half-precision conversions: every processor with AVX2 has them, not every virtual machine.
static bool converts_float16() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

Reduction find_reduction(DType dtype, ReduceOp op) {
  const auto d = static_cast<unsigned>(dtype), o = static_cast<unsigned>(op);
#ifdef TILEWORK_MULTIVERSION
  static const bool has_f16c = converts_float16();
  static const bool has_avx512 = has_f16c && __builtin_cpu_supports("avx512f") &&
                                 __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") &&
                                 __builtin_cpu_supports("avx512vl");
  static const bool has_avx2 = has_f16c && __builtin_cpu_supports("avx2");
  if (has_avx512) return avx512::find(d, o);
  if (has_avx2) return avx2::find(d, o);
#endif
  return baseline::find(d, o);
}

}  // namespace tilework
