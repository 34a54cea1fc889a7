// Buffers that live in the segment. Each rank's part of the segment ends in an arena, from which
// it takes memory for tensors; peers read (and in an all_reduce write) them where they are, which
// saves the copies into and out of outboxes. Arenas are sparse: their room costs address space
// only, and is mapped when it is first needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace tilework {

/// A piece of a file, mapped; unmapped at the end.
class Mapping {
 public:
  Mapping(int fd, size_t offset, size_t bytes);  // throws std::system_error
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_;
};

/// A rank's own arena. Outlives the group while its buffers live.
class Arena {
 public:
  /// Takes over `fd`. The room is `bytes` from `offset` of the file.
  Arena(int fd, size_t offset, size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Memory for `bytes`, aligned to 64; null where there is no room left.
  char* allocate(size_t bytes);
  void release(char* memory);
  size_t used_bytes() const;

  /// Whether all of [data, data + bytes) is here, and where.
  bool locate(const char* data, size_t bytes, uint64_t& offset) const;

 private:
  void give_back(size_t from, size_t to);

  const int fd_;
  const size_t offset_, bytes_;
  const unsigned generation_;
  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<Mapping> mapping_;
  std::map<size_t, size_t> free_, taken_;  // begin to end
  size_t used_ = 0, idle_ = 0;             // bytes taken; bytes freed but not given back
};

}  // namespace tilework
