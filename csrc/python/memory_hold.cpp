#include "python/memory_hold.h"

#include <string.h>

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

uintptr_t address_of(nanobind::handle storage) {
  static PyObject* const name = PyUnicode_InternFromString("_cdata");
  PyObject* const number = PyObject_GetAttr(storage.ptr(), name);
  const uintptr_t address = number ? PyLong_AsSize_t(number) : 0;
  Py_XDECREF(number);
  if (PyErr_Occurred()) throw nanobind::python_error();
  return address;
}

MemoryHold::MemoryHold(std::vector<nanobind::object> storages, std::vector<WrittenSpan> written) {
  if (layout.free_memory == 0) return;
  storages_ = std::move(storages);
  written_ = std::move(written);
  std::vector<Held> all;
  all.reserve(storages_.size());
  held_.reserve(storages_.size());
  for (const nanobind::object& storage : storages_)
    all.push_back({storage.ptr(), address_of(storage), 0, 0});
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (Held& each : all) {
    uintptr_t& deleter = word(each.storage, layout.deleter);
    if (deleter != layout.free_memory && deleter != kLetGo) continue;
    each.context = word(each.storage, layout.context);
    if (each.context == 0) continue;
    ++registry().held[each.context].holds;
    deleter = kLetGo;
    each.data = word(each.storage, layout.data);
    held_.push_back(each);
  }
}

void MemoryHold::copy_to_moved() const {
  for (const Held& held : held_) {
    const uintptr_t data = word(held.storage, layout.data);
    if (data == held.data) continue;
    const nanobind::object length = nanobind::borrow(held.object).attr("nbytes")();
    const auto room = nanobind::cast<size_t>(length);
    for (const WrittenSpan& span : written_) {
      if (span.storage != held.storage) continue;
      const size_t offset = span.address - held.data;
      if (offset + span.bytes > room) continue;
      memmove(reinterpret_cast<void*>(data + offset), reinterpret_cast<const void*>(span.address),
              span.bytes);
    }
  }
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
  storages_.clear();
}

}  // namespace tilework
