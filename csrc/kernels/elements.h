// Element types of the loops that CMake compiles once per instruction-set level: the stored type,
// and its conversion to and from the type of computation. For reduce_kernels.cpp and
// random_kernels.cpp alone: all of it is in a namespace without a name inside that of the level.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define TILEWORK_VECTORISE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define TILEWORK_VECTORISE _Pragma("GCC ivdep")
#else
#define TILEWORK_VECTORISE
#endif
#if defined(__GNUC__)
#define TILEWORK_NOINLINE __attribute__((noinline))
#else
#define TILEWORK_NOINLINE
#endif

namespace tilework {
namespace TILEWORK_LEVEL {
namespace {

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline uint32_t choose(bool condition, uint32_t yes, uint32_t no) { return condition ? yes : no; }

// ---- element types: Stored, Value (the type of accumulation), load() and store() between them

template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value load(Stored x) { return x; }
  static Stored store(Value x) { return x; }
};

struct Bool {
  using Stored = uint8_t;
  using Value = uint8_t;
  static Value load(Stored x) { return x != 0; }
  static Stored store(Value x) { return x; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored x) { return bits_of<float>(static_cast<uint32_t>(x) << 16); }
  static Stored store(Value x) {
    const uint32_t bits = bits_of<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;  // rounding could turn a NaN into infinity
    return static_cast<Stored>(choose((bits & 0x7fffffff) > 0x7f800000, nan, rounded));
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;

  // All three cases are computed and one is chosen, so that the loop has no branches.
  static Value load(Stored x) {
    const uint32_t magnitude = x & 0x7fff;
    const uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
    const uint32_t huge = (magnitude << 13) | 0x7f800000;  // infinity, NaN
    // 0.5 has a unit in the last place of 2^-24, which is float16's smallest step.
    const uint32_t tiny = bits_of<uint32_t>(bits_of<float>(0x3f000000 | magnitude) - 0.5f);
    const uint32_t bits =
        choose(magnitude >= 0x7c00, huge, choose(magnitude < 0x0400, tiny, normal));
    return bits_of<float>(bits | (static_cast<uint32_t>(x & 0x8000) << 16));
  }

  static Stored store(Value x) {
    const uint32_t bits = bits_of<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t normal =
        (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 lets the processor round to steps of 2^-24.
    const uint32_t tiny = bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t huge =
        choose(magnitude > 0x7f800000, 0x7e00 | ((magnitude >> 13) & 0x3ff), 0x7c00);
    const uint32_t result = choose(magnitude >= 0x477ff000, huge,  // 65520 rounds to infinity
                                   choose(magnitude < 0x38800000, tiny, normal));
    return static_cast<Stored>(result | ((bits >> 16) & 0x8000));
  }
};

#if defined(__F16C__)
// float16 by the processor's own conversions, which compilers do not vectorise by themselves.
// They round as Float16 does.

inline void widen(float* to, const uint16_t* from, size_t count) {
  const size_t whole = count / 8 * 8;
  for (size_t i = 0; i < whole; i += 8)
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (size_t i = whole; i < count; ++i) to[i] = Float16::load(from[i]);
}
inline void narrow(uint16_t* to, const float* from, size_t count) {
  const size_t whole = count / 8 * 8;
  for (size_t i = 0; i < whole; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  for (size_t i = whole; i < count; ++i) to[i] = Float16::store(from[i]);
}
#endif

}  // namespace
}  // namespace TILEWORK_LEVEL
}  // namespace tilework
