#include "collectives/calibration.h"

#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

#include "collectives/group.h"

namespace tilework {
namespace {

constexpr size_t kMiB = 1024 * 1024;
constexpr size_t kOfAllRanks = 16 * kMiB;  // the longest messages together
constexpr double kTimeout = 5;  // seconds; a group whose rank lacks a core is slow, not stuck
/// A way replaces the default only if it takes at most this share of the default's time.
constexpr double kClearly = 0.9;
constexpr int kTurns = 5, kTurnsOfLong = 3;
constexpr size_t kLong = kMiB;
/// The most ns to spend on repeating turns that other programs disturbed: at a job's start the other ranks
/// still load their modules. Later disturbed turns count as measured. They do not mislead, since a way must
/// be faster in nearly all turns.
constexpr int64_t kRepeatBudget = 100'000'000;
constexpr int kMostDisturbed = 20;
/// The share of a turn that may be lost: a kernel thread's bursts do not matter, a time slice does.
constexpr double kLost = 0.1;
constexpr useconds_t kPause = 2000;

int64_t thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

/// Run the calling thread on one CPU, if it may, until the end.
class Pinned {
 public:
  explicit Pinned(int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof before_, &before_) != 0)
      return;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    pinned_ = sched_setaffinity(0, sizeof only, &only) == 0;
  }
  ~Pinned() {
    if (pinned_) sched_setaffinity(0, sizeof before_, &before_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  cpu_set_t before_{};
  bool pinned_ = false;
};

/// The kinds of measured work.
enum class Work { kAllGather, kAllToAll, kBroadcast, kAllReduce, kReduceScatter, kMessages };
constexpr const char* kWorkNames[] = {"all_gather", "all_to_all",     "broadcast",
                                      "all_reduce", "reduce_scatter", "send_recv"};

/// Touched memory in pages of one kind.
class Memory {
 public:
  Memory(size_t bytes, bool huge) : bytes_(bytes + kHugePage) {
    void* const place = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) throw std::bad_alloc();
    place_ = static_cast<char*>(place);
    madvise(place_, bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(begin(), 1, bytes);
  }
  ~Memory() { munmap(place_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* begin() const { return place_ + -reinterpret_cast<uintptr_t>(place_) % kHugePage; }

 private:
  const size_t bytes_;
  char* place_;
};

/// The seconds of a turn, and whether another program took a core during it.
struct Turn {
  double seconds;
  bool disturbed;
};

/// Some ranks, and the buffers of each.
class Ranks {
 public:
  Ranks(const std::vector<int>& cpus, int size, bool huge)
      : cpus_(cpus), size_(size), groups_(size), small_(size), large_(size) {
    if (cpus.size() < 2 || size < 2 || size % 2 != 0)
      throw std::invalid_argument("an even number of ranks and two CPUs are needed");
    Tunables apart;
    apart.threads_apart = 1;
    const File file(create_segment(size, kDefaultSlotBytes, "calibration", apart));
    for (int rank = 0; rank < size; ++rank)
      groups_[rank] = Group::make(file.fd, rank, size, "calibration");
    on_all([&](int rank) {
      small_[rank] = std::make_unique<Memory>(2 * size * kLong, false);
      large_[rank] = std::make_unique<Memory>((size + 1) * longest(), huge);
      for (int i = 0; i < 3; ++i)
        collective(rank, OpKind::kBarrier, 0);  // after it all ranks know who reads whom
    });
  }
  ~Ranks() {
    for (auto& group : groups_) group->close();
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int size() const { return size_; }
  size_t longest() const { return kOfAllRanks / size_; }
  bool can_read() { return groups_[0]->single_copy().rfind("possible", 0) == 0; }

  /// The mean seconds of some calls of an operation, on the slowest rank.
  Turn measure(Work work, size_t bytes, const Tunables& tunables) {
    const size_t calls = std::max<size_t>(1, std::min<size_t>(8, 4 * kMiB / bytes));
    std::vector<Turn> turns(size_);
    for (auto& group : groups_) group->set_tunables(tunables);
    on_all([&](int rank) {
      // The previous way has left cache lines of both outboxes in its own state; the outboxes hold a MiB.
      for (size_t done = 0; bytes <= kLong && done < kMiB; done += bytes) run(rank, work, bytes);
      const int64_t switches = context_switches(), cpu = thread_cpu_ns(), start = now_ns();
      for (size_t call = 0; call < calls; ++call) run(rank, work, bytes);
      const double wall = static_cast<double>(now_ns() - start);
      const double lost = wall - static_cast<double>(thread_cpu_ns() - cpu);
      const bool alone = static_cast<size_t>(size_) <= cpus_.size();  // else ranks take turns
      turns[rank] = {wall * 1e-9 / static_cast<double>(calls),
                     alone && context_switches() != switches && lost > kLost * wall};
    });
    Turn slowest = turns[0];
    for (const Turn& turn : turns) {
      slowest.seconds = std::max(slowest.seconds, turn.seconds);
      slowest.disturbed |= turn.disturbed;
    }
    return slowest;
  }

 private:
  /// Memory for messages as programs have it: only long tensors have huge pages.
  char* memory(int rank, size_t bytes) const {
    return (bytes <= kLong ? small_ : large_)[rank]->begin();
  }

  void run(int rank, Work work, size_t bytes) {
    switch (work) {
      case Work::kAllGather: return collective(rank, OpKind::kAllGather, bytes);
      case Work::kAllToAll: return collective(rank, OpKind::kAllToAll, bytes);
      case Work::kBroadcast: return collective(rank, OpKind::kBroadcast, bytes);
      case Work::kAllReduce: return collective(rank, OpKind::kAllReduce, bytes);
      case Work::kReduceScatter: return collective(rank, OpKind::kReduceScatter, bytes);
      case Work::kMessages:
        for (int first = 0; first < 2; ++first) message(rank, rank % 2 == first, bytes);
    }
  }

  /// From each rank of a pair to the other.
  void message(int rank, bool sends, size_t bytes) {
    auto request = std::make_shared<Request>();
    request->is_send = sends;
    request->peer = rank ^ 1;
    request->buffer = {memory(rank, bytes) + (sends ? 0 : bytes), bytes};
    request->dtype = DType::kFloat32;
    request->seconds = kTimeout;
    request->deadline = now_ns() + static_cast<int64_t>(kTimeout * 1e9);
    groups_[rank]->post(request, true);
    groups_[rank]->wait(*request->completion, true, -1, nullptr);
    if (auto fault = request->completion->fault()) throw *fault;
  }

  void collective(int rank, OpKind kind, size_t bytes) {
    std::vector<Buffer> parts;
    for (int part = 0; part < 2 * size_; ++part)
      parts.push_back({memory(rank, bytes) + part * bytes, bytes});
    const bool splits = kind == OpKind::kAllToAll || kind == OpKind::kReduceScatter;
    const Buffers inputs = {parts.data(), splits ? size_ : 1};
    Operation operation{};
    operation.kind = kind;
    operation.dtype = DType::kFloat32;
    operation.factor = 1;
    // A maximum leaves equal values unchanged.
    if (reduces(kind)) operation.reduce_op = ReduceOp::kMax;
    if (kind == OpKind::kAllGather || splits) {
      operation.inputs = inputs;
      operation.outputs = {parts.data() + inputs.count, kind == OpKind::kReduceScatter ? 1 : size_};
    } else if (kind != OpKind::kBarrier) {
      operation.outputs = inputs;
      if (kind == OpKind::kAllReduce) operation.inputs = inputs;
    }
    groups_[rank]->run(operation, kTimeout, nullptr);
  }

  template <class Act>
  void on_all(Act&& act) {
    std::vector<std::exception_ptr> failures(size_);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&, rank] {
        const Pinned pinned(cpus_[rank % cpus_.size()]);
        try {
          act(rank);
        } catch (...) {
          failures[rank] = std::current_exception();
          groups_[rank]->close();  // so that the other ranks do not wait
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures)
      if (failure) std::rethrow_exception(failure);
  }

  const std::vector<int> cpus_;
  const int size_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::vector<std::unique_ptr<Memory>> small_, large_;
};

/// A choice between two ways to do an operation.
struct Choice {
  Work work;
  std::vector<int> sizes;  // of messages, as powers of 2: the first that are measured
  const char* ways[2];     // the default, and another
  std::function<void(Tunables&, bool other)> choose;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

class Calibrator {
 public:
  Calibrator(const std::vector<int>& cpus, int size, bool huge, bool insists)
      : ranks_(cpus, size, huge), insists_(insists) {}

  Ranks& ranks() { return ranks_; }

  /// The sizes, around that of the largest gain, at which the other way is clearly faster. Both ends are
  /// found by bisection.
  SizeRange where_faster(const Choice& choice) {
    std::vector<double> gains;
    for (const int size : choice.sizes) gains.push_back(gain(choice, size));
    const auto best = std::max_element(gains.begin(), gains.end()) - gains.begin();
    if (gains[best] == 0) return {};
    const auto edge = [&](int step, ptrdiff_t end) {
      ptrdiff_t at = best;
      while (at != end && gains[at + step] > 0) at += step;
      int faster = choice.sizes[at], slower = at == end ? faster : choice.sizes[at + step];
      while (std::abs(faster - slower) > 1) {
        const int middle = (faster + slower) / 2;
        (gain(choice, middle) > 0 ? faster : slower) = middle;
      }
      return faster;
    };
    const int first = edge(-1, 0), last = edge(1, static_cast<ptrdiff_t>(gains.size()) - 1);
    const bool longest = last == choice.sizes.back();
    return {uint64_t{1} << first, longest ? kNeverBytes : (uint64_t{3} << last) / 2};
  }

  Calibration result;

 private:
  /// How much faster the other way is, as a logarithm: not only by the median, but in all turns (in all but
  /// one of five); else 0.
  double gain(const Choice& choice, int size) {
    const size_t bytes = size_t{1} << size;
    const int turns = bytes < kLong ? kTurns : kTurnsOfLong, tolerated = turns / kTurns;
    std::vector<double> seconds[2];
    int slower = 0;
    for (int turn = 0; turn < turns && slower <= tolerated; ++turn) {
      for (int i = 0; i < 2; ++i) {
        const int way = turn % 2 ? 1 - i : i;  // no way always comes first
        Tunables tunables = result.tunables;
        choice.choose(tunables, way == 1);
        seconds[way].push_back(undisturbed(choice.work, bytes, tunables));
      }
      slower += seconds[1].back() >= kClearly * seconds[0].back();
    }
    for (int way = 0; way < 2; ++way)
      result.measurements.push_back({kWorkNames[static_cast<size_t>(choice.work)], choice.ways[way],
                                     bytes, median(seconds[way])});
    const double share = median(seconds[1]) / median(seconds[0]);
    return slower > tolerated || share >= kClearly ? 0 : -std::log(share);
  }

  double undisturbed(Work work, size_t bytes, const Tunables& tunables) {
    for (;;) {
      const int64_t begun = now_ns();
      const Turn turn = ranks_.measure(work, bytes, tunables);
      if (!turn.disturbed) return turn.seconds;
      if (lost_ns_ > kRepeatBudget) {
        if (++disturbed_ > kMostDisturbed && !insists_)
          throw std::runtime_error("other programs kept taking the cores");
        return turn.seconds;
      }
      usleep(kPause);
      lost_ns_ += now_ns() - begun;
    }
  }

  Ranks ranks_;
  const bool insists_;
  int64_t lost_ns_ = 0;
  int disturbed_ = 0;
};

}  // namespace

Calibration calibrate(const std::vector<int>& cpus, int ranks, bool huge, bool insists) {
  Calibrator calibrator(cpus, ranks, huge, insists);
  Tunables& tunables = calibrator.result.tunables;
  const int last = 63 - __builtin_clzll(calibrator.ranks().longest());
  struct Streaming {
    Work work;
    uint64_t Tunables::* from;
    int last, outputs;
  };
  for (const Streaming& streaming :
       {Streaming{Work::kAllGather, &Tunables::streamed_all_gather, last, ranks},
        Streaming{Work::kAllToAll, &Tunables::streamed_all_to_all, last - 1, ranks},
        Streaming{Work::kBroadcast, &Tunables::streamed_rooted, last, 1}}) {
    const SizeRange cached = calibrator.where_faster(
        {streaming.work,
         {17, 20, streaming.last},
         {"streaming stores", "cached stores"},
         [&](Tunables& t, bool other) { t.*(streaming.from) = other ? kNeverBytes : 0; }});
    // Outputs that are far longer than all that was measured do not stay in a cache.
    const uint64_t below = std::min(cached.below, uint64_t{4} << streaming.last);
    if (!cached.empty()) tunables.*(streaming.from) = below * streaming.outputs;
  }
  const uint64_t chunks = calibrator
                              .where_faster({Work::kAllReduce,
                                             {14, 17, 19},
                                             {"one round", "chunks"},
                                             [](Tunables& t, bool other) {
                                               t.one_shot_bytes = other ? 0 : kNeverBytes / 2;
                                             }})
                              .from;
  tunables.one_shot_bytes = std::min<uint64_t>(chunks - 1, kDefaultSlotBytes) * ranks / 2;
  if (!calibrator.ranks().can_read()) return calibrator.result;
  struct Reading {
    Work work;
    SizeRange Tunables::* lengths;
    std::vector<int> sizes;
  };
  const std::vector<int> all = {14, 17, 20, last};
  // If the receiver reads a message directly, the sender waits for the answer, perhaps asleep. Only a long
  // message is worth that.
  for (const Reading& reading :
       {Reading{Work::kAllGather, &Tunables::read_all_gather, all},
        Reading{Work::kAllToAll, &Tunables::read_all_to_all, {14, 17, 20, last - 1}},
        Reading{Work::kBroadcast, &Tunables::read_rooted, all},
        Reading{Work::kAllReduce, &Tunables::read_all_reduce, all},
        Reading{Work::kReduceScatter, &Tunables::read_reduce_scatter, all},
        Reading{Work::kMessages, &Tunables::read_messages, {20, last}}})
    tunables.*(reading.lengths) = calibrator.where_faster(
        {reading.work, reading.sizes, {"outboxes", "single copy"}, [&](Tunables& t, bool other) {
           t.*(reading.lengths) = other ? SizeRange{0, kNeverBytes} : SizeRange{};
         }});
  return calibrator.result;
}

}  // namespace tilework
