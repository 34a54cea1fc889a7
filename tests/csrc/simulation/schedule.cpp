#include "schedule.h"

#include <cxxabi.h>
#include <link.h>
#include <string.h>

#include <exception>
#include <stdexcept>

namespace tilework::simulation {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kEventsKept = 4096;
constexpr size_t kExceptionBytes = 2 * sizeof(void*);  // __cxa_eh_globals
constexpr uint64_t kMostPoints = 5'000'000;
constexpr uint64_t kMostInARow = 3'000;  // points of one fiber while others are ready

/// This program's thread_local variables, which all fibers would share otherwise.
struct Locals {
  char* data = nullptr;
  size_t bytes = 0;
};

Locals find_program_locals() {
  Locals result;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        auto* locals = static_cast<Locals*>(found);
        for (int i = 0; i < info->dlpi_phnum; ++i)
          if (info->dlpi_phdr[i].p_type == PT_TLS) {
            locals->data = static_cast<char*>(info->dlpi_tls_data);
            locals->bytes = info->dlpi_phdr[i].p_memsz;
          }
        return 1;  // the program itself comes first, and is all
      },
      &result);
  return result;
}

const Locals& program_locals() {
  static const Locals locals = find_program_locals();
  return locals;
}

}  // namespace

Schedule* Schedule::running_ = nullptr;

Schedule::Schedule(uint64_t seed, const Policy& policy) : random_(seed), policy_(policy) {
  events_.reserve(kEventsKept);
}

Schedule::~Schedule() = default;

Fiber& Schedule::spawn(int rank, std::function<void()> body) {
  const int number = static_cast<int>(fibers_.size());
  if (number == kMostFibers) throw std::logic_error("too many fibers for one trial");
  auto fiber = std::make_unique<Fiber>();
  fiber->number = number;
  fiber->rank = rank;
  fiber->body = std::move(body);
  fiber->priority = (uint64_t{1} << 32) + random_.below(1 << 20);
  fiber->stack.reset(new char[kStackBytes]);  // not cleared
  fiber->locals.resize(program_locals().bytes);
  fiber->exceptions = std::make_unique<char[]>(kExceptionBytes);
  if (current_) {
    fiber->clocks.past = current_->clocks.past;
    fiber->clocks.visible = current_->clocks.visible;
    ++current_->clocks.past.times[current_->number];
  }
  fiber->clocks.past.times[number] = 1;
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, &Schedule::enter, 0);
  fibers_.push_back(std::move(fiber));
  return *fibers_.back();
}

/// The first function on each fiber's stack.
void Schedule::enter() {
  Schedule& schedule = *running_;
  Fiber& self = *schedule.current_;
  try {
    self.body();
  } catch (const std::exception& error) {
    schedule.fail("rank " + std::to_string(self.rank) + " raised: " + error.what());
  }
  self.state = Fiber::State::kDone;
  schedule.wake(reinterpret_cast<uint64_t>(&self), true);
  schedule.leave();
}

std::string Schedule::run() {
  running_ = this;
  const Locals& locals = program_locals();
  std::vector<char> own(locals.data, locals.data + locals.bytes);
  switch_to(choose());
  memcpy(locals.data, own.data(), own.size());
  memset(static_cast<void*>(abi::__cxa_get_globals()), 0, kExceptionBytes);
  running_ = nullptr;
  current_ = nullptr;
  return failure_;
}

void Schedule::fail(const std::string& text) {
  if (failure_.empty()) failure_ = text;
  over_ = true;
  if (current_ && current_->state == Fiber::State::kReady) leave();
}

void Schedule::record(const char* what, uint64_t place, uint64_t value, const void* code) {
  const Event event{points_, now_, current_->number, current_->rank, what, place, value, code};
  if (events_.size() < kEventsKept)
    events_.push_back(event);
  else
    events_[recorded_ % kEventsKept] = event;
  ++recorded_;
}

std::vector<Event> Schedule::events() const {
  if (recorded_ <= kEventsKept) return events_;
  std::vector<Event> result = events_;
  std::rotate(result.begin(), result.begin() + recorded_ % kEventsKept, result.end());
  return result;
}

void Schedule::strike_at(int rank, uint64_t point, int64_t ns) {
  victim_ = rank;
  strikes_at_point_ = point;
  stop_ns_ = ns;
}

void Schedule::strike() {
  struck_at_ = now_;
  slices_allowed_ = true;
  if (stop_ns_ != kNever) {
    stopped_until_ = now_ + stop_ns_;
    return;
  }
  for (const auto& fiber : fibers_) {
    if (fiber->rank == victim_ && fiber->state != Fiber::State::kDone)
      fiber->state = Fiber::State::kDead;
    // Waits for what a dead thread holds look again.
    if (fiber->state == Fiber::State::kWaiting && fiber->wait.is_sleep &&
        fiber->wait.until == kNever)
      fiber->state = Fiber::State::kReady;
  }
}

void Schedule::point() {
  if (++points_ > kMostPoints) fail("no end in sight after " + std::to_string(points_) + " steps");
  const bool struck = victim_ >= 0 && struck_at_ < 0 && points_ >= strikes_at_point_;
  if (struck) strike();
  const bool change = random_.once_in(policy_.one_in);
  if (policy_.priorities && (change || ++in_a_row_ > kMostInARow))
    current_->priority = random_.below(1 << 20);
  if (struck || change || policy_.priorities) switch_to(choose());
}

void Schedule::yield() {
  ++points_;
  current_->priority = random_.below(1 << 20);
  switch_to(choose());
}

bool Schedule::wait(const Wait& wait) {
  ++points_;
  current_->wait = wait;
  current_->timed_out = false;
  current_->state = Fiber::State::kWaiting;
  switch_to(choose());
  return !current_->timed_out;
}

void Schedule::wake(uint64_t address, bool all) {
  for (const auto& fiber : fibers_) {
    if (fiber->state != Fiber::State::kWaiting || fiber->wait.address != address) continue;
    fiber->state = Fiber::State::kReady;
    if (!all) return;
  }
}

/// Wake the fiber whose moment comes first, or let a stopped rank go on; false if there is neither.
bool Schedule::pass_time() {
  Fiber* first = nullptr;
  bool any_stopped = false;
  for (const auto& fiber : fibers_) {
    any_stopped |= fiber->state != Fiber::State::kDone && stopped(*fiber);
    if (fiber->state == Fiber::State::kWaiting && fiber->wait.until != kNever && !stopped(*fiber) &&
        (!first || fiber->wait.until < first->wait.until))
      first = fiber.get();
  }
  if (any_stopped && (!first || first->wait.until >= stopped_until_)) {
    now_ = stopped_until_;
    return true;
  }
  if (!first) return false;
  now_ = std::max(now_, first->wait.until);
  first->timed_out = true;
  first->state = Fiber::State::kReady;
  if (first->wait.is_sleep || slices_allowed_) return true;
  failure_ = "rank " + std::to_string(first->rank) +
             " was not woken: all ranks slept, until its slice of waiting ended";
  over_ = true;
  return true;
}

/// The fiber that goes on; null once all have ended, or the run is over.
Fiber* Schedule::choose() {
  for (;;) {
    if (over_) return nullptr;
    std::vector<Fiber*> ready;
    bool waiting = false;
    for (const auto& fiber : fibers_) {
      const bool ends = fiber->state == Fiber::State::kDone || fiber->state == Fiber::State::kDead;
      if (fiber->state == Fiber::State::kReady && !stopped(*fiber)) ready.push_back(fiber.get());
      waiting |= !ends;
    }
    if (!ready.empty()) {
      if (!policy_.priorities) return random_.among(ready);
      return *std::max_element(ready.begin(), ready.end(), [](const Fiber* a, const Fiber* b) {
        return a->priority < b->priority;
      });
    }
    if (!waiting) return nullptr;
    if (!pass_time()) {
      if (failure_.empty()) failure_ = "deadlock: every thread waits, and none will be woken";
      over_ = true;
    }
  }
}

void Schedule::switch_to(Fiber* next) {
  if (next == current_ && next) return;
  in_a_row_ = 0;
  const Locals& locals = program_locals();
  ucontext_t* from = &main_;
  if (current_) {
    memcpy(current_->locals.data(), locals.data, locals.bytes);
    memcpy(current_->exceptions.get(), static_cast<void*>(abi::__cxa_get_globals()),
           kExceptionBytes);
    from = &current_->context;
  }
  if (!next) {
    if (current_) swapcontext(from, &main_);
    return;
  }
  current_ = next;
  memcpy(locals.data, next->locals.data(), locals.bytes);
  memcpy(static_cast<void*>(abi::__cxa_get_globals()), next->exceptions.get(), kExceptionBytes);
  swapcontext(from, &next->context);
}

/// Go on with another fiber, or end the run; the current one never goes on.
void Schedule::leave() { switch_to(over_ ? nullptr : choose()); }

}  // namespace tilework::simulation
