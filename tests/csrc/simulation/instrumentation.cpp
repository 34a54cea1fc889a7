// What the compiler calls at each access to memory (-fsanitize=thread). Its own runtime is not
// linked; these functions take its place.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "memory.h"

namespace tilework::simulation {
namespace {

constexpr size_t kLongCopyBytes = 64;  // from here on others may come before a copy

// The compiler's numbers for memory orders are those of the enumeration.
std::memory_order order_of(int number) { return static_cast<std::memory_order>(number); }

template <class T>
uint64_t bits(T value) {
  uint64_t result = 0;
  memcpy(&result, &value, sizeof value);
  return result;
}

template <class T>
T load(const volatile void* address, int order, const void* code) {
  auto* at = const_cast<T*>(static_cast<const volatile T*>(address));
  Schedule* schedule = Schedule::running();
  if (!schedule) return *at;
  schedule->point();
  const T value = static_cast<T>(memory().load(at, bits(*at), order_of(order)));
  schedule->record("load", memory().place_of(at), bits(value), code);
  return value;
}

template <class T>
void store(volatile void* address, T value, int order, const void* code) {
  auto* at = const_cast<T*>(static_cast<volatile T*>(address));
  if (Schedule* schedule = Schedule::running()) {
    schedule->point();
    memory().store(at, bits(*at), bits(value), order_of(order), false);
    schedule->record("store", memory().place_of(at), bits(value), code);
  }
  *at = value;
}

/// Read, and replace what was read by update(it). Returns what was read.
template <class T, class Update>
T exchange(volatile void* address, int order, const void* code, Update&& update) {
  auto* at = const_cast<T*>(static_cast<volatile T*>(address));
  Schedule* schedule = Schedule::running();
  if (schedule) schedule->point();
  const T before = *at;
  const T after = update(before);
  if (schedule) {
    memory().store(at, bits(before), bits(after), order_of(order), true);
    schedule->record("update", memory().place_of(at), bits(after), code);
  }
  *at = after;
  return before;
}

template <class T>
int compare_exchange(volatile void* address, T* expected, T desired, int order, int failed_order,
                     const void* code) {
  auto* at = const_cast<T*>(static_cast<volatile T*>(address));
  Schedule* schedule = Schedule::running();
  if (schedule) schedule->point();
  const T before = *at;
  if (before == *expected) {
    if (schedule) memory().store(at, bits(before), bits(desired), order_of(order), true);
    *at = desired;
  } else if (schedule) {
    memory().load(at, bits(before), order_of(failed_order));
  }
  if (schedule) schedule->record("compare and update", memory().place_of(at), bits(*at), code);
  const bool done = before == *expected;
  *expected = before;
  return done;
}

void access(const void* address, size_t bytes, bool is_write, const void* code) {
  if (Schedule::running()) memory().access(address, bytes, is_write, code);
}

/// Before a copy: others may do something first, and both sides are accessed.
void copying(const void* to, const void* from, size_t bytes, const void* code) {
  Schedule* schedule = Schedule::running();
  if (!schedule || bytes == 0) return;
  const Place target = memory().place_of(to), source = from ? memory().place_of(from) : 0;
  if (bytes >= kLongCopyBytes && (target || source)) {
    schedule->point();
    if (source) schedule->record("copy from", source, bytes, code);
    if (target) schedule->record(from ? "copy to" : "fill", target, bytes, code);
  }
  if (from) memory().access(from, bytes, false, code);
  memory().access(to, bytes, true, code);
}

}  // namespace
}  // namespace tilework::simulation

#define CODE __builtin_return_address(0)

extern "C" {

using namespace tilework::simulation;

void* __real_memcpy(void*, const void*, size_t);
void* __real_memmove(void*, const void*, size_t);

void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  copying(to, from, bytes, CODE);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  copying(to, from, bytes, CODE);
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  copying(to, nullptr, bytes, CODE);
  return __real_memset(to, value, bytes);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_read_range(void* at, long bytes) { access(at, bytes, false, CODE); }
void __tsan_write_range(void* at, long bytes) { access(at, bytes, true, CODE); }

#define ACCESSES(bytes)                                                           \
  void __tsan_read##bytes(void* at) { access(at, bytes, false, CODE); }           \
  void __tsan_write##bytes(void* at) { access(at, bytes, true, CODE); }           \
  void __tsan_unaligned_read##bytes(void* at) { access(at, bytes, false, CODE); } \
  void __tsan_unaligned_write##bytes(void* at) { access(at, bytes, true, CODE); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

#define ATOMICS(size, T)                                                                       \
  T __tsan_atomic##size##_load(const volatile void* at, int order) {                           \
    return load<T>(at, order, CODE);                                                           \
  }                                                                                            \
  void __tsan_atomic##size##_store(volatile void* at, T value, int order) {                    \
    store<T>(at, value, order, CODE);                                                          \
  }                                                                                            \
  T __tsan_atomic##size##_exchange(volatile void* at, T value, int order) {                    \
    return exchange<T>(at, order, CODE, [=](T) { return value; });                             \
  }                                                                                            \
  T __tsan_atomic##size##_fetch_add(volatile void* at, T value, int order) {                   \
    return exchange<T>(at, order, CODE, [=](T x) { return static_cast<T>(x + value); });       \
  }                                                                                            \
  T __tsan_atomic##size##_fetch_sub(volatile void* at, T value, int order) {                   \
    return exchange<T>(at, order, CODE, [=](T x) { return static_cast<T>(x - value); });       \
  }                                                                                            \
  T __tsan_atomic##size##_fetch_or(volatile void* at, T value, int order) {                    \
    return exchange<T>(at, order, CODE, [=](T x) { return static_cast<T>(x | value); });       \
  }                                                                                            \
  T __tsan_atomic##size##_fetch_and(volatile void* at, T value, int order) {                   \
    return exchange<T>(at, order, CODE, [=](T x) { return static_cast<T>(x & value); });       \
  }                                                                                            \
  T __tsan_atomic##size##_fetch_xor(volatile void* at, T value, int order) {                   \
    return exchange<T>(at, order, CODE, [=](T x) { return static_cast<T>(x ^ value); });       \
  }                                                                                            \
  int __tsan_atomic##size##_compare_exchange_strong(volatile void* at, T* expected, T desired, \
                                                    int order, int failed_order) {             \
    return compare_exchange<T>(at, expected, desired, order, failed_order, CODE);              \
  }                                                                                            \
  int __tsan_atomic##size##_compare_exchange_weak(volatile void* at, T* expected, T desired,   \
                                                  int order, int failed_order) {               \
    return compare_exchange<T>(at, expected, desired, order, failed_order, CODE);              \
  }
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

void __tsan_atomic_thread_fence(int order) {
  if (Schedule* schedule = Schedule::running()) {
    schedule->point();
    memory().fence(order_of(order));
    schedule->record("fence", 0, static_cast<uint64_t>(order), CODE);
  }
}
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
