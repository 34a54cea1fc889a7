// CRC-32 as zlib, gzip and PNG have it (reflected, polynomial 0x04C11DB7), at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilework {

/// The checksum of `bytes` bytes that follow data whose checksum is `crc` (0: none).
uint32_t crc32(const void* data, size_t bytes, uint32_t crc = 0);

/// Likewise, and copy them past the caches on the way. Others see the copy after fence_streamed_copies().
uint32_t copy_crc32(void* to, const void* data, size_t bytes, uint32_t crc = 0);

/// The share that some bytes have in the checksum of data that they are spread over. Checksums are
/// affine: if each byte of the data is in one of several shares, the exclusive or of these and of the
/// checksum of as many zeros is the checksum of the data. So nobody need read what another one reads.
class Crc32Share {
 public:
  /// Pass by bytes that count in other shares.
  void skip(size_t bytes) { gap_ += bytes; }
  void add(const void* data, size_t bytes);
  /// As add() and copy_crc32(); what lies `ahead` bytes behind is fetched meanwhile, if it is not 0.
  void copy(void* to, const void* data, size_t bytes, size_t ahead);
  /// As copy() and skip() by turns: `count` runs of `run` bytes, which are `apart` bytes apart in the
  /// data and `to_apart` bytes in memory. Ends with the last run.
  void copy_runs(void* to, int64_t to_apart, const void* data, size_t apart, size_t run,
                 size_t count);
  /// The share, if the data end here.
  uint32_t value();
  /// Begin with other data.
  void restart() { state_ = 0, gap_ = 0; }

 private:
  void close_gap();

  uint32_t state_ = 0;
  size_t gap_ = 0;
  /// The last gap that was closed, and the factor for it.
  size_t known_gap_ = 0;
  uint32_t known_factor_ = 0;
  /// The gap between the last runs, and what moves a register past it and 64 bytes.
  size_t known_apart_ = ~size_t{0};
  long long known_across_[2] = {0, 0};
};

}  // namespace tilework
