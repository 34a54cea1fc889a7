#include "calibration.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>

#include "group.h"

namespace tilework {
namespace {

constexpr int kRanks = 2;
constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr size_t kLongest = 16 * kMiB;
constexpr double kTimeout = 5;  // seconds; a group whose rank lacks a core is slow, not stuck
/// Another way than the default must take at most this share of its time.
constexpr double kClearly = 0.9;
constexpr double kSlower = 1e9;
constexpr int kTurns = 5, kFewTurns = 2;
/// Turns that other programs disturbed, of all, before they are given up or taken as they are.
constexpr int kDisturbed = 10;

/// Run the calling thread on one of the cores that it may use, until the end.
class Pinned {
 public:
  explicit Pinned(int nth) {
    if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &before_) || nth-- > 0) continue;
      cpu_set_t only;
      CPU_ZERO(&only);
      CPU_SET(core, &only);
      pinned_ = sched_setaffinity(0, sizeof only, &only) == 0;
      return;
    }
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

/// The seconds of a turn, and whether another program took a core meanwhile.
struct Turn {
  double seconds;
  bool disturbed;
};

/// Two ranks, and a buffer of each.
class Ranks {
 public:
  Ranks() {
    Tunables apart;
    apart.threads_apart = 1;
    const File file(create_segment(kRanks, kDefaultSlotBytes, "calibration", apart));
    for (int rank = 0; rank < kRanks; ++rank)
      groups_[rank] = Group::make(file.fd, rank, kRanks, "calibration");
    on_both([&](int rank) {
      buffers_[rank].reset(new char[(kRanks + 1) * kLongest]);  // its pages are taken when touched
      for (int i = 0; i < 3; ++i) run(rank, OpKind::kBarrier, 0);  // then all know who reads whom
    });
  }
  ~Ranks() {
    for (auto& group : groups_) group->close();
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  bool can_read() { return groups_[0]->single_copy().rfind("possible", 0) == 0; }

  /// The median seconds of some calls of an operation, on the slower rank.
  Turn measure(OpKind kind, size_t bytes, const Tunables& tunables) {
    const size_t calls = std::max<size_t>(1, std::min<size_t>(8, kMiB / bytes));
    Turn turns[kRanks];
    for (auto& group : groups_) group->set_tunables(tunables);
    on_both([&](int rank) {
      touch(rank, bytes);
      run(rank, kind, bytes);
      std::vector<double> taken;
      const int64_t switches = context_switches();
      for (size_t call = 0; call < calls; ++call) {
        const int64_t begun = now_ns();
        run(rank, kind, bytes);
        taken.push_back(static_cast<double>(now_ns() - begun) * 1e-9);
      }
      std::nth_element(taken.begin(), taken.begin() + calls / 2, taken.end());
      turns[rank] = {taken[calls / 2], context_switches() != switches};
    });
    return {std::max(turns[0].seconds, turns[1].seconds), turns[0].disturbed || turns[1].disturbed};
  }

 private:
  /// Write to the first bytes of each buffer: memory that nobody wrote is one page of zeros.
  void touch(int rank, size_t bytes) {
    size_t& touched = touched_[rank];
    if (bytes <= touched) return;
    char* const memory = buffers_[rank].get();
    for (size_t part = 0; part <= kRanks; ++part)
      memset(memory + part * kLongest + touched, 1, bytes - touched);
    touched = bytes;
  }

  void run(int rank, OpKind kind, size_t bytes) {
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
      operation.reduce_op = ReduceOp::kMax;  // whose values stay as they are
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
        const Pinned pinned(rank);
        try {
          act(rank);
        } catch (...) {
          failures[rank] = std::current_exception();
          groups_[rank]->close();  // the other does not wait for it
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures)
      if (failure) std::rethrow_exception(failure);
  }

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
  Calibrator(std::vector<Measurement>& measurements, bool insists)
      : measurements_(measurements), insists_(insists) {}

  bool can_read() { return ranks_.can_read(); }

  /// Seconds of each way in each turn.
  std::vector<std::vector<double>> compare(OpKind kind, size_t bytes, const Tunables& base,
                                           const std::vector<Way>& ways) {
    std::vector<std::vector<double>> seconds(ways.size());
    for (int turn = 0; turn < kTurns; ++turn) {
      for (size_t i = 0; i < ways.size(); ++i) {
        const size_t way = turn % 2 ? ways.size() - 1 - i : i;  // nobody always comes first
        Tunables tunables = base;
        ways[way].choose(tunables);
        seconds[way].push_back(undisturbed(kind, bytes, tunables));
      }
      if (turn + 1 == kFewTurns && hopeless(seconds)) break;
    }
    for (size_t i = 0; i < ways.size(); ++i)
      measurements_.push_back(
          {kKindNames[static_cast<size_t>(kind)], ways[i].name, bytes, median(seconds[i])});
    return seconds;
  }

  /// The size from which on `second` is clearly faster than `first`, at each of `sizes`, which shrink.
  uint64_t size_from(OpKind kind, const std::vector<size_t>& sizes, const Tunables& base,
                     const Way& first, const Way& second) {
    uint64_t from = kNeverBytes;
    for (const size_t bytes : sizes) {
      const auto seconds = compare(kind, bytes, base, {first, second});
      if (!clearly_faster(seconds[1], seconds[0])) break;
      from = bytes;
    }
    return from;
  }

  /// The way that is best: the first, unless another is clearly faster in all and slower at no size.
  size_t best_of(OpKind kind, const std::vector<size_t>& sizes, const Tunables& base,
                 const std::vector<Way>& ways) {
    std::vector<double> shares(ways.size(), 0);  // of the first way's time, over all sizes
    for (const size_t bytes : sizes) {
      const auto seconds = compare(kind, bytes, base, ways);
      for (size_t i = 0; i < ways.size(); ++i) {
        const double share = median(seconds[i]) / median(seconds[0]);
        shares[i] += share > 1 ? kSlower : share;
      }
    }
    const auto best = std::min_element(shares.begin(), shares.end());
    return *best < kClearly * shares[0] ? static_cast<size_t>(best - shares.begin()) : 0;
  }

 private:
  /// Not by its median alone, but in all turns except one.
  static bool clearly_faster(const std::vector<double>& one, const std::vector<double>& other) {
    if (one.size() < kTurns) return false;
    int slower = 0;
    for (size_t turn = 0; turn < one.size(); ++turn) slower += one[turn] >= kClearly * other[turn];
    return slower <= 1 && median(one) < kClearly * median(other);
  }

  /// True if no way was faster than the first in any turn yet, so that none will be chosen.
  static bool hopeless(const std::vector<std::vector<double>>& seconds) {
    for (const auto& way : seconds)
      for (size_t turn = 0; turn < way.size(); ++turn)
        if (way[turn] < seconds[0][turn]) return false;
    return true;
  }

  double undisturbed(OpKind kind, size_t bytes, const Tunables& tunables) {
    for (;;) {
      const Turn turn = ranks_.measure(kind, bytes, tunables);
      if (!turn.disturbed || disturbed_ >= kDisturbed) return turn.seconds;
      if (++disturbed_ >= kDisturbed && !insists_)
        throw std::runtime_error("other programs kept taking the cores");
    }
  }

  Ranks ranks_;
  std::vector<Measurement>& measurements_;
  const bool insists_;
  int disturbed_ = 0;
};

void calibrate_chunks(Calibrator& calibrator, Tunables& tunables) {
  struct Chunk {
    OpKind kind;
    uint64_t Tunables::* value;
  };
  const size_t sizes[] = {512 * kKiB, 256 * kKiB, 128 * kKiB};  // the first is the default
  for (const Chunk& chunk : {Chunk{OpKind::kAllGather, &Tunables::chunk_bytes},
                             Chunk{OpKind::kAllReduce, &Tunables::reduce_chunk_bytes}}) {
    const auto use = [&](size_t bytes) {
      return [bytes, &chunk](Tunables& t) { t.*(chunk.value) = bytes; };
    };
    const size_t best = calibrator.best_of(chunk.kind, {4 * kMiB, kMiB}, tunables,
                                           {{"chunks of 512 KiB", use(sizes[0])},
                                            {"chunks of 256 KiB", use(sizes[1])},
                                            {"chunks of 128 KiB", use(sizes[2])}});
    tunables.*(chunk.value) = sizes[best];
  }
}

/// The longest all_reduce in one round: of those sizes up to which it is faster.
void calibrate_one_shot(Calibrator& calibrator, Tunables& tunables) {
  const uint64_t chunks_from =
      calibrator.size_from(OpKind::kAllReduce, {256 * kKiB, 128 * kKiB, 64 * kKiB, 32 * kKiB},
                           tunables, {"one round", [](Tunables& t) { t.one_shot_bytes = kMiB; }},
                           {"chunks", [](Tunables& t) { t.one_shot_bytes = 0; }});
  tunables.one_shot_bytes = chunks_from == kNeverBytes ? 512 * kKiB : chunks_from / 2;
}

void calibrate_streaming(Calibrator& calibrator, Tunables& tunables) {
  const uint64_t from =
      calibrator.size_from(OpKind::kAllGather, {4 * kMiB, 2 * kMiB, kMiB}, tunables,
                           {"cached stores", [](Tunables& t) { t.streamed_bytes = kNeverBytes; }},
                           {"streaming stores", [](Tunables& t) { t.streamed_bytes = 0; }});
  tunables.streamed_bytes = from == kNeverBytes ? from : from * kRanks;  // of all outputs
}

/// Where reading pays at some MiB, it has to once more at a size that no cache holds.
void calibrate_reading(Calibrator& calibrator, Tunables& tunables) {
  struct Reading {
    OpKind kind;
    uint64_t Tunables::* value;
  };
  if (!calibrator.can_read()) return;
  const std::vector<size_t> sizes = {4 * kMiB, kMiB, 256 * kKiB, 64 * kKiB};
  for (const Reading& reading :
       {Reading{OpKind::kAllGather, &Tunables::single_copy_bytes},
        Reading{OpKind::kBroadcast, &Tunables::single_copy_rooted_bytes},
        Reading{OpKind::kAllReduce, &Tunables::single_copy_reduce_bytes}}) {
    const Way outboxes = {"outboxes", [](Tunables&) {}};
    const Way single = {"single copy", [&](Tunables& t) { t.*(reading.value) = 0; }};
    uint64_t from = calibrator.size_from(reading.kind, sizes, tunables, outboxes, single);
    if (from != kNeverBytes &&
        calibrator.size_from(reading.kind, {kLongest}, tunables, outboxes, single) == kNeverBytes)
      from = kNeverBytes;
    tunables.*(reading.value) = from;
  }
}

}  // namespace

Calibration calibrate(bool insists) {
  Calibration result;
  Calibrator calibrator(result.measurements, insists);
  Tunables& tunables = result.tunables;
  calibrate_streaming(calibrator, tunables);
  calibrate_chunks(calibrator, tunables);
  calibrate_one_shot(calibrator, tunables);
  calibrate_reading(calibrator, tunables);
  return result;
}

}  // namespace tilework
