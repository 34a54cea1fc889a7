// The scheduler of a simulation: every thread of every rank is a fiber of one thread of the system,
// and one of them runs at a time. At each scheduling point (an atomic operation, a lock, a call of
// the system) a random choice, all of whose randomness comes from the seed, says who goes on.
//
// Time is virtual: reading the clock moves it a little, and when every fiber waits, it jumps to the
// first moment for which one of them waits.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "clocks.h"
#include "transport/platform.h"

namespace tilework::simulation {

/// Random numbers of a trial: the same everywhere for the same seed.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed * 2 + 1) {}
  uint64_t below(uint64_t limit) { return engine_() % limit; }
  bool once_in(uint64_t times) { return below(times) == 0; }
  template <class T>
  const T& among(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }

 private:
  std::mt19937_64 engine_;
};

/// A wait of a fiber. Nothing else wakes it but wake() with this address, and time.
struct Wait {
  uint64_t address;  // of anything: a number that tells it from others
  int64_t until;     // kNever: no moment
  bool is_sleep;     // the moment is what is waited for, not a bound
};

/// One thread of a rank.
struct Fiber {
  enum class State { kReady, kWaiting, kDone, kDead };

  int number;
  int rank;  // global; -1 for none
  std::function<void()> body;
  ThreadClocks clocks;
  State state = State::kReady;
  Wait wait{};
  bool timed_out = false;
  uint64_t priority = 0;
  ucontext_t context{};
  std::unique_ptr<char[]> stack;
  std::vector<char> locals;            // its copy of the program's thread_local variables
  std::unique_ptr<char[]> exceptions;  // the C++ runtime's account of what is being handled
};

/// Something that was done, after as many scheduling points.
struct Event {
  uint64_t point;
  int64_t now;
  int fiber, rank;
  const char* what;
  uint64_t place;  // see names.h
  uint64_t value;
  const void* code;
};

/// How the next fiber is chosen.
struct Policy {
  bool priorities;        // the ready fiber of the highest; else any, now and then
  uint64_t one_in;        // points of which one changes the fiber, or the priorities
  int64_t tick_ns;        // time that passes with each look at the clock
  uint64_t stale_one_in;  // loads of which one sees an older value where the memory model lets it
};

class Schedule {
 public:
  Schedule(uint64_t seed, const Policy& policy);
  ~Schedule();

  /// Add a fiber, as a child of the current one.
  Fiber& spawn(int rank, std::function<void()> body);
  /// Run all fibers to their ends, or until something fails. Returns the failure, "" for none.
  std::string run();

  // For fibers.
  Fiber& current() { return *current_; }
  /// A scheduling point. What is done then is recorded afterwards.
  void point();
  void record(const char* what, uint64_t place, uint64_t value, const void* code);
  /// A scheduling point of one who has nothing to do: others go first.
  void yield();
  /// Wait; false if the moment came first.
  bool wait(const Wait& wait);
  /// Wake the fibers that wait on an address: all, or the first.
  void wake(uint64_t address, bool all);
  int64_t look_at_clock() { return now_ += policy_.tick_ns; }
  int64_t now() const { return now_; }
  Random& random() { return random_; }
  const Policy& policy() const { return policy_; }
  /// End the run with a failure; the first one counts.
  void fail(const std::string& text);

  /// Have a rank end at a scheduling point, as by SIGKILL; or with `ns` below kNever, stop for so long.
  void strike_at(int rank, uint64_t point, int64_t ns);
  bool dead(int rank) const { return rank == victim_ && struck_at_ >= 0 && stop_ns_ == kNever; }
  /// The moment at which the rank was struck, -1 before.
  int64_t struck_at() const { return struck_at_; }
  uint64_t points() const { return points_; }

  const std::vector<std::unique_ptr<Fiber>>& fibers() const { return fibers_; }
  /// The last events, oldest first.
  std::vector<Event> events() const;

  /// The schedule that is running; null outside of run().
  static Schedule* running() { return running_; }

 private:
  static void enter();
  Fiber* choose();
  bool pass_time();
  void switch_to(Fiber* next);
  void leave();
  void strike();
  bool stopped(const Fiber& fiber) const {
    return fiber.rank == victim_ && struck_at_ >= 0 && now_ < stopped_until_;
  }

  static Schedule* running_;
  Random random_;
  const Policy policy_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* current_ = nullptr;
  ucontext_t main_{};
  std::string failure_;
  bool over_ = false;
  int64_t now_ = 1'000'000'000;
  uint64_t points_ = 0, in_a_row_ = 0;
  int victim_ = -1;
  uint64_t strikes_at_point_ = 0;
  int64_t stop_ns_ = kNever, struck_at_ = -1, stopped_until_ = 0;
  bool slices_allowed_ = false;  // a rank was struck: the others wait in vain
  std::vector<Event> events_;
  size_t recorded_ = 0;
};

}  // namespace tilework::simulation
