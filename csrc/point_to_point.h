// Point-to-point messages of one rank.
//
// Each ordered pair of ranks has a ring of kRingBytes. A message is cut into fragments of at most
// kFragment bytes; each has a 64-byte envelope. A message that fits is sent at once; a longer one
// streams while the receiver drains. Messages of a pair arrive in order.
//
// A receive takes the first message of its source (or of any) that has its tag. Receives are
// matched in the order they were posted. A message that nobody wants yet stays in the ring, where
// it holds its sender back, unless a receive of another tag is posted behind it: then it moves to
// a private queue, so that the ring can go on.
//
// All pending requests of a rank progress together, whoever drives: two ranks that send each
// other long messages before they receive cannot block each other. The threads in wait() drive;
// when there is none, a thread of the core does.
//
// Cost: each byte is copied in and out of the ring, which stays in the cache; one wake-up per
// fragment at most.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "operation.h"
#include "rank_context.h"
#include "completion.h"

namespace tilework {

constexpr int kAnyRank = -1;

/// A send or a receive. `peer` is kAnyRank for a receive from any rank.
struct Request {
  bool is_send;
  int peer;
  Buffer buffer;
  DType dtype;
  int64_t tag;
  double seconds;
  int64_t deadline;
  std::shared_ptr<Completion> completion = std::make_shared<Completion>();
  size_t moved = 0;   // bytes of a send that are in the ring
  bool finished = false;  // done or failed: whoever still holds the request drops it
};
using RequestPtr = std::shared_ptr<Request>;

/// What travels before the bytes of a fragment.
struct Envelope {
  uint32_t bytes;  // of this fragment
  uint32_t first;  // whether it begins a message
  int64_t tag;
  uint64_t total;  // of the message
  uint32_t dtype;
  uint32_t reserved[9];
};
static_assert(sizeof(Envelope) == kLine, "fragments begin on a line");

class PointToPoint {
 public:
  explicit PointToPoint(RankContext& context);
  /// Threads of the core keep `owner`, which owns this, alive while they run.
  void set_owner(std::weak_ptr<void> owner) { owner_ = std::move(owner); }
  ~PointToPoint();

  /// Start a send or a receive. With `will_wait` the caller calls wait() next and no thread of
  /// the core is woken for it.
  void start(const RequestPtr& request, bool will_wait);

  /// Fail a request; its buffer is not touched any more.
  void cancel(const RequestPtr& request);

  /// Drive until the ticket is done, or patience.deadline has passed (false).
  bool wait(const Completion& completion, const WaitOptions& options);

  /// Fail everything pending and join the core's thread.
  void close();
  bool on_own_thread() const { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  /// A message that arrived before its receive.
  struct Unexpected {
    int source;
    Envelope envelope;
    std::vector<char> data;
    RequestPtr receive;  // by a receive that came while it was still arriving
    bool complete = false;
  };
  /// The receiving end of one channel. At most one of the two targets is set; none while a
  /// message is thrown away.
  struct Incoming {
    uint64_t tail = 0;
    Envelope current{};
    size_t received = 0;
    bool active = false, corrupt = false;
    RequestPtr target;
    std::shared_ptr<Unexpected> unexpected;
  };
  struct Outgoing {
    uint64_t head = 0;
    bool broken = false;  // a message was given up half way
    std::deque<RequestPtr> queue;
  };
  struct Outcome {
    std::shared_ptr<Completion> completion;
    std::optional<Fault> fault;
    int source;
  };

  /// How much progress() looks at besides the rings: nothing; closing, aborts, deadlines and
  /// departures; also whether peers are alive, which takes system calls.
  enum class Checks { kNone, kLocal, kProcesses };

  // Under mutex_.
  void progress(Checks checks);
  void send_fragments(int peer);
  void receive_fragments(int peer);
  bool receive_fragment(int peer, uint64_t available);
  bool begin_message(int peer, const Envelope& envelope);
  void store_fragment(int peer, const Envelope& envelope);
  void finish_message(int peer);
  bool deliver_unexpected(const RequestPtr& request);
  RequestPtr match(int peer, int64_t tag);
  bool has_posted_receive(int peer) const;
  void finish(const RequestPtr& request, std::optional<Fault> fault, int source);
  void fail_stopped();
  void fail_timed_out();
  void fail_broken();
  void fail_lost(bool check_processes);
  template <class FaultOf>
  void fail_if(FaultOf&& fault_of);
  void ensure_progress_thread();

  bool try_progress(Checks checks);  // whether anything moved
  void deliver(std::vector<Outcome>& outcomes);
  template <class Finished>
  bool progress_until(Finished&& finished, const WaitOptions& options);
  int64_t next_deadline();
  void run_thread();

  RankContext& context_;
  std::weak_ptr<void> owner_;
  Segment& segment_;
  const int rank_;

  std::mutex mutex_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::list<RequestPtr> requests_;  // all that are pending
  std::list<RequestPtr> posted_;    // receives without a message, in order
  std::list<std::shared_ptr<Unexpected>> unexpected_;
  std::vector<Outcome> outcomes_;
  uint64_t fragments_ = 0;  // moved so far
  std::atomic<size_t> pending_{0};  // length of requests_, for those without the lock
  std::atomic<int> waiters_{0};
  LivenessTimer liveness_timer_;  // one for all waits: many short ones must not hide a death
  std::atomic<bool> stopping_{false};
  std::condition_variable wake_thread_;
  std::thread thread_;
};

}  // namespace tilework
