// The messages of an operation on one rank: which buffer goes to or comes from which peer, and where
// each lies in an outbox.
#pragma once

#include <algorithm>

#include "collectives/exchange.h"
#include "transport/platform.h"

namespace tilework {

constexpr size_t kBlock = 16 * 1024;  // fits the first-level cache twice

inline size_t align_down(size_t n) { return n / kLine * kLine; }
inline size_t ceil_div(size_t n, size_t by) { return (n + by - 1) / by; }

/// The number of bytes of [offset, offset + length) that a buffer has.
inline size_t bytes_of(const Buffer& buffer, size_t offset, size_t length) {
  return offset >= buffer.bytes ? 0 : std::min(length, buffer.bytes - offset);
}

/// Bytes [offset, offset + length) of a dense buffer, as far as it has them.
inline Buffer slice(const Buffer& buffer, size_t offset, size_t length) {
  if (offset >= buffer.bytes) return {buffer.data, 0};
  return {buffer.data + offset, std::min(length, buffer.bytes - offset)};
}

inline size_t elements(const Operation& operation, size_t bytes) {
  return bytes / kItemBytes[static_cast<size_t>(operation.dtype)];
}

/// The buffers that this rank sends to and receives from each peer.
class Routes {
 public:
  explicit Routes(const Exchange& x) : x_(x), operation_(x.operation) {
    size_t bytes = 0;
    for (int i = 0; i < operation_.outputs.count; ++i) {
      bytes += operation_.outputs[i].bytes;
      longest_own_ = std::max(longest_own_, operation_.outputs[i].bytes);
    }
    for (int i = 0; i < operation_.inputs.count; ++i)
      longest_own_ = std::max(longest_own_, operation_.inputs[i].bytes);
    streamed_ = bytes >= x_.streamed_from();
    // Others read a piece while the root writes the next one. A round of more ranks takes longer.
    if (operation_.kind == OpKind::kBroadcast && longest_own_ > kLeastPiece)
      cell_bytes_ = std::min(
          cell_bytes_,
          std::max(kLeastPiece / 2 * x_.size, std::min(align_down(longest_own_ / 4), kMostPiece)));
  }

  /// True if from here on only other ranks have data to exchange. How much, only their byte-count
  /// tables tell, which may be garbage: a rank takes part in such rounds until its deadline.
  bool idle(size_t offset) const { return offset >= longest_own_; }

  /// True if outputs are too long to stay in a cache.
  bool streamed() const { return streamed_; }

  /// True if peers get different data, so that the slot is divided among them.
  bool split() const {
    return operation_.kind == OpKind::kScatter || operation_.kind == OpKind::kAllToAll ||
           operation_.kind == OpKind::kReduceScatter;
  }
  /// The most bytes of a message that a round moves.
  size_t cell_bytes() const { return cell_bytes_; }
  /// True if a message is read from its sender's memory, and its cell only shows where it is.
  bool read_from_peer(const Buffer& message) const {
    return !through_outboxes_ && x_.shows(message.bytes);
  }
  /// Move large messages through the outboxes, too.
  void use_outboxes() { through_outboxes_ = true; }
  /// The number of what `from` shows to `to`.
  size_t shown_index(int to) const { return split() ? to : 0; }

  /// The part of the slot of `from` that has the data for `to`.
  Cell cell(int from, int to) const {
    const size_t bytes = share(x_.slot_bytes);
    return {split() ? (to - (to > from)) * bytes : 0, bytes};
  }

  Buffer outgoing(int peer) const {
    switch (operation_.kind) {
      case OpKind::kBroadcast: return root() ? operation_.outputs[0] : Buffer{};
      case OpKind::kAllGather: return operation_.inputs[0];
      case OpKind::kGather: return root() == (peer == x_.rank) ? operation_.inputs[0] : Buffer{};
      case OpKind::kScatter: return root() ? operation_.inputs[peer] : Buffer{};
      default: return operation_.inputs[peer];
    }
  }
  Buffer incoming(int peer) const {
    switch (operation_.kind) {
      case OpKind::kBroadcast: return peer == operation_.root ? operation_.outputs[0] : Buffer{};
      case OpKind::kGather: return root() ? operation_.outputs[peer] : Buffer{};
      case OpKind::kScatter: return peer == operation_.root ? operation_.outputs[0] : Buffer{};
      default: return operation_.outputs[peer];
    }
  }

 private:
  static constexpr size_t kLeastPiece = 32 * 1024, kMostPiece = 128 * 1024;

  bool root() const { return x_.rank == operation_.root; }
  /// What each message has of `bytes` bytes of a slot.
  size_t share(size_t bytes) const {
    return split() ? align_down(bytes / std::max(1, x_.size - 1)) : bytes;
  }

  const Exchange& x_;
  const Operation& operation_;
  size_t cell_bytes_ = share(x_.tunables().chunk_bytes);
  size_t longest_own_ = 0;  // the longest message that this rank sends or receives
  bool streamed_;
  bool through_outboxes_ = false;
};

}  // namespace tilework
