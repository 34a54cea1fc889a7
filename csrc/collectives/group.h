// A rank's end of a group, as Python sees it: collectives in order, asynchronous collectives on a
// progress thread, messages, failure reports, and an orderly close.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/point_to_point.h"
#include "collectives/rank_context.h"
#include "transport/completion.h"
#include "transport/wake_up.h"

namespace tilework {

/// Operations of up to this total length of all ranks take less time than a handover to a thread.
constexpr size_t kShortBytes = 64 * 1024;

/// Runs Python's handlers of pending signals, and the functions for a wait that has lasted the given
/// nanoseconds; true if one of them raised.
using SignalCheck = bool (*)(int64_t);

struct Statistics {
  uint64_t operations, bytes, sleeps, segment_bytes, read_bytes;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  /// `of_threads`: the other ranks are threads of this process, and come by beside().
  static std::shared_ptr<Group> make(int fd, int rank, int size, const std::string& nonce,
                                     bool of_threads = false);
  /// The end of another rank, whose thread calls this. A rank has left the group when its thread ends.
  std::shared_ptr<Group> beside(int rank);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// Run a collective after all submitted collectives; return when this rank is done. Throws
  /// std::invalid_argument, Fault and Interrupted. The core does not touch buffers after the return.
  void run(Operation& operation, double timeout, SignalCheck signals,
           Interlude* interlude = nullptr);

  /// Queue a collective for the progress thread, or, if it is short, for the first waiting thread. Copies
  /// the lists of buffers, not the buffers.
  std::shared_ptr<Completion> submit(Operation& operation, double timeout);

  /// Start a message; see PointToPoint::start.
  void post(const RequestPtr& request, bool will_wait);
  /// Send at once, see PointToPoint. False: nothing was done; post() a request instead.
  bool send_now(int peer, const Buffer& buffer, DType dtype, int64_t tag, uint64_t label);
  bool receive_now(int peer, const Buffer& buffer, DType dtype, int64_t tag, uint64_t label);
  /// Receive at once, or within the time that a wait spins. False: nothing was done.
  bool receive_soon(int peer, const Buffer& buffer, DType dtype, int64_t tag, uint64_t label,
                    Interlude& interlude);
  /// Cancel a message; the core does not touch the buffer after the return.
  void cancel(const RequestPtr& request);
  /// Wait for a submitted collective or a message, and run its progress; false after `timeout`
  /// seconds.
  bool wait(Completion& completion, bool is_message, double timeout, SignalCheck signals);

  /// True if an operation is done. May run progress, but never waits for other ranks.
  bool poll(const Completion& completion, bool is_message);
  /// Run pending operations in the background at once, even short ones: no thread will wait for them in
  /// a way that runs their progress.
  void expect_nobody_waits(bool is_message);

  /// This rank's arena; valid also after the group is closed.
  std::shared_ptr<Arena> arena();

  std::vector<std::pair<Call, int>> calls();  // every rank's last call and pid
  /// The ranks whose processes have ended, or that have left.
  std::vector<int> lost_ranks();
  /// The ranks whose own threads wait in an operation that this rank has not called, with the number.
  std::vector<std::pair<int, uint64_t>> blocked_ranks();
  /// The number of the last operation that this rank's own thread waited in; 0: none yet.
  uint64_t last_wait();
  /// The cores that the ranks may use together, of those that have joined.
  int cores();
  uint64_t sequence() const { return turn_.load(std::memory_order_relaxed) / kNextNumber; }
  void report_failure(const std::string& text);
  std::vector<std::optional<std::string>> failure_reports(double timeout, SignalCheck signals);
  void abort(const std::string& kind, const std::string& text);
  std::optional<Abort> aborted();
  Statistics statistics();
  /// How ranks read each other's memory, or why they cannot, for people.
  std::string single_copy();
  Tunables tunables();
  /// Replace the tunables; all ranks must do so between the same two operations.
  void set_tunables(const Tunables& tunables);

  /// Leave the group: pending operations fail, other threads of this rank leave its methods, the
  /// core's threads end. Idempotent; may be called by a callback.
  void close();

  /// True in a forked child of the process that made the group. There, even destroying it is
  /// wrong: its threads do not exist, and its locks may be held forever.
  bool in_forked_child() const { return generation_ != fork_generation(); }

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  struct QueuedOperation;
  class ActiveCall;

  /// The members that need the segment mapped; gone once the group is closed and no call active.
  struct Engine {
    template <class... Place>
    explicit Engine(int rank, const Place&... place)
        : context(rank, place...), collectives(context), point_to_point(context) {}
    RankContext context;
    Collectives collectives;
    PointToPoint point_to_point;
  };

  Group(int rank, std::unique_ptr<Engine> engine);
  static std::shared_ptr<Group> own(int rank, std::unique_ptr<Engine> engine);
  struct ThreadEnd;
  void leave();

  RankControl& control(int rank) const { return engine_->context.segment.control(rank); }
  /// Threads share an interpreter: who stayed awake for long would take time from the awaited one.
  Pace pace() const {
    const Pace usual = pace_for(size_, cores_.load(std::memory_order_relaxed));
    const RankContext& context = engine_->context;
    return context.segment.of_threads() ? usual : context.history.pace(usual);
  }
  Pace background_pace() const {
    return background_pace_for(size_, cores_.load(std::memory_order_relaxed));
  }
  WaitOptions wait_options(double timeout, SignalCheck signals, Pace pace) const;
  /// The options of a wait on the caller's thread; the rank's history learns from the wait.
  WaitOptions own_wait_options(double timeout, SignalCheck signals) const;
  void use_interlude(Interlude* interlude, WaitOptions& options) const;
  std::shared_ptr<Completion> enqueue(const Operation& operation, double timeout, bool at_once);
  void post_queued(bool at_once);
  bool wait_for_queued(Completion& completion, double timeout, SignalCheck signals);
  enum class Turn { kRuns, kQueued, kRefused };
  Turn take_turn(Operation& operation, bool may_run, bool may_queue);
  void end_turn();
  bool running() const { return turn_.load() & kRunning; }
  bool running_here() const {
    return running() && running_thread_.load() == std::this_thread::get_id();
  }
  std::shared_ptr<Completion> take_turn_in_order(Operation& operation, double timeout);
  void check_not_forked() const;
  void check_may_block();
  std::unique_ptr<QueuedOperation> take_oldest();
  void execute(QueuedOperation& queued, const WaitOptions& options);
  void execute_queued_until(const Completion& completion, SignalCheck signals);
  void run_thread();
  void stop_thread();
  bool all_reported(bool check_processes) const;
  std::optional<std::string> failure_report(int rank) const;

  const int rank_, size_, pid_;
  const unsigned generation_;
  std::unique_ptr<Engine> engine_;
  Statistics last_statistics_{};

  std::atomic<int> cores_;  // cores that the joined ranks may use
  std::atomic<bool> closing_{false};
  std::atomic<int> active_calls_{0};  // of all threads

  /// The turn to execute a collective: the number of the last called collective, times kNextNumber, and
  /// flags. A single word, so that one exchange numbers an operation and begins it (if none is before it),
  /// and another exchange ends it. Two locks instead would cost a barrier a tenth of its time.
  std::atomic<uint64_t> turn_{0};
  static constexpr uint64_t kRunning = 1;  // a thread executes a collective
  static constexpr uint64_t kWaiting = 2;  // others are queued; changed under order_
  static constexpr uint64_t kClosing = 4;  // no operation begins on a caller's thread
  static constexpr uint64_t kNextNumber = 8;
  std::atomic<std::thread::id> running_thread_{};  // while kRunning

  std::mutex order_;  // guards the members below
  std::deque<std::unique_ptr<QueuedOperation>> queue_;
  WakeUp wake_up_;
  int sleepers_ = 0;  // threads that wait for a queued operation, which others execute
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tilework
