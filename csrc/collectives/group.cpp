#include "collectives/group.h"

#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace tilework {
namespace {

void check_rank(int rank, int size) {
  if (rank < 0 || rank >= size)
    throw std::invalid_argument("rank: " + std::to_string(rank) + " given, 0 to size - 1 (" +
                                std::to_string(size - 1) + ") is possible");
}

size_t bytes_of(const Operation& operation) {
  size_t bytes = 0;
  for (const Buffers* side : {&operation.inputs, &operation.outputs})
    for (int i = 0; i < side->count; ++i) bytes += (*side)[i].bytes;
  return bytes;
}

}  // namespace

/// A submitted collective; owns its lists of buffers.
struct Group::QueuedOperation {
  QueuedOperation(const Operation& operation_, double timeout_)
      : inputs(operation_.inputs.items, operation_.inputs.items + operation_.inputs.count),
        outputs(operation_.outputs.items, operation_.outputs.items + operation_.outputs.count),
        operation(operation_),
        timeout(timeout_),
        completion(std::make_shared<Completion>(operation_.sequence)) {
    operation.inputs.items = inputs.data();
    operation.outputs.items = outputs.data();
  }

  std::vector<Buffer> inputs, outputs;
  Operation operation;
  double timeout;
  std::shared_ptr<Completion> completion;
};

/// A thread's call of a method of a group, during which the segment stays mapped.
class Group::ActiveCall {
 public:
  explicit ActiveCall(Group& group) : group_(group), outer_(innermost) {
    group.check_not_forked();
    group_.active_calls_.fetch_add(1);
    if (group_.closing_.load()) {
      group_.active_calls_.fetch_sub(1);
      throw Fault("closed", {group.rank_}, "the group was closed on this rank");
    }
    innermost = this;
  }
  ~ActiveCall() {
    innermost = outer_;
    group_.active_calls_.fetch_sub(1);
  }
  ActiveCall(const ActiveCall&) = delete;
  ActiveCall& operator=(const ActiveCall&) = delete;

  /// The number of active calls of `group` by this thread: callbacks may call back.
  static int depth(const Group& group) {
    int count = 0;
    for (ActiveCall* call = innermost; call; call = call->outer_) count += &call->group_ == &group;
    return count;
  }

 private:
  static thread_local ActiveCall* innermost;
  Group& group_;
  ActiveCall* outer_;
};

thread_local Group::ActiveCall* Group::ActiveCall::innermost = nullptr;

/// The groups whose own thread this is: where ranks are threads, they have left when it ends.
struct Group::ThreadEnd {
  std::vector<std::weak_ptr<Group>> groups;

  void add(const std::shared_ptr<Group>& group) {
    const auto gone = [](const std::weak_ptr<Group>& each) { return each.expired(); };
    groups.erase(std::remove_if(groups.begin(), groups.end(), gone), groups.end());
    groups.push_back(group);
  }
  ~ThreadEnd() {
    for (const std::weak_ptr<Group>& each : groups)
      if (const std::shared_ptr<Group> group = each.lock()) group->leave();
  }
};

std::shared_ptr<Group> Group::make(int fd, int rank, int size, const std::string& nonce,
                                   bool of_threads) {
  check_rank(rank, size);
  return own(rank, std::make_unique<Engine>(rank, fd, size, nonce, of_threads));
}

std::shared_ptr<Group> Group::beside(int rank) {
  ActiveCall active(*this);
  check_rank(rank, size_);
  const Segment* segment = &engine_->context.segment;
  if (!segment->of_threads()) throw std::invalid_argument("the ranks of this group are processes");
  return own(rank, std::make_unique<Engine>(rank, segment));
}

std::shared_ptr<Group> Group::own(int rank, std::unique_ptr<Engine> engine) {
  thread_local ThreadEnd thread_end;
  const bool of_threads = engine->context.segment.of_threads();
  std::shared_ptr<Group> group(new Group(rank, std::move(engine)));
  group->engine_->point_to_point.set_owner(group);
  if (of_threads) thread_end.add(group);
  return group;
}

Group::Group(int rank, std::unique_ptr<Engine> engine)
    : rank_(rank),
      size_(engine->context.size),
      pid_(getpid()),
      generation_(fork_generation()),
      engine_(std::move(engine)),
      cores_(engine_->context.cores()) {}

Group::~Group() {
  close();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();  // it held the last reference, and ends now
  else
    thread_.join();
}

WaitOptions Group::wait_options(double timeout, SignalCheck signals, Pace pace) const {
  return {pace, nullptr, timeout, signals};
}

WaitOptions Group::own_wait_options(double timeout, SignalCheck signals) const {
  WaitOptions options = wait_options(timeout, signals, pace());
  options.history = &engine_->context.history;
  if (options.pace.crowded) options.mates = &engine_->context;
  return options;
}

// ---- collectives -----------------------------------------------------------------------------

void Group::check_not_forked() const {
  if (in_forked_child())
    throw Fault("closed", {rank_},
                "the group belongs to process " + std::to_string(pid_) +
                    ", of which this is a fork; a forked process makes its own groups");
}

/// Number the operation, for this thread to execute it now, if nothing is before it, or for the queue.
/// Refused, and nothing happened, where it may do neither. Queued under order_, in the order of numbers.
/// A thread whose turn it is keeps the segment mapped: close() waits for it.
Group::Turn Group::take_turn(Operation& operation, bool may_run, bool may_queue) {
  uint64_t turn = turn_.load(std::memory_order_relaxed), next;
  bool runs;
  do {
    runs = may_run && !(turn & (kRunning | kWaiting));
    if (!may_queue && (!runs || turn & kClosing)) return Turn::kRefused;
    next = (turn + kNextNumber) | (runs ? kRunning : kWaiting);
  } while (!turn_.compare_exchange_weak(turn, next));
  operation.sequence = next / kNextNumber;
  if (runs) running_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  if (operation.sequence == 2) cores_ = engine_->context.cores();  // now that all are here
  return runs ? Turn::kRuns : Turn::kQueued;
}

/// The completion of the operation, which was queued; null if this thread is to execute it.
std::shared_ptr<Completion> Group::take_turn_in_order(Operation& operation, double timeout) {
  std::lock_guard<std::mutex> lock(order_);
  if (turn_.load() & (kRunning | kWaiting)) check_may_block();
  if (take_turn(operation, true, true) == Turn::kRuns) return nullptr;
  return enqueue(operation, timeout, false);  // the caller waits for it
}

void Group::use_interlude(Interlude* interlude, WaitOptions& options) const {
  if (!interlude || !engine_->context.memory.all_local()) {
    options.interlude = interlude;
    return;
  }
  interlude->published();  // the others need the GIL to come
  interlude->waits();
}

/// Throw if the thread that is about to wait for the queue is the one that would run it. Under
/// order_.
void Group::check_may_block() {
  const auto self = std::this_thread::get_id();
  if (thread_.get_id() == self)
    throw std::runtime_error(
        "a callback must not wait for operations that were submitted before "
        "it returned: they run on the callback's own thread");
  if (running_here())
    throw std::runtime_error(
        "a signal handler must not call a collective of the group whose "
        "operation it interrupted");
}

void Group::end_turn() {
  if (!(turn_.fetch_sub(kRunning) & kWaiting)) return;
  std::lock_guard<std::mutex> lock(order_);
  if (!queue_.empty()) post_queued(sleepers_ > 0);
}

void Group::run(Operation& operation, double timeout, SignalCheck signals, Interlude* interlude) {
  check_not_forked();
  if (!operation.validated) validate(operation, rank_, size_);
  std::optional<ActiveCall> active;
  if (take_turn(operation, true, false) != Turn::kRuns) {
    active.emplace(*this);
    if (const auto completion = take_turn_in_order(operation, timeout)) {
      if (interlude) interlude->published(), interlude->waits();
      try {
        wait_for_queued(*completion, -1, signals);
      } catch (const Interrupted&) {
        engine_->collectives.cancel();  // the caller may free the buffers once we return
        wait_for_queued(*completion, -1, nullptr);
        throw;
      }
      if (auto fault = completion->fault()) throw *fault;
      return;
    }
  }
  struct EndTurn {
    ~EndTurn() { group.end_turn(); }
    Group& group;
  } end{*this};
  WaitOptions options = own_wait_options(timeout, signals);
  use_interlude(interlude, options);
  engine_->collectives.execute(operation, options);
}

std::shared_ptr<Completion> Group::submit(Operation& operation, double timeout) {
  ActiveCall active(*this);
  if (!operation.validated) validate(operation, rank_, size_);
  std::lock_guard<std::mutex> lock(order_);
  take_turn(operation, false, true);
  return enqueue(operation, timeout, bytes_of(operation) > kShortBytes / size_);
}

/// Under order_, if anything is queued.
void Group::post_queued(bool at_once) {
  wake_up_.post(queue_.front()->operation.sequence,
                at_once ? queue_.back()->operation.sequence : 0);
}

/// Under order_. `at_once`: the thread is woken, since nobody is expected to wait soon.
std::shared_ptr<Completion> Group::enqueue(const Operation& operation, double timeout,
                                           bool at_once) {
  queue_.push_back(std::make_unique<QueuedOperation>(operation, timeout));
  if (!thread_.joinable())
    thread_ = std::thread([self = shared_from_this()] { self->run_thread(); });
  post_queued(at_once);
  return queue_.back()->completion;
}

/// False after `timeout` seconds. Without a limit this thread executes what is queued before it: an
/// operation that has begun cannot be left.
bool Group::wait_for_queued(Completion& completion, double timeout, SignalCheck signals) {
  if (timeout < 0) execute_queued_until(completion, signals);
  if (completion.done()) return true;
  struct Sleeper {
    explicit Sleeper(Group& group_) : group(group_) {
      std::lock_guard<std::mutex> lock(group.order_);
      ++group.sleepers_;
      if (!group.queue_.empty()) group.post_queued(true);
    }
    ~Sleeper() {
      std::lock_guard<std::mutex> lock(group.order_);
      --group.sleepers_;
    }
    Group& group;
  } sleeper(*this);
  return completion.sleep_until_done(wait_options(timeout, signals, background_pace()));
}

/// The oldest queued operation, for this thread to execute; null if there is none, or another
/// thread executes one.
std::unique_ptr<Group::QueuedOperation> Group::take_oldest() {
  if (queue_.empty()) return nullptr;
  uint64_t turn = turn_.load(), next;
  do {
    if (turn & kRunning) return nullptr;
    next = turn | kRunning;
    if (queue_.size() == 1) next &= ~kWaiting;
  } while (!turn_.compare_exchange_weak(turn, next));
  running_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  std::unique_ptr<QueuedOperation> oldest = std::move(queue_.front());
  queue_.pop_front();
  return oldest;
}

/// Execute a dequeued operation, and complete it.
void Group::execute(QueuedOperation& queued, const WaitOptions& options) {
  std::optional<Fault> fault;
  bool interrupted = false;
  try {
    engine_->collectives.execute(queued.operation, options);
  } catch (const Fault& caught) {
    fault = caught;
  } catch (const Interrupted&) {
    fault = Fault("aborted", {rank_}, "a signal interrupted the wait for the operation");
    interrupted = true;
  }
  end_turn();
  queued.completion->complete(std::move(fault));
  if (interrupted) throw Interrupted();
}

/// The progress thread: operations in order; once the group is closed each fails at once.
void Group::run_thread() {
  for (;;) {
    std::unique_lock<std::mutex> lock(order_);
    wake_up_.wait(
        lock,
        [this] { return queue_.empty() || running() ? 0 : queue_.front()->operation.sequence; },
        [this] { return stopping_ && (queue_.empty() || !running()); });
    if (queue_.empty() && stopping_) return;
    while (std::unique_ptr<QueuedOperation> next = take_oldest()) {
      lock.unlock();
      execute(*next, wait_options(next->timeout, nullptr, background_pace()));
      lock.lock();
    }
  }
}

/// Execute queued operations up to that of `completion` on the thread that waits for it, as far as the
/// progress thread has not come to do it.
void Group::execute_queued_until(const Completion& completion, SignalCheck signals) {
  std::optional<ActiveCall> active;
  try {
    active.emplace(*this);
  } catch (const Fault&) {
    return;  // closing: the operation fails by itself
  }
  while (!completion.done()) {
    std::unique_ptr<QueuedOperation> next;
    {
      std::lock_guard<std::mutex> lock(order_);
      next = take_oldest();
    }
    if (!next) return engine_->context.note_blocked(completion.number);
    execute(*next, own_wait_options(next->timeout, signals));
  }
}

// ---- messages --------------------------------------------------------------------------------

void Group::post(const RequestPtr& request, bool will_wait) {
  ActiveCall active(*this);
  const std::string name = request->is_send ? "send" : "receive";
  const int lowest = request->is_send ? 0 : kAnyRank;
  if (request->peer < lowest || request->peer >= size_)
    throw std::invalid_argument(name + ": rank " + std::to_string(request->peer) +
                                " is not in this group of " + std::to_string(size_));
  if (request->buffer.bytes > 0 && !request->buffer.data)
    throw std::invalid_argument(name + ": null address");
  engine_->point_to_point.start(request, will_wait);
}

bool Group::send_now(int peer, const Buffer& buffer, DType dtype, int64_t tag, uint64_t label) {
  ActiveCall active(*this);
  return engine_->point_to_point.send_now(peer, buffer, dtype, tag, label);
}

bool Group::receive_now(int peer, const Buffer& buffer, DType dtype, int64_t tag, uint64_t label) {
  ActiveCall active(*this);
  return engine_->point_to_point.receive_now(peer, buffer, dtype, tag, label);
}

bool Group::receive_soon(int peer, const Buffer& buffer, DType dtype, int64_t tag, uint64_t label,
                         Interlude& interlude) {
  ActiveCall active(*this);
  WaitOptions options = own_wait_options(-1, nullptr);
  use_interlude(&interlude, options);
  PointToPoint& engine = engine_->point_to_point;
  const auto shares_core = [&](int core) {
    return engine_->context.shares_core(core, peer, peer + 1, [](int) { return true; });
  };
  return spin(
             options, [&] { return engine.arrived(peer); }, shares_core) &&
         engine.receive_now(peer, buffer, dtype, tag, label);
}

void Group::cancel(const RequestPtr& request) {
  ActiveCall active(*this);
  engine_->point_to_point.cancel(request);
}

bool Group::poll(const Completion& completion, bool is_message) {
  if (completion.done()) return true;
  if (!is_message) {
    expect_nobody_waits(false);
    return false;
  }
  try {
    ActiveCall active(*this);
    engine_->point_to_point.poll();
  } catch (const Fault&) {  // closing: it fails by itself
  }
  return completion.done();
}

void Group::expect_nobody_waits(bool is_message) {
  try {
    ActiveCall active(*this);
    if (is_message) return engine_->point_to_point.expect_nobody_waits();
    std::lock_guard<std::mutex> lock(order_);
    if (!queue_.empty()) post_queued(true);
  } catch (const Fault&) {  // closing
  }
}

bool Group::wait(Completion& completion, bool is_message, double timeout, SignalCheck signals) {
  if (completion.done()) return true;
  if (!is_message) {
    {
      std::lock_guard<std::mutex> lock(order_);
      check_may_block();
    }
    return wait_for_queued(completion, timeout, signals);
  }
  ActiveCall active(*this);
  return engine_->point_to_point.wait(completion, own_wait_options(timeout, signals));
}

// ---- queries ---------------------------------------------------------------------------------

std::shared_ptr<Arena> Group::arena() {
  ActiveCall active(*this);
  return engine_->context.segment.own_arena(rank_);
}

/// The header may be rewritten while it is read: then the rank has moved on, and it is read again.
std::vector<std::pair<Call, int>> Group::calls() {
  ActiveCall active(*this);
  std::vector<std::pair<Call, int>> result;
  for (int rank = 0; rank < size_; ++rank) {
    const RankControl& peer = control(rank);
    Call call{};
    for (int attempt = 0; attempt < 100; ++attempt) {
      const uint64_t before = peer.entered.load();
      if (before == 0) break;
      call = read_call(peer.headers[before & 1]);
      if (peer.entered.load() == before) break;
    }
    result.emplace_back(call, peer.pid.load());
  }
  return result;
}

std::vector<int> Group::lost_ranks() {
  ActiveCall active(*this);
  std::vector<int> lost;
  Liveness& liveness = engine_->context.liveness;
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_ && (liveness.departed(rank) || liveness.dead(rank))) lost.push_back(rank);
  return lost;
}

std::vector<std::pair<int, uint64_t>> Group::blocked_ranks() {
  ActiveCall active(*this);
  std::vector<std::pair<int, uint64_t>> blocked;
  for (int rank = 0; rank < size_; ++rank)
    if (const uint64_t number = control(rank).blocked.load(); number > sequence())
      blocked.emplace_back(rank, number);
  return blocked;
}

uint64_t Group::last_wait() {
  ActiveCall active(*this);
  return control(rank_).blocked.load();
}

int Group::cores() {
  ActiveCall active(*this);
  return engine_->context.cores();
}

Statistics Group::statistics() {
  try {
    ActiveCall active(*this);
    const RankContext& context = engine_->context;
    return {context.operations.load(), context.bytes.load(), context.sleeps.load(),
            context.segment.bytes(), context.memory.bytes_read()};
  } catch (const Fault&) {
    return last_statistics_;
  }
}

std::string Group::single_copy() {
  ActiveCall active(*this);
  return engine_->context.memory.describe();
}

Tunables Group::tunables() {
  ActiveCall active(*this);
  return engine_->context.segment.tunables();
}

void Group::set_tunables(const Tunables& tunables) {
  ActiveCall active(*this);
  engine_->context.segment.set_tunables(tunables);
}

void Group::report_failure(const std::string& text) {
  ActiveCall active(*this);
  FailureReport& report = control(rank_).report;
  uint32_t none = 0;
  if (!report.state.compare_exchange_strong(none, 1)) return;  // the first report stands
  report.bytes = static_cast<uint32_t>(std::min(text.size(), kMaxReportBytes));
  memcpy(report.text, text.data(), report.bytes);
  report.state.store(2);
  engine_->context.segment.notify_all_ranks();
}

std::optional<std::string> Group::failure_report(int rank) const {
  const FailureReport& report = control(rank).report;
  if (report.state.load() != 2) return std::nullopt;
  return std::string(report.text, std::min<size_t>(report.bytes, kMaxReportBytes));
}

/// True if every rank that still can has reported.
bool Group::all_reported(bool check_processes) const {
  Liveness& liveness = engine_->context.liveness;
  for (int rank = 0; rank < size_; ++rank) {
    if (control(rank).report.state.load() == 2 || liveness.departed(rank)) continue;
    if (!check_processes || !liveness.dead(rank)) return false;
  }
  return true;
}

std::vector<std::optional<std::string>> Group::failure_reports(double timeout,
                                                               SignalCheck signals) {
  ActiveCall active(*this);
  const WaitOptions bounds = wait_options(timeout, signals, pace());
  LivenessTimer liveness_timer;
  bool check_processes = true;
  while (!closing_) {
    EventWaiter waiter(control(rank_).round_event, engine_->context.sleeps);
    if (all_reported(check_processes) || now_ns() >= bounds.deadline()) break;
    const Woken woken = waiter.sleep(bounds.deadline());
    check_processes = liveness_timer.due();
    if (woken != Woken::kNotified) bounds.check_signals(now_ns());
  }
  std::vector<std::optional<std::string>> result;
  for (int rank = 0; rank < size_; ++rank) result.push_back(failure_report(rank));
  return result;
}

void Group::abort(const std::string& kind, const std::string& text) {
  ActiveCall active(*this);
  engine_->context.abort(kind, text);
}

std::optional<Abort> Group::aborted() {
  ActiveCall active(*this);
  return engine_->context.aborted();
}

// ---- closing ---------------------------------------------------------------------------------

/// Tell the others that this rank has left; nothing of the group is freed.
void Group::leave() {
  try {
    ActiveCall active(*this);
    control(rank_).departed.store(1);
    engine_->context.segment.notify_all_ranks();
  } catch (const Fault&) {  // closed, or in a forked child
  }
}

void Group::close() {
  if (in_forked_child() || closing_.load()) return;
  const Statistics last = statistics();
  if (closing_.exchange(true)) return;
  turn_.fetch_or(kClosing);
  last_statistics_ = last;
  engine_->context.closing = true;
  control(rank_).departed.store(1);
  engine_->context.segment.notify_all_ranks();
  engine_->point_to_point.close();
  const int own = ActiveCall::depth(*this);
  while (active_calls_.load() > own || (running() && !running_here()))
    usleep(50);  // they see that the group closes
  stop_thread();
  // Called back from inside, the segment must outlive the frames below; the destructor frees it.
  const bool on_thread = thread_.joinable() || engine_->point_to_point.on_own_thread();
  if (own == 0 && !running_here() && !on_thread) engine_.reset();
}

void Group::stop_thread() {
  {
    std::lock_guard<std::mutex> lock(order_);
    stopping_ = true;  // only now: no active call can still queue
    wake_up_.stop();
  }
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

}  // namespace tilework
