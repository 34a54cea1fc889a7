#include "collectives/calibration.h"

#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>

#include "collectives/group.h"

namespace tilework {
namespace {

constexpr int kRanks = 2;
constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr size_t kLongest = 8 * kMiB;
constexpr double kTimeout = 5;  // seconds; a group whose rank lacks a core is slow, not stuck
/// A way replaces the default only if it takes at most this share of the default's time.
constexpr double kClearly = 0.9;
constexpr double kSlower = 1e9;
constexpr int kTurns = 5, kTurnsOfLong = 3, kFewTurns = 2;
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
enum class Work { kAllGather, kBroadcast, kAllReduce, kMessages };
constexpr const char* kWorkNames[] = {"all_gather", "broadcast", "all_reduce", "send_recv"};

/// The seconds of a turn, and whether another program took a core during it.
struct Turn {
  double seconds;
  bool disturbed;
};

/// Two ranks, and a buffer of each.
class Ranks {
 public:
  explicit Ranks(const std::vector<int>& cpus) {
    if (cpus.size() < kRanks) throw std::runtime_error("two CPUs are needed");
    std::copy_n(cpus.begin(), kRanks, cpus_);
    Tunables apart;
    apart.threads_apart = 1;
    const File file(create_segment(kRanks, kDefaultSlotBytes, "calibration", apart));
    for (int rank = 0; rank < kRanks; ++rank)
      groups_[rank] = Group::make(file.fd, rank, kRanks, "calibration");
    on_both([&](int rank) {
      buffers_[rank].reset(new char[(kRanks + 1) * kLongest]);  // its pages are taken when touched
      for (int i = 0; i < 3; ++i)
        collective(rank, OpKind::kBarrier, 0);  // after it all ranks know who reads whom
    });
  }
  ~Ranks() {
    for (auto& group : groups_) group->close();
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  bool can_read() { return groups_[0]->single_copy().rfind("possible", 0) == 0; }

  /// The median seconds of some calls of an operation, on the slower rank.
  Turn measure(Work work, size_t bytes, const Tunables& tunables) {
    const size_t calls = std::max<size_t>(1, std::min<size_t>(8, 4 * kMiB / bytes));
    Turn turns[kRanks];
    for (auto& group : groups_) group->set_tunables(tunables);
    on_both([&](int rank) {
      touch(rank, bytes);
      // The previous way has left cache lines of both outboxes in its own state; the outboxes hold a MiB.
      for (size_t done = 0; bytes <= kLong && done < kMiB; done += bytes) run(rank, work, bytes);
      std::vector<double> taken;
      const int64_t switches = context_switches(), cpu = thread_cpu_ns(), start = now_ns();
      for (size_t call = 0; call < calls; ++call) {
        const int64_t begun = now_ns();
        run(rank, work, bytes);
        taken.push_back(static_cast<double>(now_ns() - begun) * 1e-9);
      }
      std::nth_element(taken.begin(), taken.begin() + calls / 2, taken.end());
      const double wall = static_cast<double>(now_ns() - start);
      const double lost = wall - static_cast<double>(thread_cpu_ns() - cpu);
      turns[rank] = {taken[calls / 2], context_switches() != switches && lost > kLost * wall};
    });
    return {std::max(turns[0].seconds, turns[1].seconds), turns[0].disturbed || turns[1].disturbed};
  }

 private:
  /// Write to the first bytes of each buffer, because untouched memory is one shared page of zeros.
  void touch(int rank, size_t bytes) {
    size_t& touched = touched_[rank];
    if (bytes <= touched) return;
    char* const memory = buffers_[rank].get();
    for (size_t part = 0; part <= kRanks; ++part)
      memset(memory + part * kLongest + touched, 1, bytes - touched);
    touched = bytes;
  }

  void run(int rank, Work work, size_t bytes) {
    switch (work) {
      case Work::kAllGather: return collective(rank, OpKind::kAllGather, bytes);
      case Work::kBroadcast: return collective(rank, OpKind::kBroadcast, bytes);
      case Work::kAllReduce: return collective(rank, OpKind::kAllReduce, bytes);
      case Work::kMessages:
        for (int source = 0; source < kRanks; ++source) message(rank, source, bytes);
    }
  }

  /// From one rank to the other.
  void message(int rank, int source, size_t bytes) {
    const bool sends = rank == source;
    auto request = std::make_shared<Request>();
    request->is_send = sends;
    request->peer = 1 - rank;
    request->buffer = {buffers_[rank].get() + (sends ? 0 : kLongest), bytes};
    request->dtype = DType::kFloat32;
    request->seconds = kTimeout;
    request->deadline = now_ns() + static_cast<int64_t>(kTimeout * 1e9);
    groups_[rank]->post(request, true);
    groups_[rank]->wait(*request->completion, true, -1, nullptr);
    if (auto fault = request->completion->fault()) throw *fault;
  }

  void collective(int rank, OpKind kind, size_t bytes) {
    char* const memory = buffers_[rank].get();
    const Buffer input = {memory, bytes};
    std::vector<Buffer> outputs;
    for (int part = 1; part <= kRanks; ++part) outputs.push_back({memory + part * kLongest, bytes});
    Operation operation{};
    operation.kind = kind;
    operation.dtype = DType::kFloat32;
    operation.factor = 1;
    if (kind == OpKind::kAllGather) {
      operation.inputs = {&input, 1};
      operation.outputs = {outputs.data(), kRanks};
    } else if (kind == OpKind::kAllReduce) {
      operation.reduce_op = ReduceOp::kMax;  // a maximum leaves equal values unchanged
      operation.inputs = operation.outputs = {&input, 1};
    } else if (kind == OpKind::kBroadcast) {
      operation.outputs = {&input, 1};
    }
    groups_[rank]->run(operation, kTimeout, nullptr);
  }

  template <class Act>
  void on_both(Act&& act) {
    std::exception_ptr failures[kRanks];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank)
      threads.emplace_back([&, rank] {
        const Pinned pinned(cpus_[rank]);
        try {
          act(rank);
        } catch (...) {
          failures[rank] = std::current_exception();
          groups_[rank]->close();  // so that the other rank does not wait
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures)
      if (failure) std::rethrow_exception(failure);
  }

  int cpus_[kRanks];
  std::shared_ptr<Group> groups_[kRanks];
  std::unique_ptr<char[]> buffers_[kRanks];
  size_t touched_[kRanks] = {};
};

/// A way to do an operation.
struct Way {
  const char* name;
  std::function<void(Tunables&)> choose;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

class Calibrator {
 public:
  Calibrator(const std::vector<int>& cpus, std::vector<Measurement>& measurements, bool insists)
      : ranks_(cpus), measurements_(measurements), insists_(insists) {}

  bool can_read() { return ranks_.can_read(); }

  /// Seconds of each way in each turn.
  std::vector<std::vector<double>> compare(Work work, size_t bytes, const Tunables& base,
                                           const std::vector<Way>& ways) {
    std::vector<std::vector<double>> seconds(ways.size());
    for (int turn = 0; turn < turns_of(bytes); ++turn) {
      for (size_t i = 0; i < ways.size(); ++i) {
        const size_t way = turn % 2 ? ways.size() - 1 - i : i;  // no way always comes first
        Tunables tunables = base;
        ways[way].choose(tunables);
        seconds[way].push_back(undisturbed(work, bytes, tunables));
      }
      if (turn + 1 == kFewTurns && hopeless(seconds)) break;
    }
    for (size_t i = 0; i < ways.size(); ++i)
      measurements_.push_back(
          {kWorkNames[static_cast<size_t>(work)], ways[i].name, bytes, median(seconds[i])});
    return seconds;
  }

  /// The least size from which on `second` is clearly faster than `first`; `sizes` shrink.
  uint64_t size_from(Work work, const std::vector<size_t>& sizes, const Tunables& base,
                     const Way& first, const Way& second) {
    uint64_t from = kNeverBytes;
    for (const size_t bytes : sizes) {
      const auto seconds = compare(work, bytes, base, {first, second});
      if (!clearly_faster(bytes, seconds[1], seconds[0])) break;
      from = bytes;
    }
    return from;
  }

  /// The range of sizes in which the last way gains most over the best other way in each turn. The last way
  /// is clearly faster at both ends of the range. `sizes` grow; each stands for sizes up to halfway to the
  /// next.
  SizeRange sizes_within(Work work, const std::vector<size_t>& sizes, const Tunables& base,
                         const std::vector<Way>& ways) {
    std::vector<double> gains;
    for (const size_t bytes : sizes) {
      const auto seconds = compare(work, bytes, base, ways);
      const std::vector<double>&last = seconds.back(), others = least(seconds);
      const double gain = std::log(median(others) / median(last));
      gains.push_back(clearly_faster(bytes, last, others) ? gain : std::min(gain, 0.0));
    }
    double most = 0;
    SizeRange best;
    for (size_t from = 0; from < sizes.size(); ++from) {
      double gain = 0;
      for (size_t last = from; last < sizes.size(); ++last) {
        gain += gains[last];
        if (gain <= most) continue;
        most = gain;
        const bool longest = last + 1 == sizes.size();
        best = {sizes[from], longest ? kNeverBytes : halfway(sizes[last], sizes[last + 1])};
      }
    }
    return best;
  }

  /// The best way: the first, unless another is clearly faster overall and slower at no size.
  size_t best_of(Work work, const std::vector<size_t>& sizes, const Tunables& base,
                 const std::vector<Way>& ways) {
    std::vector<double> shares(ways.size(), 0);  // of the first way's time, over all sizes
    for (const size_t bytes : sizes) {
      const auto seconds = compare(work, bytes, base, ways);
      for (size_t i = 0; i < ways.size(); ++i) {
        const double share = median(seconds[i]) / median(seconds[0]);
        shares[i] += share > 1 ? kSlower : share;
      }
    }
    const auto best = std::min_element(shares.begin(), shares.end());
    return *best < kClearly * shares[0] ? static_cast<size_t>(best - shares.begin()) : 0;
  }

 private:
  static int turns_of(size_t bytes) { return bytes < kLong ? kTurns : kTurnsOfLong; }

  /// The geometric mean of two sizes.
  static uint64_t halfway(size_t one, size_t other) {
    return static_cast<uint64_t>(std::sqrt(static_cast<double>(one) * static_cast<double>(other)));
  }

  /// The least seconds of all ways but the last, for each turn.
  static std::vector<double> least(const std::vector<std::vector<double>>& seconds) {
    std::vector<double> result = seconds[0];
    for (size_t way = 1; way + 1 < seconds.size(); ++way)
      for (size_t turn = 0; turn < result.size(); ++turn)
        result[turn] = std::min(result[turn], seconds[way][turn]);
    return result;
  }

  /// True if faster not only by the median, but in all turns (in all but one of five).
  static bool clearly_faster(size_t bytes, const std::vector<double>& one,
                             const std::vector<double>& other) {
    const int turns = turns_of(bytes);
    if (one.size() < static_cast<size_t>(turns)) return false;
    int slower = 0;
    for (size_t turn = 0; turn < one.size(); ++turn) slower += one[turn] >= kClearly * other[turn];
    return slower <= turns / kTurns && median(one) < kClearly * median(other);
  }

  /// True if no way was faster than the first in any turn yet, so that none will be chosen.
  static bool hopeless(const std::vector<std::vector<double>>& seconds) {
    for (const auto& way : seconds)
      for (size_t turn = 0; turn < way.size(); ++turn)
        if (way[turn] < seconds[0][turn]) return false;
    return true;
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
  std::vector<Measurement>& measurements_;
  const bool insists_;
  int64_t lost_ns_ = 0;
  int disturbed_ = 0;
};

void calibrate_chunks(Calibrator& calibrator, Tunables& tunables) {
  struct Chunk {
    Work work;
    uint64_t Tunables::* value;
  };
  const size_t sizes[] = {512 * kKiB, 256 * kKiB, 128 * kKiB};  // the first is the default
  for (const Chunk& chunk : {Chunk{Work::kAllGather, &Tunables::chunk_bytes},
                             Chunk{Work::kAllReduce, &Tunables::reduce_chunk_bytes}}) {
    const auto use = [&](size_t bytes) {
      return [bytes, &chunk](Tunables& t) { t.*(chunk.value) = bytes; };
    };
    const size_t best = calibrator.best_of(chunk.work, {4 * kMiB, kMiB}, tunables,
                                           {{"chunks of 512 KiB", use(sizes[0])},
                                            {"chunks of 256 KiB", use(sizes[1])},
                                            {"chunks of 128 KiB", use(sizes[2])}});
    tunables.*(chunk.value) = sizes[best];
  }
}

/// The longest all_reduce in one round: the largest size up to which one round is faster.
void calibrate_one_shot(Calibrator& calibrator, Tunables& tunables) {
  const uint64_t chunks_from =
      calibrator.size_from(Work::kAllReduce, {256 * kKiB, 128 * kKiB, 64 * kKiB, 32 * kKiB},
                           tunables, {"one round", [](Tunables& t) { t.one_shot_bytes = kMiB; }},
                           {"chunks", [](Tunables& t) { t.one_shot_bytes = 0; }});
  tunables.one_shot_bytes = chunks_from == kNeverBytes ? 512 * kKiB : chunks_from / 2;
}

void calibrate_streaming(Calibrator& calibrator, Tunables& tunables) {
  const uint64_t from =
      calibrator.size_from(Work::kAllGather, {4 * kMiB, 2 * kMiB, kMiB}, tunables,
                           {"cached stores", [](Tunables& t) { t.streamed_bytes = kNeverBytes; }},
                           {"streaming stores", [](Tunables& t) { t.streamed_bytes = 0; }});
  tunables.streamed_bytes = from == kNeverBytes ? from : from * kRanks;  // of all outputs
}

/// Stores into outboxes. The faster kind may change within seconds, so programs measure it while they run
/// (outbox_stores.h).
const Way kOrdinaryStores = {"outboxes", [](Tunables& t) { t.slow_outbox_ns = kNeverBytes; }};
const Way kStreamingStores = {"streaming into outboxes",
                              [](Tunables& t) { t.slow_outbox_ns = OutboxStores::kAlways; }};

/// Ordinary stores into an outbox are slow if they alone take longer than both ends of a move by stores
/// past the caches. Returns that limit, but no less than the default: in a long reduction ordinary stores
/// also wait for a source in memory, and are faster nevertheless. Later measurements use the kind that is
/// faster now, so that no choice depends on stores that programs would not use.
uint64_t calibrate_stores(Calibrator& calibrator, Tunables& tunables) {
  constexpr size_t kBytes = 128 * kKiB;
  const auto seconds =
      calibrator.compare(Work::kBroadcast, kBytes, tunables, {kOrdinaryStores, kStreamingStores});
  const double past_caches = median(seconds[1]);
  (past_caches < median(seconds[0]) ? kStreamingStores : kOrdinaryStores).choose(tunables);
  return std::max(Tunables().slow_outbox_ns,
                  static_cast<uint64_t>(past_caches * 1e9 * kMiB / kBytes));
}

void calibrate_reading(Calibrator& calibrator, Tunables& tunables) {
  struct Reading {
    Work work;
    SizeRange Tunables::* lengths;
    std::vector<size_t> sizes;
  };
  if (!calibrator.can_read()) return;
  const std::vector<size_t> all = {16 * kKiB, 32 * kKiB, 64 * kKiB, 256 * kKiB, kMiB, kLongest};
  // If the receiver reads a message directly, the sender waits for the answer, perhaps asleep. Only a long
  // message is worth that.
  const std::vector<size_t> long_ones = {kMiB, kLongest};
  for (const Reading& reading : {Reading{Work::kAllGather, &Tunables::read_moves, all},
                                 Reading{Work::kBroadcast, &Tunables::read_rooted_moves, all},
                                 Reading{Work::kAllReduce, &Tunables::read_reductions, all},
                                 Reading{Work::kMessages, &Tunables::read_messages, long_ones}}) {
    const Way single = {"single copy",
                        [&](Tunables& t) { t.*(reading.lengths) = {0, kNeverBytes}; }};
    tunables.*(reading.lengths) = calibrator.sizes_within(
        reading.work, reading.sizes, tunables, {kOrdinaryStores, kStreamingStores, single});
  }
}

}  // namespace

Calibration calibrate(const std::vector<int>& cpus, bool insists) {
  Calibration result;
  Calibrator calibrator(cpus, result.measurements, insists);
  Tunables& tunables = result.tunables;
  const uint64_t slow_outbox_ns = calibrate_stores(calibrator, tunables);
  calibrate_streaming(calibrator, tunables);
  calibrate_chunks(calibrator, tunables);
  calibrate_one_shot(calibrator, tunables);
  calibrate_reading(calibrator, tunables);
  tunables.slow_outbox_ns = slow_outbox_ns;
  return result;
}

}  // namespace tilework
