#include "calibration.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <thread>

#include "group.h"

namespace tilework {
namespace {

constexpr int kRanks = 2;
constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr size_t kLongest = 8 * kMiB;
constexpr double kTimeout = 5;  // seconds; a group whose rank lacks a core is slow, not stuck
/// Another way than the default must take at most this share of its time.
constexpr double kClearly = 0.92;
constexpr double kSlower = 1e9;
constexpr int kTurns = 3;

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
      buffers_[rank].reset(new char[(kRanks + 1) * kLongest]);
      memset(buffers_[rank].get(), 1, (kRanks + 1) * kLongest);
      for (int i = 0; i < 3; ++i) run(rank, OpKind::kBarrier, 0);  // then all know who reads whom
    });
  }
  ~Ranks() {
    for (auto& group : groups_) group->close();
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  bool can_read() { return groups_[0]->single_copy().rfind("possible", 0) == 0; }

  /// The least seconds of an operation.
  double seconds(OpKind kind, size_t bytes, const Tunables& tunables) {
    const int calls = std::max<int>(1, std::min<size_t>(8, kMiB / bytes));
    double least = std::numeric_limits<double>::infinity();
    for (auto& group : groups_) group->set_tunables(tunables);
    on_both([&](int rank) {
      const int warm_up = bytes < 4 * kMiB ? 1 : 0;  // long ones take it as part of the first turn
      for (int call = 0; call < calls + warm_up; ++call) {
        const int64_t begun = now_ns();
        run(rank, kind, bytes);
        const double taken = static_cast<double>(now_ns() - begun) * 1e-9;
        if (rank == 0 && call >= warm_up) least = std::min(least, taken);
      }
    });
    return least;
  }

 private:
  void run(int rank, OpKind kind, size_t bytes) {
    char* const memory = buffers_[rank].get();
    const Buffer input = {memory, bytes};
    std::vector<Buffer> outputs;
    for (int part = 0; part < kRanks; ++part)
      outputs.push_back({memory + kLongest + part * bytes, bytes});
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
};

/// A way to do an operation.
struct Way {
  const char* name;
  std::function<void(Tunables&)> choose;
};

class Calibrator {
 public:
  explicit Calibrator(std::vector<Measurement>& measurements) : measurements_(measurements) {}

  bool can_read() { return ranks_.can_read(); }

  /// Least seconds of each way, measured by turns.
  std::vector<double> compare(OpKind kind, size_t bytes, const Tunables& base,
                              const std::vector<Way>& ways) {
    std::vector<double> least(ways.size(), std::numeric_limits<double>::infinity());
    const int turns = bytes >= 4 * kMiB ? kTurns - 1 : kTurns;
    for (int turn = 0; turn < turns; ++turn)
      for (size_t i = 0; i < ways.size(); ++i) {
        Tunables tunables = base;
        ways[i].choose(tunables);
        least[i] = std::min(least[i], ranks_.seconds(kind, bytes, tunables));
      }
    for (size_t i = 0; i < ways.size(); ++i)
      measurements_.push_back(
          {kKindNames[static_cast<size_t>(kind)], ways[i].name, bytes, least[i]});
    return least;
  }

  /// The size from which on `second` is clearly faster than `first`, at each of `sizes`, which grow.
  uint64_t size_from(OpKind kind, const std::vector<size_t>& sizes, const Tunables& base,
                     const Way& first, const Way& second) {
    uint64_t from = kNeverBytes;
    for (const size_t bytes : sizes) {
      const auto seconds = compare(kind, bytes, base, {first, second});
      if (seconds[1] >= kClearly * seconds[0])
        from = kNeverBytes;
      else if (from == kNeverBytes)
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
      for (size_t i = 0; i < ways.size(); ++i)
        shares[i] += seconds[i] > seconds[0] ? kSlower : seconds[i] / seconds[0];
    }
    const auto best = std::min_element(shares.begin(), shares.end());
    return *best < kClearly * shares[0] ? static_cast<size_t>(best - shares.begin()) : 0;
  }

 private:
  Ranks ranks_;
  std::vector<Measurement>& measurements_;
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
    const size_t best = calibrator.best_of(chunk.kind, {kMiB, kLongest}, tunables,
                                           {{"chunks of 512 KiB", use(sizes[0])},
                                            {"chunks of 256 KiB", use(sizes[1])},
                                            {"chunks of 128 KiB", use(sizes[2])}});
    tunables.*(chunk.value) = sizes[best];
  }
}

/// The longest all_reduce in one round: of those sizes up to which it is faster.
void calibrate_one_shot(Calibrator& calibrator, Tunables& tunables) {
  const uint64_t chunks_from =
      calibrator.size_from(OpKind::kAllReduce, {32 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB},
                           tunables, {"one round", [](Tunables& t) { t.one_shot_bytes = kMiB; }},
                           {"chunks", [](Tunables& t) { t.one_shot_bytes = 0; }});
  tunables.one_shot_bytes = chunks_from == kNeverBytes ? 512 * kKiB : chunks_from / 2;
}

void calibrate_streaming(Calibrator& calibrator, Tunables& tunables) {
  const uint64_t from =
      calibrator.size_from(OpKind::kAllGather, {kMiB, 2 * kMiB, kLongest}, tunables,
                           {"cached stores", [](Tunables& t) { t.streamed_bytes = kNeverBytes; }},
                           {"streaming stores", [](Tunables& t) { t.streamed_bytes = 0; }});
  tunables.streamed_bytes = from == kNeverBytes ? from : from * kRanks;  // of all outputs
}

void calibrate_reading(Calibrator& calibrator, Tunables& tunables) {
  if (!calibrator.can_read()) return;
  const std::vector<size_t> sizes = {32 * kKiB, 128 * kKiB, 512 * kKiB, 2 * kMiB, kLongest};
  tunables.single_copy_bytes =
      calibrator.size_from(OpKind::kAllGather, sizes, tunables, {"outboxes", [](Tunables&) {}},
                           {"single copy", [](Tunables& t) { t.single_copy_bytes = 0; }});
  tunables.single_copy_reduce_bytes =
      calibrator.size_from(OpKind::kAllReduce, sizes, tunables, {"outboxes", [](Tunables&) {}},
                           {"single copy", [](Tunables& t) { t.single_copy_reduce_bytes = 0; }});
}

}  // namespace

Calibration calibrate() {
  Calibration result;
  Calibrator calibrator(result.measurements);
  Tunables& tunables = result.tunables;
  calibrate_streaming(calibrator, tunables);
  calibrate_chunks(calibrator, tunables);
  calibrate_one_shot(calibrator, tunables);
  calibrate_reading(calibrator, tunables);
  return result;
}

}  // namespace tilework
