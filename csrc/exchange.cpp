#include "exchange.h"

#include <stdio.h>

namespace tilework {

Exchange::Exchange(Station& station, RoundState& state, const Operation& operation_,
                   const Patience& patience, const std::atomic<bool>& cancelled)
    : operation(operation_),
      rank(station.rank),
      size(station.size),
      slot_bytes(station.segment.slot_bytes()),
      station_(station),
      segment_(station.segment),
      state_(state),
      patience_(patience),
      cancelled_(cancelled),
      first_step_(state.step + 1) {
  RankControl& mine = segment_.control(rank);
  publish_call(operation, rank, size, mine.headers[parity(1)], segment_.table(rank, parity(1)));
  mine.entered.store(first_step_, std::memory_order_release);
}

void Exchange::publish() {
  const uint64_t step = ++state_.step;
  segment_.control(rank).step.store(step);
  // Only the rank that completes the round needs to wake the others. All stores and loads of
  // steps are sequentially consistent, so the last to store sees all.
  for (int peer = 0; peer < size; ++peer)
    if (!arrived(peer)) return;
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) segment_.control(peer).turn_bell.ring();
}

void Exchange::await() {
  int next = 0;
  wait_until(
      segment_.control(rank).turn_bell, station_.sleeps, patience_, [&] { return all_arrived(next); },
      [&](bool slice_over) { return trouble(slice_over); });
  if (state_.step == first_step_) longest_ = agree(segment_, rank, parity(0), state_.factors);
}

bool Exchange::all_arrived(int& next) const {
  while (next < size && arrived(next)) ++next;
  return next == size;
}

std::optional<Fault> Exchange::trouble(bool slice_over) const {
  if (cancelled_.load()) return Fault("aborted", {rank}, "the operation was cancelled");
  if (auto fault = station_.stopped()) return fault;
  std::vector<int> missing;
  for (int peer = 0; peer < size; ++peer)
    if (!arrived(peer)) missing.push_back(peer);
  if (auto fault = station_.lost(missing, slice_over)) return fault;
  if (now_ns() >= patience_.deadline) return late(missing);
  return std::nullopt;
}

Fault Exchange::late(const std::vector<int>& missing) const {
  char text[96];
  snprintf(text, sizeof text, " did not %s the operation within %.3g s",
           state_.step == first_step_ ? "enter" : "go on with", patience_.seconds);
  return Fault("timeout", missing, name_ranks(missing) + text);
}

}  // namespace tilework
