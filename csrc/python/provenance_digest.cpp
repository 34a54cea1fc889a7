#include "python/provenance_digest.h"

#include <string.h>

namespace tilework {
namespace {

constexpr uint64_t kSeed = 0x9e3779b97f4a7c15, kMultiplier = 0xff51afd7ed558ccd;

uint64_t load(const char* data, size_t bytes) {
  uint64_t word = 0;
  memcpy(&word, data, bytes);
  return word;
}

uint64_t add(uint64_t state, uint64_t word) {
  state = (state ^ word) * kMultiplier;
  return state ^ state >> 29;
}

}  // namespace

uint64_t& thread_provenance() {
  thread_local uint64_t digest = 0;
  return digest;
}

uint64_t hash_content(const char* data, size_t bytes) {
  // Four chains, whose multiplications overlap.
  constexpr size_t kStride = 4 * sizeof(uint64_t);
  uint64_t lanes[4] = {kSeed, kSeed + 1, kSeed + 2, kSeed + 3};
  const char* const end = data + bytes / kStride * kStride;
  for (; data < end; data += kStride)
    for (size_t lane = 0; lane < 4; ++lane)
      lanes[lane] = add(lanes[lane], load(data + lane * sizeof(uint64_t), sizeof(uint64_t)));
  uint64_t hash = add(kSeed, bytes);
  for (uint64_t lane : lanes) hash = add(hash, lane);
  for (size_t left = bytes % kStride; left > 0;) {
    const size_t step = left < sizeof(uint64_t) ? left : sizeof(uint64_t);
    hash = add(hash, load(data, step));
    data += step;
    left -= step;
  }
  return add(hash, bytes);
}

uint64_t hash_samples(const char* data, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& strides, size_t item_bytes, size_t samples) {
  size_t items = 1;
  for (int64_t size : shape) items *= static_cast<size_t>(size);
  uint64_t hash = add(kSeed, items);
  for (size_t i = 0; i < samples; ++i) {
    // In two steps, so that no product of large numbers can overflow.
    const size_t gaps = samples - 1, last = items - 1;
    size_t item = last / gaps * i + last % gaps * i / gaps;
    const char* at = data;
    for (size_t dim = shape.size(); dim-- > 0;) {
      const auto size = static_cast<size_t>(shape[dim]);
      at += static_cast<int64_t>(item % size) * strides[dim] * static_cast<int64_t>(item_bytes);
      item /= size;
    }
    for (size_t done = 0; done < item_bytes; done += sizeof(uint64_t)) {
      const size_t left = item_bytes - done;
      hash = add(hash, load(at + done, left < sizeof(uint64_t) ? left : sizeof(uint64_t)));
    }
  }
  return add(hash, items);
}

}  // namespace tilework
