// Holds on the memory of torch's storages while an operation goes on that has its address. torch frees
// a storage's memory as soon as the storage gets other memory (resize_, share_memory_), however many
// tensors refer to the storage. Every torch storage carries the function that frees its memory: while it
// is held, another stands there, which leaves the memory to the last hold. Where that word stands is found
// out, and tried, by src/tilework/comm/backends/shm/memory_hold.py; no header of torch is used.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tilework {

/// The place of words within torch's storage object, in bytes, and torch's function that frees memory.
struct StorageLayout {
  size_t data, context, deleter;
  uintptr_t free_memory;
};

/// The address of torch's object for a storage of Python's.
uintptr_t address_of(nanobind::handle storage);

/// Once per process, before the first hold; no free_memory: there are no holds.
void set_storage_layout(const StorageLayout& layout);

/// What an operation writes in a storage's memory.
struct WrittenSpan {
  uintptr_t storage;  // torch's object
  uintptr_t address;
  size_t bytes;
};

/// A hold on the memory that some storages have at its beginning. Several may hold the same memory.
/// Storages whose memory is not torch's own (NumPy's, the segment's) are left alone.
class MemoryHold {
 public:
  /// `storages`: torch's, those of `written` among them. Holds nothing before the layout of storages
  /// is known.
  MemoryHold(std::vector<nanobind::object> storages, std::vector<WrittenSpan> written);
  ~MemoryHold() { release(); }
  MemoryHold(const MemoryHold&) = delete;
  MemoryHold& operator=(const MemoryHold&) = delete;

  /// Copy what was written to where storages have their memory by now, as far as that reaches.
  void copy_to_moved() const;

  /// Give the memory back: to storages that still have it, else to the system; idempotent.
  void release();

 private:
  struct Held {
    PyObject* object;  // the storage's
    uintptr_t storage, data, context;
  };
  std::vector<Held> held_;
  std::vector<WrittenSpan> written_;
  std::vector<nanobind::object> storages_;
};

}  // namespace tilework
