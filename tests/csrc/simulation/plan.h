// What the ranks of a trial do: groups, operations, and what goes wrong. All from a seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "schedule.h"
#include "transport/tunables.h"

namespace tilework::simulation {

/// One operation of a group, or one message.
struct Step {
  int number, group;
  int lane;  // which of a rank's threads takes part
  bool is_message, asynchronous;
  // A collective's. counts[i * size + j] elements go from rank i to rank j; all ranks of the group.
  OpKind kind;
  ReduceOp reduce_op;
  int root;
  bool in_place;
  std::vector<size_t> counts;
  std::vector<bool> inputs_in_arena, outputs_in_arena;  // by rank
  // A message's.
  int from, to;
  int64_t tag;
  bool from_any;

  size_t count(int i, int j) const { return counts[i * inputs_in_arena.size() + j]; }
};

enum class Mishap { kNone, kAbort, kLeave, kDeath, kExec, kReused, kStop };

struct Plan {
  uint64_t seed;
  int ranks, lanes, cores;
  std::vector<std::vector<int>> groups;  // global ranks
  std::vector<Step> steps;
  Policy policy;
  Tunables tunables;
  Mishap mishap = Mishap::kNone;
  int victim = -1;         // the rank that it befalls
  size_t mishap_step = 0;  // before which it aborts or leaves
  int mishap_group = 0;    // which it aborts or leaves
  uint64_t point = 0;      // at which it dies, becomes another program, or is stopped

  /// True if a rank is struck whatever it is doing.
  bool strikes() const { return mishap >= Mishap::kDeath; }
  /// True if operations of this group may fail.
  bool troubled(int group) const;
  std::string text() const;
};

Plan draw_plan(uint64_t seed);

/// An element that rank `from` sends to rank `to`; what all get is what it sends to rank 0.
int32_t element(const Step& step, int from, int to, size_t index);

}  // namespace tilework::simulation
