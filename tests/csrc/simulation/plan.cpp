#include "plan.h"

#include <algorithm>

namespace tilework::simulation {
namespace {

/// Elements of four bytes. A slot has 4096 bytes, which ranks divide among each other.
const std::vector<size_t> kCounts = {0, 1, 2, 7, 16, 100, 300, 700, 1024, 1500, 2500, 4000};
/// A channel holds 128 KiB.
const std::vector<size_t> kMessageCounts = {0, 1, 100, 4000, 9000, 20'000, 45'000};
const std::vector<ReduceOp> kReduceOpsDrawn = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                                               ReduceOp::kProduct, ReduceOp::kBxor};

void draw_groups(Plan& plan, Random& random) {
  const uint64_t count = 1 + random.below(3);
  for (uint64_t i = 0; i < count; ++i) {
    std::vector<int> members;
    for (int rank = 0; rank < plan.ranks; ++rank)
      if (i == 0 || !random.once_in(3)) members.push_back(rank);
    if (members.size() > 1) plan.groups.push_back(members);
  }
}

void draw_counts(Step& step, int size, Random& random) {
  const size_t common = random.among(kCounts);
  const bool uneven = ragged(step.kind) && random.once_in(3);
  for (int i = 0; i < size; ++i)
    for (int j = 0; j < size; ++j) {
      const bool by_destination =
          step.kind == OpKind::kScatter || step.kind == OpKind::kReduceScatter;
      const bool drawn = step.kind == OpKind::kAllToAll || (by_destination ? i == 0 : j == 0);
      if (!uneven)
        step.counts.push_back(common);
      else if (drawn)
        step.counts.push_back(random.among(kCounts));
      else
        step.counts.push_back(by_destination ? step.counts[j] : step.counts[i * size]);
    }
}

void draw_collective(Step& step, int size, Random& random) {
  step.kind = static_cast<OpKind>(random.below(kKinds));
  step.reduce_op = reduces(step.kind) ? random.among(kReduceOpsDrawn) : ReduceOp::kNone;
  step.root = static_cast<int>(random.below(size));
  if (scans(step.kind)) step.root = step.root == 0 ? 0 : size - 1;
  step.in_place = random.once_in(3);
  const uint64_t arenas = random.below(3);  // nobody's, everybody's, some
  for (int rank = 0; rank < size; ++rank) {
    step.inputs_in_arena.push_back(arenas == 1 || (arenas == 2 && random.once_in(2)));
    step.outputs_in_arena.push_back(arenas == 1 || (arenas == 2 && random.once_in(2)));
  }
  draw_counts(step, size, random);
}

void draw_message(Step& step, int size, Random& random) {
  step.from = static_cast<int>(random.below(size));
  step.to = static_cast<int>((step.from + 1 + random.below(size - 1)) % size);
  step.counts.push_back(random.among(kMessageCounts));
  const bool own_tag = random.once_in(2);
  step.tag = own_tag ? 100 + step.number : step.lane;
  step.from_any = own_tag && random.once_in(2);
}

void draw_mishap(Plan& plan, Random& random) {
  if (random.once_in(2)) return;
  plan.mishap = random.among<Mishap>({Mishap::kAbort, Mishap::kLeave, Mishap::kDeath, Mishap::kExec,
                                      Mishap::kReused, Mishap::kStop});
  // From any rank: others that are still there could send, so its leaving is no fault.
  for (Step& step : plan.steps) step.from_any &= plan.mishap != Mishap::kLeave;
  plan.victim = static_cast<int>(random.below(plan.ranks));
  plan.mishap_step = random.below(plan.steps.size());
  plan.point = random.below(uint64_t{1} << (8 + random.below(9)));
  for (size_t group = 0; group < plan.groups.size(); ++group)
    if (std::count(plan.groups[group].begin(), plan.groups[group].end(), plan.victim))
      plan.mishap_group = static_cast<int>(group);
}

std::string list(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : " ") + std::to_string(number);
  return text;
}

std::string step_text(const Step& step) {
  std::string text = std::to_string(step.number) + ". group " + std::to_string(step.group) +
                     ", thread " + std::to_string(step.lane) + ": ";
  if (step.is_message) {
    text += "message " + std::to_string(step.from) + " to " + std::to_string(step.to) + ", tag " +
            std::to_string(step.tag) + ", " + std::to_string(step.counts[0]) + " elements";
  } else {
    text += kind_name(static_cast<unsigned>(step.kind)) + std::string(" root ") +
            std::to_string(step.root) + " of";
    for (const size_t count : step.counts) text += " " + std::to_string(count);
    text += step.in_place ? ", in place" : "";
    text += "; inputs in arenas: ";
    for (const bool in : step.inputs_in_arena) text += in ? "y" : "n";
    text += ", outputs: ";
    for (const bool in : step.outputs_in_arena) text += in ? "y" : "n";
  }
  return text + (step.asynchronous ? ", asynchronous" : "");
}

}  // namespace

bool Plan::troubled(int group) const {
  if (mishap == Mishap::kNone) return false;
  if (mishap == Mishap::kStop) return true;  // who waits for it makes others wait
  if (!strikes()) return group == mishap_group;
  return std::count(groups[group].begin(), groups[group].end(), victim) > 0;
}

std::string Plan::text() const {
  std::string text = std::to_string(ranks) + " ranks of " + std::to_string(lanes) + " threads on " +
                     std::to_string(cores) + " cores\n";
  for (size_t i = 0; i < groups.size(); ++i)
    text += "group " + std::to_string(i) + ": ranks " + list(groups[i]) + "\n";
  for (const Step& step : steps) text += step_text(step) + "\n";
  const std::string rank = "rank " + std::to_string(victim);
  const std::string place = " group " + std::to_string(mishap_group) + " before operation " +
                            std::to_string(mishap_step) + "\n";
  const std::string moment =
      " at scheduling point " + std::to_string(point) + ", counted from when all are there\n";
  switch (mishap) {
    case Mishap::kNone: return text;
    case Mishap::kAbort: return text + rank + " aborts" + place;
    case Mishap::kLeave: return text + rank + " leaves" + place;
    case Mishap::kDeath: return text + rank + " dies" + moment;
    case Mishap::kExec: return text + rank + " becomes another program" + moment;
    case Mishap::kReused:
      return text + rank + " dies, and another process gets its number" + moment;
    case Mishap::kStop: return text + rank + " is stopped for longer than the others wait" + moment;
  }
  return text;
}

Plan draw_plan(uint64_t seed) {
  Random random(seed);
  Plan plan;
  plan.seed = seed;
  plan.ranks = 2 + static_cast<int>(random.below(3));
  plan.lanes = 1 + random.once_in(3);
  plan.cores = 1 + static_cast<int>(random.below(2 * plan.ranks));
  plan.policy.priorities = random.once_in(2);
  plan.policy.one_in = random.among<uint64_t>({2, 5, 20, 100, 1000});
  plan.policy.tick_ns = random.among<int64_t>({100, 1'000, 10'000});
  plan.policy.stale_one_in = random.among<uint64_t>({2, 4, uint64_t{1} << 40});
  plan.tunables.chunk_bytes = random.among<uint64_t>({1024, 4096});
  plan.tunables.reduce_chunk_bytes = random.among<uint64_t>({1024, 4096});
  plan.tunables.one_shot_bytes = random.among<uint64_t>({256, 4096});
  Tunables& tunables = plan.tunables;
  for (SizeRange* read :
       {&tunables.read_all_gather, &tunables.read_all_to_all, &tunables.read_rooted,
        &tunables.read_all_reduce, &tunables.read_reduce_scatter, &tunables.read_messages})
    *read = {random.among<uint64_t>({kNeverBytes, 1000, 4096}),
             random.among<uint64_t>({kNeverBytes, 3000})};
  draw_groups(plan, random);
  const uint64_t steps = 3 + random.below(8);
  for (uint64_t number = 0; number < steps; ++number) {
    Step step{};
    step.number = static_cast<int>(number);
    step.group = static_cast<int>(random.below(plan.groups.size()));
    step.is_message = random.once_in(4);
    step.asynchronous = random.once_in(4);
    // Collectives of one group have one order, so one thread of each rank calls them.
    step.lane = static_cast<int>((step.is_message ? random.below(8) : step.group) % plan.lanes);
    const int size = static_cast<int>(plan.groups[step.group].size());
    if (step.is_message)
      draw_message(step, size, random);
    else
      draw_collective(step, size, random);
    plan.steps.push_back(step);
  }
  draw_mishap(plan, random);
  return plan;
}

int32_t element(const Step& step, int from, int to, size_t index) {
  uint64_t mixed = (static_cast<uint64_t>(step.number) << 48) ^
                   (static_cast<uint64_t>(from) << 40) ^ (static_cast<uint64_t>(to) << 32) ^ index;
  mixed *= 0x9e3779b97f4a7c15;
  return static_cast<int32_t>(mixed >> 40);
}

}  // namespace tilework::simulation
