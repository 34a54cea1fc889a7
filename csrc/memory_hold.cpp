#include "memory_hold.h"

#include <mutex>
#include <unordered_map>

namespace tilework {
namespace {

using FreeMemory = void (*)(void*);

struct HeldMemory {
  int holds = 0;
  bool let_go = false;  // by its storage: the last hold frees it
};

/// Never destroyed: storages may outlive statics.
struct Registry {
  std::mutex mutex;  // torch frees memory on any thread, without the GIL
  std::unordered_map<uintptr_t, HeldMemory> held;  // by what torch hands to the freeing function
};

Registry& registry() {
  static auto* all = new Registry();
  return *all;
}

StorageLayout layout{};

uintptr_t& word(uintptr_t storage, size_t offset) {
  return *reinterpret_cast<uintptr_t*>(storage + offset);
}

void free_memory(uintptr_t context) {
  reinterpret_cast<FreeMemory>(layout.free_memory)(reinterpret_cast<void*>(context));
}

/// What storages have in place of torch's function while their memory is held.
void let_go(void* pointer) {
  const auto context = reinterpret_cast<uintptr_t>(pointer);
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto entry = registry().held.find(context);
    if (entry != registry().held.end()) {
      if (entry->second.holds > 0) {
        entry->second.let_go = true;
        return;
      }
      registry().held.erase(entry);  // it went to another storage while it was held
    }
  }
  free_memory(context);
}

const auto kLetGo = reinterpret_cast<uintptr_t>(&let_go);

}  // namespace

void set_storage_layout(const StorageLayout& given) { layout = given; }

MemoryHold::MemoryHold(const std::vector<uintptr_t>& storages, const nanobind::object& owners)
    : owners_(owners) {
  held_.reserve(storages.size());
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const uintptr_t storage : storages) {
    uintptr_t& deleter = word(storage, layout.deleter);
    if (deleter != layout.free_memory && deleter != kLetGo) continue;
    const uintptr_t context = word(storage, layout.context);
    if (context == 0) continue;
    ++registry().held[context].holds;
    deleter = kLetGo;
    held_.push_back({storage, word(storage, layout.data), context});
  }
}

std::vector<std::pair<uintptr_t, uintptr_t>> MemoryHold::moved() const {
  std::vector<std::pair<uintptr_t, uintptr_t>> result;
  for (const Held& held : held_)
    if (word(held.storage, layout.data) != held.data) result.emplace_back(held.storage, held.data);
  return result;
}

void MemoryHold::release() {
  for (const Held& held : held_) {
    bool is_free = false;
    {
      std::lock_guard<std::mutex> lock(registry().mutex);
      const auto entry = registry().held.find(held.context);
      if (--entry->second.holds > 0) continue;
      uintptr_t& deleter = word(held.storage, layout.deleter);
      const bool in_place = deleter == kLetGo && word(held.storage, layout.context) == held.context;
      is_free = entry->second.let_go;
      if (in_place) deleter = layout.free_memory;
      if (in_place || is_free) registry().held.erase(entry);
    }
    if (is_free) free_memory(held.context);
  }
  held_.clear();
  owners_.reset();
}

}  // namespace tilework
