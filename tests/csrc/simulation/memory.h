// The memory that ranks share, as C++ sees it.
//
// An atomic variable there keeps its last stores. A load may return any of them that the memory
// model lets it return, so an order that is too weak shows as a value that is too old. Plain memory,
// there and in the callers' buffers, is watched for races: two accesses, one of them a write, of
// which neither happened before the other. Values need not be wrong for that, nor need the two come
// close to each other in the run.
//
// Sequentially consistent operations take effect in the order in which the schedule runs them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "clocks.h"
#include "schedule.h"

/// The C library's memset, which the simulation does not watch.
extern "C" void* __real_memset(void* to, int value, size_t bytes);

namespace tilework::simulation {

/// A byte of a file that ranks map, wherever they map it; see names.h.
using Place = uint64_t;

class Memory {
 public:
  /// Watch a mapping of bytes from `place` on. Several mappings, one for each rank, may show the same
  /// bytes. The latest of those that overlap counts.
  void watch(const void* begin, size_t bytes, Place place);
  void unwatch(const void* begin, size_t bytes);
  /// The place that an address shows; 0 if it is not watched.
  Place place_of(const void* address) const;

  /// A plain access; fails the schedule if it is a race.
  void access(const void* address, size_t bytes, bool is_write, const void* code);

  uint64_t load(const void* address, uint64_t newest, std::memory_order order);
  /// Before a store, or with `reads` a read-modify-write, of `value`.
  void store(const void* address, uint64_t old, uint64_t value, std::memory_order order,
             bool reads);
  void fence(std::memory_order order);

  /// What one fiber did before `release` happens before what another does after `acquire`.
  void release(const void* address);
  void acquire(const void* address);
  /// All that a fiber has done happens before what the current one does next.
  void join(const Fiber& ended);

 private:
  struct Range {
    const char *begin, *end;
    Place place;
  };
  struct Store {
    uint64_t value;
    Epoch epoch;
    uint64_t turn;  // among what is sequentially consistent; 0: it is not
    bool releases;
    Clock released;  // what an acquiring load of this gets to know
  };
  struct Variable {
    uint64_t first = 0;  // the number of stores[0]
    std::vector<Store> stores;
    uint64_t seen[kMostFibers] = {};  // the newest that each fiber has seen
  };
  /// The last accesses to a few bytes.
  struct Cell {
    static constexpr int kReads = 4;
    Epoch write{0, 0};
    Epoch reads[kReads] = {};
    const void* write_code = nullptr;
    const void* read_codes[kReads] = {};
  };

  Variable& variable(Place place, uint64_t value);
  bool is_visible(const Store& store, std::memory_order order) const;
  void report_race(Place place, bool is_write, const void* code, Epoch other, bool other_is_write,
                   const void* other_code);
  void check_cell(Cell& cell, Place place, bool is_write, const void* code);

  std::vector<Range> ranges_;                    // the latest last
  const char *low_ = nullptr, *high_ = nullptr;  // of all ranges
  std::unordered_map<Place, std::vector<Cell>> pages_;
  std::unordered_map<Place, Variable> variables_;
  std::unordered_map<const void*, Clock> released_;  // of locks, and of atomics elsewhere
  Clock fences_;       // what happened before the sequentially consistent fences
  uint64_t turn_ = 1;  // of the last sequentially consistent store or fence
};

/// The memory of the trial that is running.
Memory& memory();
/// Forget everything, for a new trial.
void reset_memory();

}  // namespace tilework::simulation
