// Sizes at which one algorithm takes over from another. They are measured per host
// (src/tilework/comm/backends/calibration.py) and written into a segment by the rank that makes it, so
// that all ranks of a group use the same. The bits of results do not depend on them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilework {

/// Larger than any message: the algorithm is not used.
constexpr uint64_t kNeverBytes = uint64_t{1} << 60;

struct Tunables {
  uint64_t chunk_bytes = 512 * 1024;          // of an outbox that a round uses, in moves
  uint64_t reduce_chunk_bytes = 512 * 1024;   // likewise in long reductions
  uint64_t one_shot_bytes = 128 * 1024;       // longest all_reduce of two ranks in one round
  uint64_t streamed_bytes = 4 * 1024 * 1024;  // outputs from here on are written past the caches
  uint64_t single_copy_bytes = kNeverBytes;   // messages from here on are read from peers' memory
  uint64_t single_copy_rooted_bytes =
      kNeverBytes;  // likewise those that only one rank sends or receives
  uint64_t single_copy_reduce_bytes = kNeverBytes;  // likewise the inputs of reductions
  /// 1: threads of one process read each other as processes do, for calibration and tests.
  uint64_t threads_apart = 0;
  uint64_t thread_copy_bytes = 64 * 1024;  // the same, both, where all ranks share a process
};

struct TunableField {
  const char* name;
  uint64_t Tunables::* value;
};
constexpr TunableField kTunableFields[] = {
    {"chunk_bytes", &Tunables::chunk_bytes},
    {"reduce_chunk_bytes", &Tunables::reduce_chunk_bytes},
    {"one_shot_bytes", &Tunables::one_shot_bytes},
    {"streamed_bytes", &Tunables::streamed_bytes},
    {"single_copy_bytes", &Tunables::single_copy_bytes},
    {"single_copy_rooted_bytes", &Tunables::single_copy_rooted_bytes},
    {"single_copy_reduce_bytes", &Tunables::single_copy_reduce_bytes},
    {"thread_copy_bytes", &Tunables::thread_copy_bytes},
    {"threads_apart", &Tunables::threads_apart},
};

}  // namespace tilework
