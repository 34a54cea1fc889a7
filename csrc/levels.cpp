#include "levels.h"

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

static Level find_best() {
  if (!converts_float16() || !__builtin_cpu_supports("avx2")) return Level::kBaseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Level::kAvx512 : Level::kAvx2;
}
#else
static Level find_best() { return Level::kBaseline; }
#endif

Level best_level() {
  static const Level best = find_best();
  return best;
}

}  // namespace tilework
