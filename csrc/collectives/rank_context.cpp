#include "collectives/rank_context.h"

#include <string.h>

#include <algorithm>
#include <climits>
#include <map>

namespace tilework {

namespace {

/// What the limits of all ranks that have joined come to.
int granted_cores(const Segment& segment) {
  std::map<uint64_t, uint32_t> limits;  // by pid namespace
  for (int peer = 0; peer < segment.size(); ++peer) {
    const RankControl& control = segment.control(peer);
    if (control.pid.load() == 0) continue;
    const uint32_t limit = control.core_limit.load();
    if (limit == 0) return INT_MAX;
    uint32_t& most = limits[control.pid_namespace.load()];
    most = std::max(most, std::min<uint32_t>(limit, kCoreWords * 64));
  }
  uint32_t total = 0;
  for (const auto& [space, limit] : limits) total += limit;
  return limits.empty() ? INT_MAX : static_cast<int>(total);
}

}  // namespace

int RankContext::cores() {
  if (const int known = known_cores.load(std::memory_order_relaxed)) return known;
  bool all_here = true;
  uint64_t together[kCoreWords] = {};
  for (int peer = 0; peer < size; ++peer) {
    const RankControl& control = segment.control(peer);
    all_here &= control.pid.load() != 0;  // published after the cores
    for (int i = 0; i < kCoreWords; ++i) together[i] |= control.cores[i].load();
  }
  int count = 0;
  for (const uint64_t word : together) count += __builtin_popcountll(word);
  count = std::min(count, granted_cores(segment));
  if (all_here) known_cores = count;
  return count;
}

int64_t RankContext::worked_ns(int64_t from, int64_t to) const {
  const uint32_t here = segment.control(rank).core.load(std::memory_order_relaxed);
  int64_t total = 0;
  for (int peer = 0; peer < size; ++peer) {
    const RankControl& control = segment.control(peer);
    if (peer == rank || control.core.load(std::memory_order_relaxed) != here) continue;
    total += worked_within(from, to, control.works_since.load(std::memory_order_relaxed),
                           control.waits_since.load(std::memory_order_relaxed));
  }
  return total;
}

/// Move this thread to a core with at least two ranks fewer, if it is time to; true if it moved. Of the
/// ranks on a core the last one leaves it. The thread may run wherever it might before: only the
/// kernel's choice is made anew. The kernel itself is slow to part three ranks on one core from one on
/// another, as all of them are always runnable and yield all the time.
bool RankContext::leave_core(uint32_t here) {
  constexpr uint32_t kCores = kCoreWords * 64;
  const int known = known_cores.load(std::memory_order_relaxed);
  if (known == 0 || here > kCores) return false;
  const RankControl& own = segment.control(rank);
  uint64_t usable[kCoreWords];
  int count = 0;
  if (size > known && !history.should_look()) return false;
  for (int i = 0; i < kCoreWords; ++i)
    count += __builtin_popcountll(usable[i] = own.cores[i].load(std::memory_order_relaxed));
  if (size > known && known < count) return false;  // it is time that they lack, not cores
  uint16_t ranks[kCores] = {};
  for (int peer = 0; peer < size; ++peer) {
    const uint32_t core = segment.control(peer).core.load(std::memory_order_relaxed);
    if (core == here && peer > rank) return false;
    if (core != 0 && core <= kCores) ++ranks[core - 1];
  }
  int fewest = ranks[here - 1];
  for (int i = 0; i < kCoreWords; ++i)
    for (uint64_t bits = usable[i]; bits != 0; bits &= bits - 1)
      fewest = std::min<int>(fewest, ranks[64 * i + __builtin_ctzll(bits)]);
  if (fewest + 2 > ranks[here - 1] || !history.should_move(now_ns())) return false;
  uint64_t fuller[kCoreWords] = {};
  for (uint32_t core = 0; core < kCores; ++core)
    if (ranks[core] > fewest) fuller[core / 64] |= uint64_t{1} << core % 64;
  return leave_cores(fuller);
}

std::optional<Abort> RankContext::aborted() const {
  const AbortRecord& record = segment.header().abort;
  if (record.state.load() != 2) return std::nullopt;
  const size_t kind_bytes = strnlen(record.kind, sizeof record.kind);
  const size_t text_bytes = std::min<size_t>(record.bytes, kMaxReportBytes);
  return Abort{record.rank, std::string(record.kind, kind_bytes),
               std::string(record.text, text_bytes)};
}

void RankContext::abort(const std::string& kind, const std::string& text) {
  AbortRecord& record = segment.header().abort;
  uint32_t none = 0;
  if (!record.state.compare_exchange_strong(none, 1)) return;
  record.rank = rank;
  memcpy(record.kind, kind.data(), std::min(kind.size(), sizeof record.kind));
  record.bytes = static_cast<uint32_t>(std::min(text.size(), kMaxReportBytes));
  memcpy(record.text, text.data(), record.bytes);
  record.state.store(2);
  segment.notify_all_ranks();
}

std::optional<Fault> RankContext::stop_fault() const {
  if (closing.load()) return Fault("closed", {rank}, "the group was closed on this rank");
  if (segment.header().abort.state.load() != 2) return std::nullopt;
  Abort abort = *aborted();
  return Fault("aborted", {abort.rank}, abort.text);
}

std::optional<Fault> RankContext::lost_peers_fault(const std::vector<int>& peers,
                                                   bool check_processes) {
  std::vector<int> died, gone;
  for (int peer : peers) {
    const bool dead = check_processes && liveness.dead(peer);
    if (dead) died.push_back(peer);
    if (dead || liveness.departed(peer)) gone.push_back(peer);
  }
  if (gone.empty()) return std::nullopt;
  if (auto fault = stop_fault()) return fault;  // why they left, if the group was aborted since
  return peer_lost_fault(died, gone);
}

Fault peer_lost_fault(const std::vector<int>& died, const std::vector<int>& gone) {
  std::vector<int> dead, left;
  for (int rank : gone) (std::count(died.begin(), died.end(), rank) ? dead : left).push_back(rank);
  std::string text;
  if (!dead.empty()) text = format_ranks(dead) + " died";
  if (!left.empty()) text += (text.empty() ? "" : "; ") + format_ranks(left) + " left the group";
  return Fault("peer_lost", gone, text);
}

}  // namespace tilework
