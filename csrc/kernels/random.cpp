#include "kernels/random.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tilework {

// Each is random_kernels.cpp, compiled for one level of the instruction set.
namespace baseline {
Sampler find_sampler(unsigned dtype, unsigned distribution, bool wide);
}
#ifdef TILEWORK_MULTIVERSION
namespace avx2 {
Sampler find_sampler(unsigned dtype, unsigned distribution, bool wide);
}
namespace avx512 {
Sampler find_sampler(unsigned dtype, unsigned distribution, bool wide);
}
#endif

namespace {

Sampler find(DType dtype, Distribution distribution, const SampleParams& params, SimdLevel level) {
  const auto t = static_cast<unsigned>(dtype), d = static_cast<unsigned>(distribution);
  const bool wide = params.span - 1 >= kNarrowSpan;  // 0 means 2^64
#ifdef TILEWORK_MULTIVERSION
  if (level == SimdLevel::kAvx512) return avx512::find_sampler(t, d, wide);
  if (level == SimdLevel::kAvx2) return avx2::find_sampler(t, d, wide);
#endif
  static_cast<void>(level);
  return baseline::find_sampler(t, d, wide);
}

/// Draws runs of global elements to memory without gaps, in full groups. Any part of a group costs
/// all of it, unless the run before ended in it.
class GroupWriter {
 public:
  GroupWriter(char* to, size_t item, const Sampler& sampler, const SampleParams& params)
      : to_(to), item_(item), sampler_(sampler), params_(params) {}

  void add(uint64_t first, uint64_t count) {
    while (count > 0) {
      const uint64_t done = first % kGroup == 0 && count >= kGroup
                                ? full_groups(first / kGroup, count / kGroup)
                                : part(first / kGroup, first % kGroup, count);
      to_ += done * item_;
      first += done;
      count -= done;
    }
  }

 private:
  uint64_t full_groups(uint64_t group, uint64_t groups) {
    sampler_.groups(to_, group, groups, params_);
    return groups * kGroup;
  }

  uint64_t part(uint64_t group, uint64_t begin, uint64_t count) {
    if (group != drawn_) sampler_.groups(group_, group, 1, params_);
    drawn_ = group;
    const uint64_t done = std::min(kGroup - begin, count);
    std::memcpy(to_, group_ + begin * item_, done * item_);
    return done;
  }

  char* to_;
  const size_t item_;
  const Sampler& sampler_;
  const SampleParams& params_;
  uint64_t drawn_ = UINT64_MAX;
  alignas(64) char group_[kGroup * 8];
};

/// The same for runs that have little of each group: element by element, a block for each.
class ElementWriter {
 public:
  ElementWriter(char* to, size_t item, const Sampler& sampler, const SampleParams& params)
      : to_(to), item_(item), sampler_(sampler), params_(params) {}

  void add(uint64_t first, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      indices_[pending_++] = first + i;
      if (pending_ < kGroup) continue;
      sampler_.any(to_, indices_, params_);
      to_ += kGroup * item_;
      pending_ = 0;
    }
  }

  void end() {
    char last[kGroup * 8];
    sampler_.any(last, indices_, params_);
    std::memcpy(to_, last, pending_ * item_);
  }

 private:
  char* to_;
  const size_t item_;
  const Sampler& sampler_;
  const SampleParams& params_;
  uint64_t indices_[kGroup] = {};
  size_t pending_ = 0;
};

void check(const Tile& tile) {
  const auto& [shape, offsets, sizes] = tile;
  if (shape.size() != offsets.size() || shape.size() != sizes.size())
    throw std::invalid_argument(
        "shape, offsets and sizes need as many dims, got " + std::to_string(shape.size()) + ", " +
        std::to_string(offsets.size()) + " and " + std::to_string(sizes.size()));
  int64_t volume = 1;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (offsets[dim] < 0 || sizes[dim] < 0 || offsets[dim] > shape[dim] ||
        sizes[dim] > shape[dim] - offsets[dim])
      throw std::invalid_argument("the tile does not lie in the tensor in dim " +
                                  std::to_string(dim) + ": [" + std::to_string(offsets[dim]) +
                                  ", +" + std::to_string(sizes[dim]) + ") of " +
                                  std::to_string(shape[dim]));
    if (__builtin_mul_overflow(volume, shape[dim], &volume))
      throw std::invalid_argument("a global tensor has fewer than 2^63 elements");
  }
}

/// The contiguous runs of a tile that is not empty: its dims from `inner_` on make one.
class TileRuns {
 public:
  explicit TileRuns(const Tile& tile) : tile_(tile), strides_(tile.shape.size()) {
    uint64_t stride = 1;
    for (size_t dim = tile.shape.size(); dim-- > 0; stride *= tile.shape[dim]) {
      strides_[dim] = stride;
      first_ += tile.offsets[dim] * stride;
    }
    inner_ = tile.shape.size();
    while (inner_ > 0) {
      --inner_;
      run_ *= tile.sizes[inner_];
      if (tile.sizes[inner_] < tile.shape[inner_]) break;
    }
  }

  /// True if most of each group would be discarded. A single element costs as much as kSome in a
  /// group.
  bool sparse() const {
    constexpr uint64_t kSome = 24;
    return inner_ > 0 && run_ < kSome && run_ * kGroup < strides_[inner_ - 1] * kSome;
  }

  template <class Sink>
  void each(Sink& sink) const {
    each(sink, 0, first_);
  }

 private:
  template <class Sink>
  void each(Sink& sink, size_t dim, uint64_t first) const {
    if (dim == inner_) return sink.add(first, run_);
    for (int64_t i = 0; i < tile_.sizes[dim]; ++i) each(sink, dim + 1, first + i * strides_[dim]);
  }

  const Tile& tile_;
  std::vector<uint64_t> strides_;
  uint64_t first_ = 0, run_ = 1;
  size_t inner_;
};

}  // namespace

void fill_random(char* to, DType dtype, Distribution distribution, const SampleParams& params,
                 const Tile& tile, SimdLevel level) {
  const Sampler sampler = find(dtype, distribution, params, level);
  const auto t = static_cast<unsigned>(dtype), d = static_cast<unsigned>(distribution);
  if (!sampler.groups)
    throw std::invalid_argument(std::string(kDistributionNames[d]) + " is not drawn as " +
                                dtype_name(t));
  check(tile);
  if (std::count(tile.sizes.begin(), tile.sizes.end(), 0) > 0) return;
  const TileRuns tile_runs(tile);
  if (tile_runs.sparse()) {
    ElementWriter runs(to, kItemBytes[t], sampler, params);
    tile_runs.each(runs);
    runs.end();
  } else {
    GroupWriter runs(to, kItemBytes[t], sampler, params);
    tile_runs.each(runs);
  }
}

}  // namespace tilework
