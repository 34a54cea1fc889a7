// Random numbers that are a function of a key and an element's index in its global tensor: any rank
// draws any part of it, with the same values.
//
// The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011): a bijection of 128-bit counters
// under a 64-bit key. The key is the seed; a counter's upper half is the stream, its lower half a
// block's number. Elements are counted in row-major order and drawn in groups of 64, laid out so
// that vectors need no shuffling. With j the element's number in its group g, word w of block b is
//
//   32 bits per element   b = 16 g + j % 16, w = j / 16
//   64 bits per element   b = 32 g + j % 16, w = j / 16 for the lower half, b + 16 for the upper one
//
// The conversion of bits to values uses only IEEE operations that round correctly (+ - * / sqrt,
// conversions), in one order: every level of the instruction set gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/op_types.h"
#include "kernels/simd_level.h"

namespace tilework {

enum class Distribution : uint8_t { kUniform, kNormal, kIntegers, kBernoulli };
constexpr const char* kDistributionNames[] = {"uniform", "normal", "integers", "bernoulli"};
constexpr size_t kDistributions = count_of(kDistributionNames);

/// Key and parameters: a and b are low and high, mean and standard deviation, or the probability and
/// the value of a success. For integers: the lowest, and the number of them, 0 meaning 2^64.
struct SampleParams {
  uint64_t seed, stream;
  double a, b;
  uint64_t low, span;
};

/// The part of a global tensor that begins at `offsets` and has `sizes`.
struct Tile {
  std::vector<int64_t> shape, offsets, sizes;
};

constexpr size_t kGroup = 64;
/// Integers out of more than these take 64 bits each. Each value's probability is off by no more
/// than span / 2^32, or span / 2^64, of itself.
constexpr uint64_t kNarrowSpan = 1 << 16;

/// The loops for a dtype and a distribution; null if it has none.
struct Sampler {
  /// Elements [kGroup * group, kGroup * (group + groups)) of the global tensor.
  void (*groups)(void* to, uint64_t group, size_t groups, const SampleParams& params);
  /// Any kGroup elements, by their indices in it.
  void (*any)(void* to, const uint64_t* indices, const SampleParams& params);
};

/// Fill a tile, which lies in row-major order at `to`.
/// Throws std::invalid_argument: there is no such distribution of this dtype, or no such tile.
void fill_random(char* to, DType dtype, Distribution distribution, const SampleParams& params,
                 const Tile& tile, SimdLevel level);

}  // namespace tilework
