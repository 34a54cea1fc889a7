#include "rank_program.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>

#include "system.h"

namespace tilework::simulation {
namespace {

constexpr double kTimeoutSeconds = 1;         // of virtual time
constexpr int64_t kStopNs = 5'000'000'000;    // longer than that
constexpr int64_t kNoticeNs = 2'000'000'000;  // within which a death is noticed
constexpr char kWrittenLate = 0x77;
constexpr size_t kPrivateBytes = size_t{4} << 20;  // of a rank's own memory

[[noreturn]] void fail(const std::string& text);

/// What a caller leaves until its part is published.
class CheckedInterlude final : public Interlude {
 public:
  void published() override {
    if (published_++ > 0) fail("an operation was published twice");
  }
  void waits() override {
    if (published_ == 0) fail("an operation waited before it was published");
  }

 private:
  int published_ = 0;
};

[[noreturn]] void fail(const std::string& text) {
  Schedule::running()->fail(text);
  throw std::logic_error("a failed schedule went on");
}

/// Memory for the tensors of one side of an operation; it goes back to where it came from.
struct Block {
  Arena* home = nullptr;
  char* data = nullptr;

  void take(Arena& arena, Arena& other, size_t bytes) {
    home = &arena;
    data = arena.allocate(bytes + 1);
    if (data) return;
    home = &other;
    data = other.allocate(bytes + 1);
    if (!data) fail("the trial needs more memory than there is");
  }
  void give_back() {
    if (data) home->release(data);
    data = nullptr;
  }
};

/// What a rank passes to one step.
struct Tensors {
  Block inputs_block, outputs_block;
  std::vector<Buffer> inputs, outputs;
};

using Elements = std::vector<int32_t>;

Elements contribution(const Step& step, int from, int to, size_t count) {
  Elements result(count);
  for (size_t i = 0; i < count; ++i) result[i] = element(step, from, to, i);
  return result;
}

int32_t reduce(ReduceOp op, int32_t a, int32_t b) {
  const auto x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
  switch (op) {
    case ReduceOp::kSum: return static_cast<int32_t>(x + y);
    case ReduceOp::kProduct: return static_cast<int32_t>(x * y);
    case ReduceOp::kMin: return std::min(a, b);
    case ReduceOp::kMax: return std::max(a, b);
    default: return static_cast<int32_t>(x ^ y);
  }
}

/// What one rank does in one group.
class Member {
 public:
  Member(const Step& step, int rank, int size) : step_(step), rank_(rank), size_(size) {}

  int inputs() const { return arity(step_.kind, rank_ == step_.root, size_).inputs; }
  int outputs() const { return arity(step_.kind, rank_ == step_.root, size_).outputs; }
  size_t input_count(int i) const { return step_.count(rank_, single_input() ? 0 : i); }
  size_t output_count(int i) const {
    switch (step_.kind) {
      case OpKind::kScatter: return step_.count(step_.root, rank_);
      case OpKind::kBroadcast:
      case OpKind::kReduceScatter: return step_.count(0, rank_);
      default: return step_.count(i, single_input() ? 0 : rank_);
    }
  }
  Elements input(int i) const {
    return contribution(step_, rank_, single_input() ? 0 : i, input_count(i));
  }
  Elements expected(int i) const {
    const size_t count = output_count(i);
    switch (step_.kind) {
      case OpKind::kBroadcast: return contribution(step_, step_.root, 0, count);
      case OpKind::kScatter: return contribution(step_, step_.root, rank_, count);
      case OpKind::kAllReduce:
      case OpKind::kReduce: return reduced(0, count);
      case OpKind::kScan:
      case OpKind::kExscan: return scanned(count);
      case OpKind::kReduceScatter: return reduced(rank_, count);
      case OpKind::kAllToAll: return contribution(step_, i, rank_, count);
      default: return contribution(step_, i, 0, count);
    }
  }
  /// The input that may share its memory with the output of the same part; -1: none.
  int own_input() const { return single_input() ? 0 : rank_; }
  int own_output() const { return outputs() == size_ ? rank_ : 0; }
  bool may_be_in_place() const {
    return step_.in_place && inputs() > 0 && outputs() > 0 && step_.kind != OpKind::kAllToAll;
  }

 private:
  bool single_input() const {
    return step_.kind != OpKind::kScatter && step_.kind != OpKind::kReduceScatter &&
           step_.kind != OpKind::kAllToAll;
  }
  /// From the root, the first or the last rank, to this rank; the root's exscan leaves its elements.
  Elements scanned(size_t count) const {
    const int own = step_.kind == OpKind::kScan ? 1 : 0;
    const int begin = step_.root == 0 ? 0 : rank_ + 1 - own;
    const int end = step_.root == 0 ? rank_ + own : size_;
    return begin < end ? reduced(0, count, begin, end) : contribution(step_, rank_, 0, count);
  }
  Elements reduced(int to, size_t count) const { return reduced(to, count, 0, size_); }
  Elements reduced(int to, size_t count, int begin, int end) const {
    Elements result = contribution(step_, begin, to, count);
    for (int from = begin + 1; from < end; ++from)
      for (size_t i = 0; i < count; ++i)
        result[i] = reduce(step_.reduce_op, result[i], element(step_, from, to, i));
    return result;
  }

  const Step& step_;
  const int rank_, size_;
};

void write(const Buffer& buffer, const Elements& elements) {
  if (!elements.empty()) memcpy(buffer.data, elements.data(), buffer.bytes);
}

/// Fail unless a buffer has these elements, and write others over them at once.
void check(const Buffer& buffer, const Elements& expected, const std::string& what) {
  Elements found(expected.size());
  if (!found.empty()) memcpy(found.data(), buffer.data, buffer.bytes);
  const auto wrong = std::mismatch(expected.begin(), expected.end(), found.begin());
  if (wrong.first != expected.end())
    fail(what + " has wrong elements from " + std::to_string(wrong.first - expected.begin()) +
         " on: " + std::to_string(*wrong.second) + ", not " + std::to_string(*wrong.first));
}

/// An operation under way.
struct Pending {
  const Step* step;
  RequestPtr request;  // null for a collective
  std::shared_ptr<Completion> completion;
  Tensors tensors;
};

class Rank {
 public:
  Rank(Trial& trial, int rank) : trial_(trial), plan_(trial.plan), rank_(rank) {
    const int fd = memfd_create("private", MFD_CLOEXEC);
    if (ftruncate(fd, kPrivateBytes) != 0) fail("no memory");
    private_ = std::make_shared<Arena>(fd, 0, kPrivateBytes);
    for (size_t i = 0; i < plan_.groups.size(); ++i) {
      const std::vector<int>& members = plan_.groups[i];
      const auto self = std::find(members.begin(), members.end(), rank);
      group_ranks_.push_back(static_cast<int>(self - members.begin()));
      const bool here = self != members.end();
      groups_.push_back(here ? Group::make(trial.segments[i], group_ranks_[i],
                                           static_cast<int>(members.size()), "nonce")
                             : nullptr);
      arenas_.push_back(here ? groups_[i]->arena() : nullptr);
      usable_.push_back(here);
    }
  }

  void run() {
    wait_for_others();
    std::vector<std::thread> others;
    for (int lane = 1; lane < plan_.lanes; ++lane)
      others.emplace_back([this, lane] { run_lane(lane); });
    run_lane(0);
    for (std::thread& other : others) other.join();
    check_written_late();
    for (const auto& group : groups_)
      if (group) group->close();
  }

 private:
  /// As bring-up does; only then may a rank die, since who has not joined is watched by others.
  void wait_for_others() {
    Schedule& schedule = *Schedule::running();
    const auto number = reinterpret_cast<uint64_t>(&trial_.joined);
    if (++trial_.joined == plan_.ranks) {
      schedule.wake(number, true);
      if (plan_.strikes())
        schedule.strike_at(plan_.victim, schedule.points() + plan_.point,
                           plan_.mishap == Mishap::kStop ? kStopNs : kNever);
    }
    while (trial_.joined < plan_.ranks) schedule.wait({number, kNever, true});
  }

  void run_lane(int lane) {
    std::deque<Pending> pending;
    for (const Step& step : plan_.steps) {
      if (lane == 0 && static_cast<size_t>(step.number) == plan_.mishap_step) meet_mishap();
      const bool takes_part = !step.is_message || group_ranks_[step.group] == step.from ||
                              group_ranks_[step.group] == step.to;
      if (step.lane != lane || !usable_[step.group] || !takes_part) continue;
      ++trial_.entered[step.number];
      if (step.is_message)
        start_message(step, pending);
      else
        start_collective(step, pending);
      while (!pending.empty() && Schedule::running()->random().once_in(3)) finish_oldest(pending);
    }
    while (!pending.empty()) finish_oldest(pending);
  }

  void meet_mishap() {
    if (rank_ != plan_.victim) return;
    const int group = plan_.mishap_group;
    if (plan_.mishap == Mishap::kAbort && usable_[group]) {
      usable_[group] = false;
      groups_[group]->abort("aborted", "as planned");
    } else if (plan_.mishap == Mishap::kLeave && usable_[group]) {
      usable_[group] = false;
      groups_[group]->close();
    }
  }

  /// As Python's side does: no operation of the group is called again, by anyone. The tensors are the
  /// caller's again, who writes those that others may have written.
  void give_up(const Step& step, const Fault& fault, Tensors& tensors) {
    const Schedule& schedule = *Schedule::running();
    const std::string text = "rank " + std::to_string(rank_) + ", operation " +
                             std::to_string(step.number) + ": " + fault.kind + ": " + fault.text;
    const bool own = rank_ == plan_.victim && plan_.mishap == Mishap::kLeave;
    const bool stop = plan_.mishap == Mishap::kStop;
    const bool expected = fault.kind == "aborted" || (own && fault.kind == "closed") ||
                          (stop && fault.kind == "timeout") ||
                          (!stop && plan_.mishap != Mishap::kAbort && fault.kind == "peer_lost");
    if (!plan_.troubled(step.group) || !expected) fail(text);
    if (!stop && plan_.strikes() && schedule.now() - schedule.struck_at() > kNoticeNs)
      fail(text + ", too late");
    usable_[step.group] = false;
    try {
      groups_[step.group]->abort(fault.kind, fault.text);
    } catch (const Fault&) {  // closed by this rank itself
    }
    for (const Buffer& output : tensors.outputs) {
      if (step.is_message || step.kind != OpKind::kAllReduce || output.bytes == 0) continue;
      write_given_up(output.data, kWrittenLate, output.bytes);
      written_late_.push_back(output);
    }
  }

  void check_written_late() {
    for (const Buffer& buffer : written_late_)
      if (std::count(buffer.data, buffer.data + buffer.bytes, kWrittenLate) !=
          static_cast<ptrdiff_t>(buffer.bytes))
        fail("rank " + std::to_string(rank_) + "'s memory was written after its operation raised");
  }

  Block block(const Step& step, bool in_arena, size_t bytes) {
    Block result;
    Arena& arena = *arenas_[step.group];
    result.take(in_arena ? arena : *private_, in_arena ? *private_ : arena, bytes);
    return result;
  }

  Tensors make_tensors(const Step& step, const Member& member) {
    const int self = group_ranks_[step.group];
    Tensors tensors;
    std::vector<size_t> counts;
    size_t bytes = 0;
    for (int i = 0; i < member.inputs(); ++i) bytes += member.input_count(i) * sizeof(int32_t);
    tensors.inputs_block = block(step, step.inputs_in_arena[self], bytes);
    char* next = tensors.inputs_block.data;
    for (int i = 0; i < member.inputs(); ++i) {
      tensors.inputs.push_back({next, member.input_count(i) * sizeof(int32_t)});
      next += tensors.inputs.back().bytes;
    }
    bytes = 0;
    for (int i = 0; i < member.outputs(); ++i) bytes += member.output_count(i) * sizeof(int32_t);
    tensors.outputs_block = block(step, step.outputs_in_arena[self], bytes);
    next = tensors.outputs_block.data;
    for (int i = 0; i < member.outputs(); ++i) {
      tensors.outputs.push_back({next, member.output_count(i) * sizeof(int32_t)});
      next += tensors.outputs.back().bytes;
    }
    if (member.may_be_in_place()) {
      if (member.inputs() == 1)
        tensors.inputs[0].data = tensors.outputs[member.own_output()].data;
      else
        tensors.outputs[0].data = tensors.inputs[member.own_input()].data;
    }
    for (int i = 0; i < member.inputs(); ++i) write(tensors.inputs[i], member.input(i));
    const bool keeps = step.kind == OpKind::kBroadcast || step.kind == OpKind::kExscan;
    if (keeps && self == step.root) write(tensors.outputs[0], member.expected(0));
    return tensors;
  }

  void start_collective(const Step& step, std::deque<Pending>& pending) {
    Group& group = *groups_[step.group];
    const Member member(step, group.rank(), group.size());
    Tensors tensors = make_tensors(step, member);
    Operation operation{};
    operation.kind = step.kind;
    operation.dtype = DType::kInt32;
    operation.reduce_op = step.reduce_op;
    operation.root = step.root;
    operation.inputs = {tensors.inputs.data(), static_cast<int>(tensors.inputs.size())};
    operation.outputs = {tensors.outputs.data(), static_cast<int>(tensors.outputs.size())};
    std::shared_ptr<Completion> completion;
    CheckedInterlude interlude;
    try {
      if (step.asynchronous)
        completion = group.submit(operation, kTimeoutSeconds);
      else
        group.run(operation, kTimeoutSeconds, nullptr,
                  (rank_ + step.number) % 2 ? &interlude : nullptr);
    } catch (const Fault& fault) {
      return give_up(step, fault, tensors);
    }
    if (completion)
      pending.push_back({&step, nullptr, completion, std::move(tensors)});
    else
      finish_collective(step, tensors);
  }

  void finish_collective(const Step& step, Tensors& tensors) {
    const Group& group = *groups_[step.group];
    const Member member(step, group.rank(), group.size());
    const std::string name = "rank " + std::to_string(rank_) + ", operation " +
                             std::to_string(step.number) + ": output ";
    if (step.kind == OpKind::kBarrier && trial_.entered[step.number] != group.size())
      fail("rank " + std::to_string(rank_) + " left barrier " + std::to_string(step.number) +
           " before all had come");
    for (int i = 0; i < member.outputs(); ++i)
      check(tensors.outputs[i], member.expected(i), name + std::to_string(i));
    ++trial_.operations;
    write_again(tensors);
  }

  /// A tensor belongs to the caller again, who writes it at once, and lets the next have it.
  void write_again(Tensors& tensors) {
    for (const auto* side : {&tensors.inputs, &tensors.outputs})
      for (const Buffer& buffer : *side)
        if (buffer.bytes > 0) memset(buffer.data, 0x55, buffer.bytes);
    tensors.inputs_block.give_back();
    tensors.outputs_block.give_back();
  }

  void start_message(const Step& step, std::deque<Pending>& pending) {
    const int self = group_ranks_[step.group];
    Tensors tensors;
    const size_t bytes = step.counts[0] * sizeof(int32_t);
    tensors.inputs_block = block(step, false, bytes);
    tensors.inputs = {{tensors.inputs_block.data, bytes}};
    auto request = std::make_shared<Request>();
    request->is_send = self == step.from;
    request->peer = request->is_send ? step.to : step.from_any ? kAnyRank : step.from;
    request->buffer = tensors.inputs[0];
    request->dtype = DType::kInt32;
    request->tag = step.tag;
    request->seconds = kTimeoutSeconds;
    request->deadline = deadline_after(kTimeoutSeconds);
    if (request->is_send) write(tensors.inputs[0], contribution(step, self, 0, step.counts[0]));
    try {
      groups_[step.group]->post(request, !step.asynchronous);
    } catch (const Fault& fault) {
      return give_up(step, fault, tensors);
    }
    pending.push_back({&step, request, request->completion, std::move(tensors)});
    if (step.asynchronous) return;
    std::swap(pending.front(), pending.back());
    finish_oldest(pending);
  }

  void finish_message(const Pending& done, Tensors& tensors) {
    const Step& step = *done.step;
    if (!done.request->is_send)
      check(tensors.inputs[0], contribution(step, step.from, 0, step.counts[0]),
            "rank " + std::to_string(rank_) + ", message " + std::to_string(step.number));
    ++trial_.operations;
    write_again(tensors);
  }

  void finish_oldest(std::deque<Pending>& pending) {
    Pending done = std::move(pending.front());
    pending.pop_front();
    try {
      await(*groups_[done.step->group], *done.completion, done.request != nullptr, *done.step);
      if (auto fault = done.completion->fault()) throw *fault;
    } catch (const Fault& fault) {
      return give_up(*done.step, fault, done.tensors);
    }
    if (done.request)
      finish_message(done, done.tensors);
    else
      finish_collective(*done.step, done.tensors);
  }

  /// In one of the ways in which programs do.
  void await(Group& group, Completion& completion, bool is_message, const Step& step) {
    const int way = (rank_ + step.number) % 4;
    if (way == 1) group.poll(completion, is_message);
    if (way == 2) group.expect_nobody_waits(is_message);
    if (way == 3 && step.asynchronous) completion.sleep_until_done({pace_for(2, 2)});
    group.wait(completion, is_message, -1, nullptr);
  }

  Trial& trial_;
  const Plan& plan_;
  const int rank_;
  std::shared_ptr<Arena> private_;
  std::vector<int> group_ranks_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<Buffer> written_late_;
  std::vector<char> usable_;  // groups in which this rank still calls operations
};

}  // namespace

void run_rank(Trial& trial, int rank) { Rank(trial, rank).run(); }

}  // namespace tilework::simulation
