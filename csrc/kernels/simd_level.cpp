#include "kernels/simd_level.h"

#ifdef TILEWORK_MULTIVERSION
#include <cpuid.h>
#endif

namespace tilework {

#ifdef TILEWORK_MULTIVERSION
/// Half-precision conversions: every processor with AVX2 has them, not every virtual machine.
static bool converts_float16() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static SimdLevel find_best() {
  if (!converts_float16() || !__builtin_cpu_supports("avx2")) return SimdLevel::kBaseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? SimdLevel::kAvx512 : SimdLevel::kAvx2;
}
#else
static SimdLevel find_best() { return SimdLevel::kBaseline; }
#endif

SimdLevel best_simd_level() {
  static const SimdLevel best = find_best();
  return best;
}

}  // namespace tilework
