#include "collectives/point_to_point.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "transport/copy.h"
#include "transport/platform.h"

namespace tilework {
namespace {

constexpr size_t kFragment = 32 * 1024;
/// The bytes to read from a sender's memory at a time, since a read holds the lock.
constexpr size_t kReadPiece = 1024 * 1024;

size_t fragment_room(size_t bytes) { return kLine + round_up(bytes, kLine); }

/// A channel's ring, addressed by positions of cursors.
class Ring {
 public:
  Ring(char* data, size_t bytes) : data_(data), bytes_(bytes) {}

  /// The line at a position.
  char* at(uint64_t position) const { return data_ + offset(position); }
  /// Copy to and from the ring, also across the end.
  void write(uint64_t position, const char* from, size_t bytes, bool streamed) const {
    const size_t first = std::min(bytes, bytes_ - offset(position));
    const auto store = streamed ? copy_streaming : copy;
    store(at(position), from, first);
    store(data_, from + first, bytes - first);
  }
  void read(uint64_t position, char* to, size_t bytes, bool streamed) const {
    const size_t first = std::min(bytes, bytes_ - offset(position));
    const auto store = streamed ? copy_streaming : copy;
    store(to, at(position), first);
    store(to + first, data_, bytes - first);
  }

 private:
  size_t offset(uint64_t position) const { return position & (bytes_ - 1); }

  char* data_;
  size_t bytes_;
};

Ring ring_of(const Segment& segment, int source, int destination) {
  return {segment.ring(source, destination), segment.ring_bytes()};
}

std::optional<Fault> check_fit(const Request& request, const Envelope& envelope, int source) {
  const auto dtype = static_cast<unsigned>(request.dtype);
  const bool sizes_fit = envelope.total == request.buffer.bytes && envelope.dtype == dtype;
  const bool known = envelope.total > 0 && envelope.label != 0 && request.label != 0;
  if (sizes_fit && (!known || envelope.label == request.label)) return std::nullopt;
  if (sizes_fit)
    return Fault("mismatch", {source},
                 "rank " + std::to_string(source) +
                     " sent a tensor of another dtype or shape with tag " +
                     std::to_string(envelope.tag) + " than is received");
  return Fault("mismatch", {source},
               "rank " + std::to_string(source) + " sent " + std::to_string(envelope.total) +
                   " bytes of " + dtype_name(envelope.dtype) + " with tag " +
                   std::to_string(envelope.tag) + " where " + std::to_string(request.buffer.bytes) +
                   " bytes of " + dtype_name(dtype) + " are received");
}

bool is_long(const Request& request) { return request.buffer.bytes > kFragment; }

bool is_short(const Envelope& envelope) {
  return envelope.first == 1 && envelope.shown == 0 && envelope.bytes == envelope.total &&
         envelope.bytes <= ShortMessage::kBytes;
}

uint64_t dtype_and_bytes(uint32_t dtype, uint64_t bytes) { return uint64_t{dtype} << 32 | bytes; }

void write_short(ShortMessage& message, const Envelope& envelope, const char* data, uint64_t end) {
  uint64_t words[ShortMessage::kWords] = {static_cast<uint64_t>(envelope.tag), envelope.label,
                                          dtype_and_bytes(envelope.dtype, envelope.bytes)};
  copy(words + 3, data, envelope.bytes);
  message.end.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < ShortMessage::kWords; ++i)
    message.words[i].store(words[i], std::memory_order_relaxed);
  message.end.store(end, std::memory_order_release);
}

/// Take the message that ends at `end`, if it is short and matches `expected`.
bool read_short(const ShortMessage& message, uint64_t end, const Envelope& expected, char* to) {
  uint64_t words[ShortMessage::kWords];
  if (message.end.load(std::memory_order_acquire) != end) return false;
  for (size_t i = 0; i < ShortMessage::kWords; ++i)
    words[i] = message.words[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (message.end.load(std::memory_order_relaxed) != end ||
      words[0] != static_cast<uint64_t>(expected.tag) || words[1] != expected.label ||
      words[2] != dtype_and_bytes(expected.dtype, expected.bytes))
    return false;
  copy(to, words + 3, expected.bytes);
  return true;
}

Envelope envelope_of(const Buffer& buffer, DType dtype, int64_t tag, uint64_t label) {
  Envelope envelope{};
  envelope.bytes = static_cast<uint32_t>(buffer.bytes);
  envelope.first = 1;
  envelope.tag = tag;
  envelope.total = buffer.bytes;
  envelope.dtype = static_cast<uint32_t>(dtype);
  envelope.label = label;
  return envelope;
}

Fault timeout_fault(const Request& request) {
  char text[96];
  snprintf(text, sizeof text, " did not %s tag %lld within %.3g s",
           request.is_send ? "make room for a message with" : "send a message with",
           static_cast<long long>(request.tag), request.seconds);
  if (request.peer == kAnyRank) return Fault("timeout", {}, std::string("any rank") + text);
  return Fault("timeout", {request.peer}, "rank " + std::to_string(request.peer) + text);
}

}  // namespace

PointToPoint::PointToPoint(RankContext& context)
    : context_(context),
      segment_(context.segment),
      rank_(context.rank),
      ring_bytes_(segment_.ring_bytes()),
      stores_(segment_.tunables().slow_outbox_ns),
      outgoing_(context.size),
      incoming_(context.size) {}

PointToPoint::~PointToPoint() {
  close();
  if (thread_.joinable()) thread_.detach();  // this is that thread, about to end
}

// ---- progress --------------------------------------------------------------------------------

void PointToPoint::start(const RequestPtr& request, bool will_wait) {
  std::vector<Outcome> outcomes;
  if (segment_.tunables().read_messages.contains(request->buffer.bytes))
    context_.memory.try_peers();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    request->number = ++started_;
    requests_.push_back(request);
    pending_ = requests_.size();
    long_requests_ += is_long(*request);
    if (request->is_send)
      outgoing_[request->peer].queue.push_back(request);
    else if (!deliver_unexpected(request))
      posted_.push_back(request);
    progress(Checks::kLocal);
    if (!will_wait) ensure_progress_thread(is_long(*request));
    outcomes.swap(outcomes_);
  }
  deliver(outcomes);
}

void PointToPoint::cancel(const RequestPtr& request) {
  std::vector<Outcome> outcomes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!request->finished)
      finish(request, Fault("aborted", {rank_}, "interrupted by a signal"), -1);
    posted_.remove(request);
    outcomes.swap(outcomes_);
  }
  deliver(outcomes);
}

void PointToPoint::progress(Checks checks) {
  for (int peer = 0; peer < context_.size; ++peer) {
    if (!outgoing_[peer].queue.empty()) send_fragments(peer);
    if (incoming_[peer].active || !posted_.empty()) receive_fragments(peer);
  }
  if (checks == Checks::kNone || requests_.empty()) return;
  fail_stopped();
  fail_lost(checks == Checks::kProcesses);
  fail_broken();
  fail_timed_out();
}

bool PointToPoint::try_progress(Checks checks) {
  std::vector<Outcome> outcomes;
  bool moved = false;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (checks != Checks::kNone)
      lock.lock();
    else if (!lock.try_lock())
      return false;  // another thread runs it
    const uint64_t before = fragments_;
    progress(checks);
    moved = fragments_ != before;
    outcomes.swap(outcomes_);
  }
  deliver(outcomes);
  return moved;
}

/// Complete finished requests. Not under the lock, since callbacks may post requests.
void PointToPoint::deliver(std::vector<Outcome>& outcomes) {
  if (outcomes.empty()) return;
  for (Outcome& done : outcomes) done.completion->complete(std::move(done.fault), done.source);
  segment_.control(rank_).message_event.notify();  // another thread may wait for one of these
}

/// Sleeps only if nothing has moved for options.pace. Runs the other checks before each sleep, and
/// once a slice however much moves.
template <class Finished>
bool PointToPoint::progress_until(Finished&& finished, const WaitOptions& options) {
  const int64_t begun = now_ns();
  int64_t last_check = begun;
  for (;;) {
    const bool moved = spin(
        options, [&] { return try_progress(Checks::kNone) || finished(); },
        [&](int core) {
          return context_.shares_core(core, 0, context_.size, [](int) { return true; });
        });
    if (finished()) return true;
    if (moved && now_ns() - last_check < kSlice) continue;
    last_check = now_ns();
    EventWaiter waiter(segment_.control(rank_).message_event, context_.sleeps);
    try_progress(liveness_timer_.due() ? Checks::kProcesses : Checks::kLocal);
    if (finished()) return true;
    if (now_ns() >= options.deadline()) return false;
    const Woken woken = waiter.sleep(std::min(options.deadline(), next_deadline()));
    if (woken != Woken::kNotified) options.check_signals(begun);
  }
}

int64_t PointToPoint::next_deadline() {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t next = kNever;
  for (const RequestPtr& request : requests_) next = std::min(next, request->deadline);
  return next;
}

bool PointToPoint::wait(const Completion& completion, const WaitOptions& options) {
  struct Waiter {
    explicit Waiter(PointToPoint& engine_) : engine(engine_) { ++engine.waiters_; }
    ~Waiter() {
      if (--engine.waiters_ > 0 || engine.pending_ == 0) return;
      std::lock_guard<std::mutex> lock(engine.mutex_);
      engine.ensure_progress_thread(engine.long_requests_ > 0);
    }
    PointToPoint& engine;
  } waiter(*this);
  return progress_until([&] { return completion.done(); }, options);
}

void PointToPoint::expect_nobody_waits() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (requests_.empty() || stopping_) return;
  start_thread();
  wake_up_.post(requests_.front()->number, started_);  // also for when a waiting thread has its own
}

void PointToPoint::start_thread() {
  if (!thread_.joinable()) thread_ = std::thread([this, owner = owner_.lock()] { run_thread(); });
}

/// Have the core's thread look, or start at once, if requests are pending and no thread waits for them.
void PointToPoint::ensure_progress_thread(bool at_once) {
  if (requests_.empty() || waiters_ > 0 || stopping_) return;
  start_thread();
  wake_up_.post(requests_.front()->number, at_once ? started_ : 0);
}

void PointToPoint::run_thread() {
  WaitOptions options;
  options.pace = background_pace_for(context_.size, context_.cores());
  const auto needed = [this] { return pending_ > 0 && waiters_ == 0; };
  const auto oldest = [&] { return needed() ? requests_.front()->number : 0; };
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    wake_up_.wait(lock, oldest, [&] { return stopping_.load(); });
    lock.unlock();
    progress_until([&] { return stopping_ || !needed(); }, options);
    lock.lock();
  }
}

void PointToPoint::close() {
  std::vector<Outcome> outcomes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    const Fault closed("closed", {rank_}, "the group was closed on this rank");
    fail_if([&](const Request&) { return std::optional<Fault>(closed); });
    outcomes.swap(outcomes_);
    wake_up_.stop();
  }
  deliver(outcomes);
  segment_.control(rank_).message_event.notify_always();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

// ---- sending ---------------------------------------------------------------------------------

void PointToPoint::send_fragments(int peer) {
  Outgoing& out = outgoing_[peer];
  while (!out.queue.empty() && !out.broken) {
    if (out.awaits_answer && !await_answer(peer)) return;
    if (out.queue.empty()) return;
    const RequestPtr request = out.queue.front();
    if (request->finished) {  // failed; if half of it was sent, the channel cannot carry another
      out.broken = request->moved > 0 || request->refused;
      out.queue.pop_front();
      continue;
    }
    const size_t left = request->buffer.bytes - request->moved;
    const size_t bytes = std::min(left, kFragment);
    Envelope envelope{};
    envelope.bytes = static_cast<uint32_t>(bytes);
    envelope.first = request->moved == 0 && !request->refused;
    envelope.tag = request->tag;
    envelope.total = request->buffer.bytes;
    envelope.dtype = static_cast<uint32_t>(request->dtype);
    envelope.label = request->label;
    if (shows(*request, peer)) {
      const ShownBuffer shown = {reinterpret_cast<uint64_t>(request->buffer.data),
                                 request->buffer.bytes, 0, 0};
      envelope.bytes = sizeof shown;
      envelope.shown = 1;
      if (!write_fragment(peer, envelope, reinterpret_cast<const char*>(&shown))) return;
      ++out.shown_count;
      out.awaits_answer = true;
      return;
    }
    if (!write_fragment(peer, envelope, request->buffer.data + request->moved)) return;
    request->moved += bytes;
    if (request->moved < request->buffer.bytes) continue;
    out.queue.pop_front();
    finish(request, std::nullopt, -1);
  }
}

bool PointToPoint::shows(const Request& request, int peer) const {
  return request.buffer.bytes > kFragment && request.moved == 0 && !request.refused &&
         segment_.tunables().read_messages.contains(request.buffer.bytes) && peer != rank_ &&
         context_.memory.readable();
}

/// True once the receiver has answered the front request, which shows memory.
bool PointToPoint::await_answer(int peer) {
  Outgoing& out = outgoing_[peer];
  const RequestPtr request = out.queue.front();
  const uint64_t answer = segment_.cursor(rank_, peer).answer.load();
  if (request->finished) {  // withdrawn: see finish()
    out.broken = true;
    return false;
  }
  if (answer / 2 != out.shown_count) return false;
  out.awaits_answer = false;
  ++fragments_;
  if (answer % 2 == 1) {
    request->refused = true;
    return true;
  }
  out.queue.pop_front();
  finish(request, std::nullopt, -1);
  return true;
}

/// Reads the receiver's position only if necessary: the line is in the receiver's cache.
bool PointToPoint::has_room(int peer, size_t room) {
  Outgoing& out = outgoing_[peer];
  const auto has = [&] {
    const uint64_t used = out.head - out.known_tail;
    return used <= ring_bytes_ && ring_bytes_ - used >= room;
  };
  if (has()) return true;
  out.known_tail = segment_.cursor(rank_, peer).tail.load();
  return has();
}

/// False if the ring has no room for the fragment.
bool PointToPoint::write_fragment(int peer, const Envelope& envelope, const char* data) {
  Outgoing& out = outgoing_[peer];
  Cursor& cursor = segment_.cursor(rank_, peer);
  const Ring ring = ring_of(segment_, rank_, peer);
  const size_t room = fragment_room(envelope.bytes);
  if (!has_room(peer, room)) return false;
  memcpy(ring.at(out.head), &envelope, sizeof envelope);
  stores_.put(envelope.bytes,
              [&](bool streamed) { ring.write(out.head + kLine, data, envelope.bytes, streamed); });
  out.head += room;
  if (is_short(envelope)) write_short(cursor.last, envelope, data, out.head);
  cursor.head.store(out.head);
  ++fragments_;
  if (peer != rank_) segment_.control(peer).message_event.notify();
  return true;
}

// ---- the short way ---------------------------------------------------------------------------

bool PointToPoint::send_now(int peer, const Buffer& buffer, DType dtype, int64_t tag,
                            uint64_t label) {
  if (buffer.bytes > kFragment || context_.stop_fault()) return false;
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || !outgoing_[peer].queue.empty() || outgoing_[peer].broken) return false;
  return write_fragment(peer, envelope_of(buffer, dtype, tag, label), buffer.data);
}

bool PointToPoint::receive_now(int peer, const Buffer& buffer, DType dtype, int64_t tag,
                               uint64_t label) {
  if (buffer.bytes > kFragment || !arrived(peer)) return false;
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || stopping_ || !posted_.empty() || !unexpected_.empty()) return false;
  Incoming& in = incoming_[peer];
  Cursor& cursor = segment_.cursor(peer, rank_);
  const uint64_t head = cursor.head.load(), available = head - in.tail;
  const size_t room = fragment_room(buffer.bytes);
  if (in.active || in.corrupt || available > ring_bytes_ || available < room) return false;
  const Envelope expected = envelope_of(buffer, dtype, tag, label);
  const bool alone = available == room && is_short(expected);
  if (!alone || !read_short(cursor.last, head, expected, buffer.data)) {
    Envelope envelope;  // a private copy: what is checked is what is used
    const Ring ring = ring_of(segment_, peer, rank_);
    memcpy(&envelope, ring.at(in.tail), sizeof envelope);
    if (memcmp(&envelope, &expected, sizeof envelope) != 0) return false;
    ring.read(in.tail + kLine, buffer.data, buffer.bytes, false);
  }
  in.tail += room;
  cursor.tail.store(in.tail);
  ++fragments_;
  if (peer != rank_) segment_.control(peer).message_event.notify();
  return true;
}

// ---- receiving -------------------------------------------------------------------------------

void PointToPoint::receive_fragments(int peer) {
  Incoming& in = incoming_[peer];
  Cursor& cursor = segment_.cursor(peer, rank_);
  while (!in.corrupt) {
    if (in.reading) {
      read_piece(peer);
      if (in.reading) return;  // other messages, deadlines and peers have their turn
    }
    const uint64_t available = cursor.head.load() - in.tail;
    if (available == 0) return;
    const uint64_t before = in.tail;
    in.corrupt = available > ring_bytes_ || available < kLine || !receive_fragment(peer, available);
    if (in.tail == before) return;
    cursor.tail.store(in.tail);
    ++fragments_;
    if (peer != rank_) segment_.control(peer).message_event.notify();
  }
}

/// Receive one fragment, or leave it if no receive matches. False if it is corrupt.
bool PointToPoint::receive_fragment(int peer, uint64_t available) {
  Incoming& in = incoming_[peer];
  Envelope envelope;  // a private copy: what is checked is what is used
  memcpy(&envelope, ring_of(segment_, peer, rank_).at(in.tail), sizeof envelope);
  if (envelope.bytes > kFragment || fragment_room(envelope.bytes) > available) return false;
  if ((envelope.first != 0) == in.active) return false;
  if (envelope.shown != 0 && (in.active || envelope.bytes != sizeof(ShownBuffer))) return false;
  if (in.active) {
    if (envelope.bytes > in.current.total - in.received) return false;
  } else {
    if (envelope.bytes > envelope.total) return false;
    if (!begin_message(peer, envelope)) return true;
  }
  if (envelope.shown != 0)
    begin_reading(peer, envelope);
  else
    store_fragment(peer, envelope);
  in.tail += fragment_room(envelope.bytes);
  if (envelope.shown == 0 && in.received == in.current.total) finish_message(peer);
  return true;
}

/// Choose the destination of a message; false to leave it in the ring.
bool PointToPoint::begin_message(int peer, const Envelope& envelope) {
  Incoming& in = incoming_[peer];
  RequestPtr request = take_matching(peer, envelope.tag);
  if (!request && !has_posted_receive(peer)) return false;
  in.active = true;
  in.current = envelope;
  in.received = 0;
  if (!request) {
    in.unexpected = std::make_shared<Unexpected>(Unexpected{peer, envelope, {}, nullptr});
    unexpected_.push_back(in.unexpected);
  } else if (auto fault = check_fit(*request, envelope, peer)) {
    finish(request, fault, peer);
  } else {
    in.target = request;
  }
  return true;
}

/// Begin to read a message with a posted receive from the sender's memory.
void PointToPoint::begin_reading(int peer, const Envelope& envelope) {
  Incoming& in = incoming_[peer];
  ++in.shown_count;
  memcpy(&in.shown, ring_of(segment_, peer, rank_).at(in.tail + kLine), sizeof in.shown);
  if (in.unexpected || in.shown.bytes != envelope.total || in.shown.row_bytes != 0)
    return answer(peer, true);
  in.reading = true;
}

void PointToPoint::read_piece(int peer) {
  Incoming& in = incoming_[peer];
  if (in.target && !in.target->finished) {
    const size_t bytes = std::min<size_t>(kReadPiece, in.current.total - in.received);
    const Buffer to = {in.target->buffer.data + in.received, bytes};
    ++fragments_;
    if (!context_.memory.read_from(peer, in.shown, in.received, to)) {
      in.reading = false;
      in.received = 0;
      return answer(peer, true);
    }
    in.received += bytes;
    if (in.received < in.current.total) return;
    // If the sender gave the message up before this, the data is invalid, and nothing follows.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    in.reading = false;
    if (segment_.cursor(peer, rank_).withdrawn.load() == in.shown_count) return;
  }
  in.reading = false;
  answer(peer, false);
  finish_message(peer);
}

void PointToPoint::answer(int peer, bool refused) {
  Cursor& cursor = segment_.cursor(peer, rank_);
  cursor.answer.store(2 * incoming_[peer].shown_count + (refused ? 1 : 0));
  if (peer != rank_) segment_.control(peer).message_event.notify();
}

void PointToPoint::store_fragment(int peer, const Envelope& envelope) {
  Incoming& in = incoming_[peer];
  const Ring ring = ring_of(segment_, peer, rank_);
  if (in.target && !in.target->finished) {
    ring.read(in.tail + kLine, in.target->buffer.data + in.received, envelope.bytes,
              in.current.total >= kStreamedBytes);
  } else if (in.unexpected) {
    in.unexpected->data.resize(
        in.received + envelope.bytes);  // grows by the bytes that came, not by those announced
    ring.read(in.tail + kLine, in.unexpected->data.data() + in.received, envelope.bytes, false);
  }
  in.received += envelope.bytes;
}

void PointToPoint::finish_message(int peer) {
  Incoming& in = incoming_[peer];
  in.active = false;
  if (in.target && !in.target->finished) finish(in.target, std::nullopt, peer);
  in.target.reset();
  const auto unexpected = std::move(in.unexpected);
  in.unexpected.reset();
  if (!unexpected) return;
  unexpected->complete = true;
  if (!unexpected->receive) return;
  unexpected_.remove(unexpected);
  if (unexpected->receive->finished) return;
  memcpy(unexpected->receive->buffer.data, unexpected->data.data(), unexpected->data.size());
  finish(unexpected->receive, std::nullopt, peer);
}

/// Match a new receive with the unexpected messages. True if one matches.
bool PointToPoint::deliver_unexpected(const RequestPtr& request) {
  auto match = std::find_if(unexpected_.begin(), unexpected_.end(), [&](auto& message) {
    return !message->receive && message->envelope.tag == request->tag &&
           (request->peer == kAnyRank || request->peer == message->source);
  });
  if (match == unexpected_.end()) return false;
  const std::shared_ptr<Unexpected> message = *match;
  const auto fault = check_fit(*request, message->envelope, message->source);
  if (!message->complete && !fault) {
    message->receive = request;
    return true;
  }
  if (!fault && request->buffer.bytes > 0)
    memcpy(request->buffer.data, message->data.data(), request->buffer.bytes);
  unexpected_.erase(match);
  if (incoming_[message->source].unexpected == message)
    incoming_[message->source].unexpected.reset();
  finish(request, fault, message->source);
  return true;
}

RequestPtr PointToPoint::take_matching(int peer, int64_t tag) {
  auto match = std::find_if(posted_.begin(), posted_.end(), [&](auto& request) {
    return request->tag == tag && (request->peer == kAnyRank || request->peer == peer);
  });
  if (match == posted_.end()) return nullptr;
  RequestPtr request = *match;
  posted_.erase(match);
  return request;
}

bool PointToPoint::has_posted_receive(int peer) const {
  return std::any_of(posted_.begin(), posted_.end(), [&](auto& request) {
    return request->peer == kAnyRank || request->peer == peer;
  });
}

// ---- finishing -------------------------------------------------------------------------------

void PointToPoint::finish(const RequestPtr& request, std::optional<Fault> fault, int source) {
  request->finished = true;
  if (fault && request->is_send) {
    const Outgoing& out = outgoing_[request->peer];
    if (out.awaits_answer && out.queue.front() == request)  // the buffer may change from now on
      segment_.cursor(rank_, request->peer).withdrawn.store(out.shown_count);
  }
  requests_.remove(request);
  pending_ = requests_.size();
  long_requests_ -= is_long(*request);
  outcomes_.push_back({request->completion, std::move(fault), source});
}

/// Fail the requests for which fault_of(request) is a fault.
template <class FaultOf>
void PointToPoint::fail_if(FaultOf&& fault_of) {
  for (auto at = requests_.begin(); at != requests_.end();) {
    const RequestPtr request = *at++;
    if (std::optional<Fault> fault = fault_of(*request)) finish(request, std::move(fault), -1);
  }
  posted_.remove_if([](const RequestPtr& request) { return request->finished; });
}

void PointToPoint::fail_stopped() {
  if (auto fault = context_.stop_fault()) fail_if([&](const Request&) { return fault; });
}

void PointToPoint::fail_timed_out() {
  const int64_t now = now_ns();
  fail_if([&](const Request& request) -> std::optional<Fault> {
    if (now < request.deadline) return std::nullopt;
    return timeout_fault(request);
  });
}

/// Fail requests on channels that are broken or corrupt.
void PointToPoint::fail_broken() {
  fail_if([&](const Request& request) -> std::optional<Fault> {
    if (request.peer == kAnyRank) return std::nullopt;
    const std::string name = "rank " + std::to_string(request.peer);
    if (request.is_send && outgoing_[request.peer].broken)
      return Fault("aborted", {rank_}, "an earlier message to " + name + " was given up half way");
    if (!request.is_send && incoming_[request.peer].corrupt)
      return Fault("mismatch", {request.peer}, "the channel from " + name + " holds garbage");
    return std::nullopt;
  });
}

/// Fail requests of lost peers; a receive from any rank fails if a rank died, or if all left.
void PointToPoint::fail_lost(bool check_processes) {
  std::vector<int> died, gone;
  for (int peer = 0; peer < context_.size; ++peer) {
    if (peer == rank_) continue;
    const bool dead = check_processes && context_.liveness.dead(peer);
    if (dead) died.push_back(peer);
    if (dead || context_.liveness.departed(peer)) gone.push_back(peer);
  }
  if (gone.empty()) return;
  fail_stopped();          // why they left, if the group was aborted since
  for (int peer : gone) {  // what a rank sent or answered before it went still counts
    receive_fragments(peer);
    if (outgoing_[peer].awaits_answer) await_answer(peer);
  }
  const bool fails_any = !died.empty() || static_cast<int>(gone.size()) == context_.size - 1;
  fail_if([&](const Request& request) -> std::optional<Fault> {
    if (request.peer == kAnyRank && fails_any) return peer_lost_fault(died, gone);
    if (!std::count(gone.begin(), gone.end(), request.peer)) return std::nullopt;
    return peer_lost_fault(died, {request.peer});
  });
}

}  // namespace tilework
