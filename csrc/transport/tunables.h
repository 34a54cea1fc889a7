// Sizes at which one algorithm takes over from another. They are measured per host
// (src/tilework/comm/backends/shm/calibration.py) and written into a segment by the rank that makes it, so
// that all ranks of a group use the same. The bits of results do not depend on them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilework {

/// Larger than any message: the algorithm is not used.
constexpr uint64_t kNeverBytes = uint64_t{1} << 60;

/// Lengths of messages, from one on and below another.
struct SizeRange {
  uint64_t from = kNeverBytes, below = kNeverBytes;

  bool contains(uint64_t bytes) const { return bytes >= from && bytes < below; }
  bool empty() const { return from >= below; }
};

struct Tunables {
  uint64_t chunk_bytes = 512 * 1024;          // of an outbox that a round uses, in moves
  uint64_t reduce_chunk_bytes = 512 * 1024;   // likewise in long reductions
  uint64_t one_shot_bytes = 128 * 1024;       // longest all_reduce of two ranks in one round
  uint64_t streamed_bytes = 4 * 1024 * 1024;  // outputs from here on are written past the caches
  uint64_t slow_outbox_ns = 256 * 1024;       // for a MiB: see outbox_stores.h
  /// Lengths of messages that are read from their senders' memory.
  SizeRange read_moves;         // that all ranks take part in alike
  SizeRange read_rooted_moves;  // from or to one rank
  SizeRange read_reductions;    // by the length of a rank's input to one result
  SizeRange read_messages;      // of send and recv
  /// 1: threads of one process read each other as processes do, for calibration and tests.
  uint64_t threads_apart = 0;
  /// Where all ranks share a process, they read each other's memory from here on.
  uint64_t thread_copy_bytes = 64 * 1024;
};

struct TunableField {
  const char* name;
  size_t offset;

  uint64_t& of(Tunables& tunables) const {
    return *reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(&tunables) + offset);
  }
};
constexpr TunableField kTunableFields[] = {
    {"chunk_bytes", offsetof(Tunables, chunk_bytes)},
    {"reduce_chunk_bytes", offsetof(Tunables, reduce_chunk_bytes)},
    {"one_shot_bytes", offsetof(Tunables, one_shot_bytes)},
    {"streamed_bytes", offsetof(Tunables, streamed_bytes)},
    {"thread_copy_bytes", offsetof(Tunables, thread_copy_bytes)},
    {"threads_apart", offsetof(Tunables, threads_apart)},
    {"slow_outbox_ns", offsetof(Tunables, slow_outbox_ns)},
    {"single_copy_bytes", offsetof(Tunables, read_moves.from)},
    {"single_copy_below_bytes", offsetof(Tunables, read_moves.below)},
    {"single_copy_rooted_bytes", offsetof(Tunables, read_rooted_moves.from)},
    {"single_copy_rooted_below_bytes", offsetof(Tunables, read_rooted_moves.below)},
    {"single_copy_reduce_bytes", offsetof(Tunables, read_reductions.from)},
    {"single_copy_reduce_below_bytes", offsetof(Tunables, read_reductions.below)},
    {"single_copy_message_bytes", offsetof(Tunables, read_messages.from)},
    {"single_copy_message_below_bytes", offsetof(Tunables, read_messages.below)},
};
static_assert(sizeof kTunableFields / sizeof *kTunableFields == sizeof(Tunables) / sizeof(uint64_t),
              "each has a name");

}  // namespace tilework
