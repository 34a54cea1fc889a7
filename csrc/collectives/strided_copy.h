// Copies between buffers that may be strided.
#pragma once

#include <algorithm>

#include "collectives/operation.h"
#include "transport/copy.h"

namespace tilework {

/// A position in a buffer, counted in its bytes without gaps.
class RowCursor {
 public:
  RowCursor(const Buffer& buffer, size_t offset)
      : row_bytes_(buffer.row_bytes), gap_(buffer.stride_bytes - buffer.row_bytes) {
    if (buffer.dense()) {
      at_ = buffer.data + offset;
      left_ = SIZE_MAX;
    } else {
      at_ = buffer.data + offset / row_bytes_ * buffer.stride_bytes + offset % row_bytes_;
      left_ = row_bytes_ - offset % row_bytes_;
    }
  }

  char* at() const { return at_; }
  /// Bytes from here to the end of the row.
  size_t left() const { return left_; }
  /// The byte below at(), in the next row.
  const char* below() const { return at_ + row_bytes_ + gap_; }
  bool dense() const { return row_bytes_ == 0; }

  void advance(size_t bytes) {
    at_ += bytes;
    left_ -= bytes;
    if (left_ > 0) return;
    at_ += gap_;
    left_ = row_bytes_;
  }

 private:
  size_t row_bytes_, gap_;
  char* at_;
  size_t left_;
};

/// Processors do not predict the start of the next row; a block of it is prefetched while the one
/// above is copied.
constexpr size_t kBlockOfRow = 512;

inline void copy_row(char* to, const RowCursor& from, size_t bytes, bool streamed) {
  size_t done = 0;
  while (done < bytes) {
    // Blocks end where lines of the target do.
    const size_t ahead = reinterpret_cast<uintptr_t>(to + done) % kLine;
    const size_t block = std::min(bytes - done, kBlockOfRow - ahead);
    if (!from.dense())
      for (size_t line = 0; line < block; line += kLine)
        __builtin_prefetch(from.below() + done + line);
    (streamed ? copy_past_caches : copy)(to + done, from.at() + done, block);
    done += block;
  }
}

/// Bytes [offset, offset + length) of `from` to the same place in `to`.
inline void copy_rows(const Buffer& to, size_t to_offset, const Buffer& from, size_t from_offset,
                      size_t length, bool streamed) {
  if (length == 0) return;  // a buffer that this rank does not have may be null
  if (to.dense() && from.dense())
    return (streamed ? copy_streaming : copy)(to.data + to_offset, from.data + from_offset, length);
  RowCursor target(to, to_offset), source(from, from_offset);
  while (length > 0) {
    const size_t row = std::min({length, target.left(), source.left()});
    copy_row(target.at(), source, row, streamed && row >= kBlockOfRow);
    target.advance(row);
    source.advance(row);
    length -= row;
  }
  if (streamed) fence_streamed_copies();
}

}  // namespace tilework
