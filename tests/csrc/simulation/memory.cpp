#include "memory.h"

#include <algorithm>
#include <memory>

#include "names.h"

namespace tilework::simulation {
namespace {

constexpr size_t kCellBytes = 4;
constexpr size_t kCellsOfPage = 1024;
constexpr size_t kStoresKept = 6;

std::unique_ptr<Memory> current = std::make_unique<Memory>();

bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_consume ||
         order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}

Fiber& self() { return Schedule::running()->current(); }

/// This moment of the current fiber.
Epoch this_moment() {
  const Fiber& fiber = self();
  return {static_cast<uint32_t>(fiber.number), fiber.clocks.past.times[fiber.number]};
}

/// Whatever this fiber does from here on is later than what it has released.
void begin_next_moment() {
  Fiber& fiber = self();
  ++fiber.clocks.past.times[fiber.number];
  fiber.clocks.visible.join(fiber.clocks.past);
}

void learn(const Clock& clock) {
  self().clocks.past.join(clock);
  self().clocks.visible.join(clock);
}

}  // namespace

Memory& memory() { return *current; }
void reset_memory() { current = std::make_unique<Memory>(); }

// ---- mappings --------------------------------------------------------------------------------

void Memory::watch(const void* begin, size_t bytes, Place place) {
  const auto* first = static_cast<const char*>(begin);
  ranges_.push_back({first, first + bytes, place});
  low_ = low_ ? std::min(low_, first) : first;
  high_ = std::max(high_, first + bytes);
}

void Memory::unwatch(const void* begin, size_t bytes) {
  const auto* first = static_cast<const char*>(begin);
  ranges_.erase(std::remove_if(ranges_.begin(), ranges_.end(),
                               [&](const Range& range) {
                                 return range.begin >= first && range.end <= first + bytes;
                               }),
                ranges_.end());
}

Place Memory::place_of(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  if (at < low_ || at >= high_) return 0;
  for (auto range = ranges_.rbegin(); range != ranges_.rend(); ++range)
    if (at >= range->begin && at < range->end) return range->place + (at - range->begin);
  return 0;
}

// ---- plain memory ----------------------------------------------------------------------------

void Memory::access(const void* address, size_t bytes, bool is_write, const void* code) {
  const Place place = bytes == 0 ? 0 : place_of(address);
  if (place == 0) return;
  const Place end = (place + bytes - 1) / kCellBytes + 1;
  for (Place cell = place / kCellBytes; cell < end;) {
    auto& page = pages_[cell / kCellsOfPage];
    if (page.empty()) page.resize(kCellsOfPage);
    const Place stop = std::min(end, (cell / kCellsOfPage + 1) * kCellsOfPage);
    for (; cell < stop; ++cell)
      check_cell(page[cell % kCellsOfPage], cell * kCellBytes, is_write, code);
  }
}

void Memory::check_cell(Cell& cell, Place place, bool is_write, const void* code) {
  const Epoch now = this_moment();
  const Clock& past = self().clocks.past;
  if (!past.covers(cell.write))
    report_race(place, is_write, code, cell.write, true, cell.write_code);
  if (is_write) {
    for (int i = 0; i < Cell::kReads; ++i)
      if (!past.covers(cell.reads[i]))
        report_race(place, true, code, cell.reads[i], false, cell.read_codes[i]);
    cell = Cell{};
    cell.write = now;
    cell.write_code = code;
    return;
  }
  // In place of one that happened before this read, or of any.
  int slot = static_cast<int>(now.time % Cell::kReads);
  for (int i = 0; i < Cell::kReads; ++i)
    if (past.covers(cell.reads[i])) slot = i;
  cell.reads[slot] = now;
  cell.read_codes[slot] = code;
}

void Memory::report_race(Place place, bool is_write, const void* code, Epoch other,
                         bool other_is_write, const void* other_code) {
  Schedule& schedule = *Schedule::running();
  const Fiber& before = *schedule.fibers()[other.fiber];
  schedule.fail("data race on " + name_of(place) + ": rank " +
                std::to_string(schedule.current().rank) + (is_write ? " writes" : " reads") +
                " it at " + code_place(code) + ", and nothing orders that after rank " +
                std::to_string(before.rank) + "'s " + (other_is_write ? "write" : "read") + " at " +
                code_place(other_code));
}

// ---- atomic variables ------------------------------------------------------------------------

Memory::Variable& Memory::variable(Place place, uint64_t value) {
  Variable& result = variables_[place];
  if (result.stores.empty())
    result.stores.push_back({value, {0, 0}, 1, false, {}});  // as it was made
  return result;
}

/// True if the current fiber cannot load a value older than this store's. Of the order in which all
/// sequentially consistent operations and fences happen, only what the fiber's own fences and those
/// before a sequentially consistent load imply is asked for ([atomics.order], C++20).
bool Memory::is_visible(const Store& store, std::memory_order order) const {
  const ThreadClocks& clocks = self().clocks;
  if (clocks.visible.covers(store.epoch)) return true;
  if (store.turn > 0 && store.turn < clocks.fence_turn) return true;
  return order == std::memory_order_seq_cst && (store.turn > 0 || fences_.covers(store.epoch));
}

uint64_t Memory::load(const void* address, uint64_t newest, std::memory_order order) {
  const Place place = place_of(address);
  if (place == 0) {
    if (acquires(order)) acquire(address);
    return newest;
  }
  Fiber& fiber = self();
  Variable& at = variable(place, newest);
  const uint64_t last = at.first + at.stores.size() - 1;
  uint64_t oldest = std::max(at.first, at.seen[fiber.number]);
  for (uint64_t i = last; i > oldest; --i) {
    const Store& store = at.stores[i - at.first];
    if (is_visible(store, order)) {
      oldest = i;
      break;
    }
  }
  Random& random = Schedule::running()->random();
  uint64_t chosen = last;
  if (oldest < last && random.once_in(Schedule::running()->policy().stale_one_in))
    chosen = oldest + random.below(last - oldest + 1);
  at.seen[fiber.number] = chosen;
  const Store& store = at.stores[chosen - at.first];
  if (store.releases) {
    if (acquires(order))
      learn(store.released);
    else
      fiber.clocks.to_acquire.join(store.released);
  }
  return store.value;
}

void Memory::store(const void* address, uint64_t old, uint64_t value, std::memory_order order,
                   bool reads) {
  const Place place = place_of(address);
  if (place == 0) {
    if (reads && acquires(order)) acquire(address);
    if (releases(order)) release(address);
    return;
  }
  Fiber& fiber = self();
  Variable& at = variable(place, old);
  Store next{value, {}, order == std::memory_order_seq_cst ? ++turn_ : 0, false, {}};
  if (reads) {  // it goes on with the release sequence of what it read
    const Store& before = at.stores.back();
    if (before.releases && acquires(order)) learn(before.released);
    if (before.releases && !acquires(order)) fiber.clocks.to_acquire.join(before.released);
    next.releases = before.releases;
    next.released = before.released;
  }
  next.epoch = this_moment();
  if (releases(order)) {
    next.releases = true;
    next.released.join(fiber.clocks.past);
  } else {
    next.releases |= fiber.clocks.for_release.times[fiber.number] > 0;
    next.released.join(fiber.clocks.for_release);
  }
  if (at.stores.size() == kStoresKept) {
    at.stores.erase(at.stores.begin());
    ++at.first;
  }
  at.stores.push_back(next);
  at.seen[fiber.number] = at.first + at.stores.size() - 1;
  begin_next_moment();
}

void Memory::fence(std::memory_order order) {
  ThreadClocks& clocks = self().clocks;
  if (acquires(order)) learn(clocks.to_acquire);
  if (releases(order)) {
    clocks.for_release = clocks.past;
    begin_next_moment();
  }
  if (order != std::memory_order_seq_cst) return;
  clocks.fence_turn = ++turn_;
  fences_.join(clocks.past);
  clocks.visible.join(fences_);
}

void Memory::release(const void* address) {
  released_[address].join(self().clocks.past);
  begin_next_moment();
}

void Memory::acquire(const void* address) {
  const auto found = released_.find(address);
  if (found != released_.end()) learn(found->second);
}

void Memory::join(const Fiber& ended) { learn(ended.clocks.past); }

}  // namespace tilework::simulation
