// Holds on the memory of torch's storages while an operation goes on that has its address. torch frees
// a storage's memory as soon as the storage gets other memory (resize_, share_memory_), however many
// tensors refer to the storage. Every torch storage carries the function that frees its memory: while it
// is held, another stands there, which leaves the memory to the last hold. Where that word stands is found
// out, and tried, by src/tilework/comm/backends/memory_hold.py; no header of torch is used.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tilework {

/// The place of words within torch's storage object, in bytes, and torch's function that frees memory.
struct StorageLayout {
  size_t data, context, deleter;
  uintptr_t free_memory;
};

/// Once per process, before the first hold.
void set_storage_layout(const StorageLayout& layout);

/// A hold on the memory that some storages have at its beginning. Several may hold the same memory.
/// Storages whose memory is not torch's own (NumPy's, the segment's) are left alone.
class MemoryHold {
 public:
  /// `storages`: addresses of torch's objects, which `owners` keeps alive.
  MemoryHold(const std::vector<uintptr_t>& storages, const nanobind::object& owners);
  ~MemoryHold() { release(); }
  MemoryHold(const MemoryHold&) = delete;
  MemoryHold& operator=(const MemoryHold&) = delete;

  /// The storages that have other memory by now, each with the address of the memory that it had.
  std::vector<std::pair<uintptr_t, uintptr_t>> moved() const;

  /// Give the memory back: to storages that still have it, else to the system; idempotent.
  void release();

 private:
  struct Held {
    uintptr_t storage, data, context;
  };
  std::vector<Held> held_;
  nanobind::object owners_;
};

}  // namespace tilework
