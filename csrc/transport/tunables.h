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
  uint64_t chunk_bytes = 512 * 1024;         // of an outbox that a round uses, in moves
  uint64_t reduce_chunk_bytes = 512 * 1024;  // likewise in long reductions
  uint64_t one_shot_bytes = 128 * 1024;      // longest all_reduce in one round, times ranks / 2
  /// Outputs from here on are written past the caches.
  uint64_t streamed_all_gather = 4 * 1024 * 1024;
  uint64_t streamed_all_to_all = 4 * 1024 * 1024;
  uint64_t streamed_rooted = 4 * 1024 * 1024;
  uint64_t slow_outbox_ns = 256 * 1024;  // for a MiB: see outbox_stores.h
  /// Lengths of messages that are read from their senders' memory.
  SizeRange read_all_gather;
  SizeRange read_all_to_all;
  SizeRange read_rooted;      // from or to one rank
  SizeRange read_all_reduce;  // by the length of a rank's input to one result
  SizeRange read_reduce_scatter;
  SizeRange read_messages;  // of send and recv
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
    {"streamed_all_gather_bytes", offsetof(Tunables, streamed_all_gather)},
    {"streamed_all_to_all_bytes", offsetof(Tunables, streamed_all_to_all)},
    {"streamed_rooted_bytes", offsetof(Tunables, streamed_rooted)},
    {"thread_copy_bytes", offsetof(Tunables, thread_copy_bytes)},
    {"threads_apart", offsetof(Tunables, threads_apart)},
    {"slow_outbox_ns", offsetof(Tunables, slow_outbox_ns)},
    {"single_copy_all_gather_bytes", offsetof(Tunables, read_all_gather.from)},
    {"single_copy_all_gather_below_bytes", offsetof(Tunables, read_all_gather.below)},
    {"single_copy_all_to_all_bytes", offsetof(Tunables, read_all_to_all.from)},
    {"single_copy_all_to_all_below_bytes", offsetof(Tunables, read_all_to_all.below)},
    {"single_copy_rooted_bytes", offsetof(Tunables, read_rooted.from)},
    {"single_copy_rooted_below_bytes", offsetof(Tunables, read_rooted.below)},
    {"single_copy_all_reduce_bytes", offsetof(Tunables, read_all_reduce.from)},
    {"single_copy_all_reduce_below_bytes", offsetof(Tunables, read_all_reduce.below)},
    {"single_copy_reduce_scatter_bytes", offsetof(Tunables, read_reduce_scatter.from)},
    {"single_copy_reduce_scatter_below_bytes", offsetof(Tunables, read_reduce_scatter.below)},
    {"single_copy_message_bytes", offsetof(Tunables, read_messages.from)},
    {"single_copy_message_below_bytes", offsetof(Tunables, read_messages.below)},
};
static_assert(sizeof kTunableFields / sizeof *kTunableFields == sizeof(Tunables) / sizeof(uint64_t),
              "each has a name");

}  // namespace tilework
