// Point-to-point messages of one rank.
//
// Each ordered pair of ranks has a separate ring. A message is split into fragments of at most
// kFragment bytes; each has a 64-byte envelope. A message that fits is sent at once; a longer one
// streams while the receiver drains. Messages of a pair arrive in order.
//
// A receive takes the first message with the same tag from the source (or from any rank). Receives
// are matched in the order they were posted. A message without a matching receive stays in the ring,
// and holds the sender back. If a receive with another tag waits for a message behind it, the message
// moves to the private queue of unexpected messages, so that the ring drains.
//
// All pending requests of a rank progress together, whichever thread runs the progress engine. So two
// ranks that send each other long messages before they receive cannot block each other. Threads in
// wait() run the engine; without such threads, a thread of the core runs it on request, or when it
// looks (wake_up.h).
//
// The receiver may read a long message from the sender's memory (peer_memory.h): a single fragment has the
// address, and the sender waits for the answer. The answer is no if the memory cannot be read, or if the
// message came before the receive. Then the data follows in fragments.
//
// Cost: each byte is copied in and out of the ring, which stays in the cache; one wake-up per
// fragment at most.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/operation.h"
#include "collectives/rank_context.h"
#include "transport/completion.h"
#include "transport/outbox_stores.h"
#include "transport/wake_up.h"

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
  uint64_t label = 0;  // for the caller's dtype and shape; 0 matches every label
  std::shared_ptr<Completion> completion = std::make_shared<Completion>();
  size_t moved = 0;       // bytes of a send that are in the ring
  bool refused = false;   // the receiver cannot read the sender's memory
  uint64_t number = 0;    // among the rank's started requests
  bool finished = false;  // succeeded or failed: lists that still hold it drop it
};
using RequestPtr = std::shared_ptr<Request>;

/// The header of a fragment.
struct Envelope {
  uint32_t bytes;  // of this fragment
  uint32_t first;  // 1: the fragment begins a message
  int64_t tag;
  uint64_t total;  // of the message
  uint32_t dtype;
  uint32_t shown;  // 1: a ShownBuffer follows instead of data, and the receiver reads the memory
  uint64_t label;  // see Request
  uint32_t reserved[6];
};
static_assert(sizeof(Envelope) == kLine, "fragments begin on a line");

class PointToPoint {
 public:
  explicit PointToPoint(RankContext& context);
  /// Set the owner of this object; the core's threads keep the owner alive while they run.
  void set_owner(std::weak_ptr<void> owner) { owner_ = std::move(owner); }
  ~PointToPoint();

  /// Start a send or a receive. With `will_wait` the caller calls wait() next, and the core's
  /// thread has nothing to do with it.
  void start(const RequestPtr& request, bool will_wait);

  /// Send a message at once if it fits the ring and no other message is before it; false if nothing was
  /// done, and start() must serve the message.
  bool send_now(int peer, const Buffer& buffer, DType dtype, int64_t tag, uint64_t label);
  /// Take a message at once if it has arrived and a receive would match it; false if nothing was done.
  bool receive_now(int peer, const Buffer& buffer, DType dtype, int64_t tag, uint64_t label);
  /// True if a message from `peer` has come and is not taken.
  bool arrived(int peer) const {
    const Cursor& cursor = segment_.cursor(peer, rank_);
    return cursor.head.load() != cursor.tail.load(std::memory_order_relaxed);
  }

  /// Fail a request; the core does not touch the request's buffer after the return.
  void cancel(const RequestPtr& request);

  /// Run the progress engine once, if no other thread does and anything is pending.
  void poll() {
    if (pending_ > 0) try_progress(Checks::kNone);
  }
  /// Have the core's thread run the engine while no thread waits, also for short messages.
  void expect_nobody_waits();

  /// Run the progress engine until `completion` is done (true) or options.deadline has passed.
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
    RequestPtr receive;  // matched while it was still arriving
    bool complete = false;
  };
  /// The receiving end of one channel. A message goes to `target` or to `unexpected`, or to
  /// neither: then it is discarded.
  struct Incoming {
    uint64_t tail = 0;
    Envelope current{};
    size_t received = 0;
    ShownBuffer shown{};  // the sender's buffer, while `reading`
    bool reading = false;
    uint64_t shown_count = 0;  // of all messages of the channel
    bool active = false, corrupt = false;
    RequestPtr target;
    std::shared_ptr<Unexpected> unexpected;
  };
  struct Outgoing {
    uint64_t head = 0;
    uint64_t known_tail = 0;  // the receiver's position when there last was no room
    bool broken = false;      // a message was aborted half way
    uint64_t shown_count = 0;
    bool awaits_answer = false;  // to the message at the front
    std::deque<RequestPtr> queue;
  };
  struct Outcome {
    std::shared_ptr<Completion> completion;
    std::optional<Fault> fault;
    int source;
  };

  /// The checks of progress() besides the rings: none; kLocal: closing, aborts, deadlines and departures;
  /// kProcesses: the peers' processes as well, by system calls.
  enum class Checks { kNone, kLocal, kProcesses };

  // Under mutex_.
  void progress(Checks checks);
  void send_fragments(int peer);
  bool shows(const Request& request, int peer) const;
  bool await_answer(int peer);
  void begin_reading(int peer, const Envelope& envelope);
  void read_piece(int peer);
  void answer(int peer, bool refused);
  bool write_fragment(int peer, const Envelope& envelope, const char* data);
  bool has_room(int peer, size_t room);
  void receive_fragments(int peer);
  bool receive_fragment(int peer, uint64_t available);
  bool begin_message(int peer, const Envelope& envelope);
  void store_fragment(int peer, const Envelope& envelope);
  void finish_message(int peer);
  bool deliver_unexpected(const RequestPtr& request);
  RequestPtr take_matching(int peer, int64_t tag);
  bool has_posted_receive(int peer) const;
  void finish(const RequestPtr& request, std::optional<Fault> fault, int source);
  void fail_stopped();
  void fail_timed_out();
  void fail_broken();
  void fail_lost(bool check_processes);
  template <class FaultOf>
  void fail_if(FaultOf&& fault_of);
  void start_thread();
  void ensure_progress_thread(bool at_once);

  bool try_progress(Checks checks);  // true if anything moved
  void deliver(std::vector<Outcome>& outcomes);
  template <class Finished>
  bool progress_until(Finished&& finished, const WaitOptions& options);
  int64_t next_deadline();
  void run_thread();

  RankContext& context_;
  std::weak_ptr<void> owner_;
  Segment& segment_;
  const int rank_;
  const size_t ring_bytes_;
  OutboxStores stores_;  // into rings

  std::mutex mutex_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::list<RequestPtr> requests_;  // all that are pending
  std::list<RequestPtr> posted_;    // receives without a message, in order
  std::list<std::shared_ptr<Unexpected>> unexpected_;
  std::vector<Outcome> outcomes_;
  uint64_t fragments_ = 0;          // moved so far
  std::atomic<size_t> pending_{0};  // length of requests_, for readers without the lock
  uint64_t started_ = 0;            // requests so far
  size_t long_requests_ = 0;        // the number of requests_ with several fragments
  std::atomic<int> waiters_{0};
  LivenessTimer liveness_timer_;  // one for all waits, so that short ones do not starve it
  std::atomic<bool> stopping_{false};
  WakeUp wake_up_;
  std::thread thread_;
};

}  // namespace tilework
