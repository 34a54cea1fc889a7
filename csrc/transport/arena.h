// Buffers in the segment. Each rank has an arena there, from which it allocates memory for tensors;
// peers read (and in an all_reduce write) them in place, which saves the copies into and out of
// outboxes. Arenas are sparse: their size costs address space only, and is mapped on first use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace tilework {

/// A mapped range of a file; unmapped when destroyed.
class Mapping {
 public:
  /// Throws std::system_error. `huge`: in huge pages, if the kernel has them for shared memory.
  Mapping(int fd, size_t offset, size_t bytes, bool huge = false);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* base() const { return base_; }

 private:
  char* base_;
  size_t bytes_;
};

/// A rank's own arena. Outlives the group as long as its buffers do.
class Arena {
 public:
  /// Takes ownership of `fd`. The arena is `bytes` from `offset` of the file.
  Arena(int fd, size_t offset, size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Memory for `bytes`, aligned to 64; null if there is no room.
  char* allocate(size_t bytes);
  void release(char* memory);
  size_t used_bytes() const;

  /// True if [data, data + bytes) lies in the arena, with its offset.
  bool locate(const char* data, size_t bytes, uint64_t& offset) const;

  /// Replace the pages of [data, data + bytes) by private copies: what a peer still writes goes to
  /// the file, which nobody reads any more. Other threads may use the memory meanwhile.
  void detach(const char* data, size_t bytes);

 private:
  void punch_hole(size_t from, size_t to);

  const int fd_;
  const size_t offset_, bytes_;
  const unsigned generation_;
  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<Mapping> mapping_;
  std::map<size_t, size_t> free_, taken_;  // begin to end
  size_t used_ = 0, idle_ = 0;             // bytes taken; bytes freed whose pages are still held
};

}  // namespace tilework
