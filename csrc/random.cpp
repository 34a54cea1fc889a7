#include "random.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tilework {

// Each is random_kernels.cpp, compiled for one level of the instruction set.
namespace baseline {
Drawing find_drawing(unsigned dtype, unsigned distribution, bool wide);
}
#ifdef TILEWORK_MULTIVERSION
namespace avx2 {
Drawing find_drawing(unsigned dtype, unsigned distribution, bool wide);
}
namespace avx512 {
Drawing find_drawing(unsigned dtype, unsigned distribution, bool wide);
}
#endif

namespace {

Drawing find(DType dtype, Distribution distribution, const Draw& draw, Level level) {
  const auto t = static_cast<unsigned>(dtype), d = static_cast<unsigned>(distribution);
  const bool wide = draw.span - 1 >= kNarrowSpan;  // 0 means 2^64
#ifdef TILEWORK_MULTIVERSION
  if (level == Level::kAvx512) return avx512::find_drawing(t, d, wide);
  if (level == Level::kAvx2) return avx2::find_drawing(t, d, wide);
#endif
  static_cast<void>(level);
  return baseline::find_drawing(t, d, wide);
}

/// Global elements one run after the other, to memory without gaps.
class Runs {
 public:
  Runs(char* to, size_t item, Drawing drawing, const Draw& draw)
      : to_(to), item_(item), drawing_(drawing), draw_(draw) {}

  void add(uint64_t first, uint64_t count) {
    while (count > 0) {
      const uint64_t done = first % kGroup == 0 && count >= kGroup
                                ? whole_groups(first / kGroup, count / kGroup)
                                : part(first / kGroup, first % kGroup, count);
      to_ += done * item_;
      first += done;
      count -= done;
    }
  }

 private:
  uint64_t whole_groups(uint64_t group, uint64_t groups) {
    drawing_(to_, group, groups, draw_);
    return groups * kGroup;
  }

  uint64_t part(uint64_t group, uint64_t begin, uint64_t count) {
    if (group != held_) drawing_(group_, group, 1, draw_);
    held_ = group;
    const uint64_t done = std::min(kGroup - begin, count);
    std::memcpy(to_, group_ + begin * item_, done * item_);
    return done;
  }

  char* to_;
  const size_t item_;
  const Drawing drawing_;
  const Draw& draw_;
  uint64_t held_ = UINT64_MAX;
  alignas(64) char group_[kGroup * 8];
};

void check(const Tile& tile) {
  const auto& [shape, offsets, sizes] = tile;
  if (shape.size() != offsets.size() || shape.size() != sizes.size())
    throw std::invalid_argument("shape, offsets and sizes need as many dims, got " +
                                std::to_string(shape.size()) + ", " +
                                std::to_string(offsets.size()) + " and " +
                                std::to_string(sizes.size()));
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

/// The rows of a tile that is not empty. Its dims from `inner` on make one run.
class Rows {
 public:
  Rows(const Tile& tile, Runs& runs) : tile_(tile), runs_(runs), strides_(tile.shape.size()) {
    int64_t stride = 1;
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

  void add() { add(0, first_); }

 private:
  void add(size_t dim, uint64_t first) {
    if (dim == inner_) return runs_.add(first, run_);
    for (int64_t i = 0; i < tile_.sizes[dim]; ++i) add(dim + 1, first + i * strides_[dim]);
  }

  const Tile& tile_;
  Runs& runs_;
  std::vector<uint64_t> strides_;
  uint64_t first_ = 0, run_ = 1;
  size_t inner_;
};

}  // namespace

void fill_random(char* to, DType dtype, Distribution distribution, const Draw& draw,
                 const Tile& tile, Level level) {
  const Drawing drawing = find(dtype, distribution, draw, level);
  const auto t = static_cast<unsigned>(dtype), d = static_cast<unsigned>(distribution);
  if (!drawing)
    throw std::invalid_argument(std::string(kDistributionNames[d]) + " is not drawn as " +
                                dtype_name(t));
  check(tile);
  if (std::count(tile.sizes.begin(), tile.sizes.end(), 0) > 0) return;
  Runs runs(to, kItemBytes[t], drawing, draw);
  Rows(tile, runs).add();
}

}  // namespace tilework
