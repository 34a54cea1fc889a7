#include "exchange.h"

#include <stdio.h>

#include <algorithm>
#include <stdexcept>

namespace tilework {

Exchange::Exchange(RankContext& context, RoundState& state, const Operation& operation_,
                   const WaitOptions& options, const std::atomic<bool>& cancelled)
    : operation(operation_),
      rank(context.rank),
      size(context.size),
      slot_bytes(context.segment.slot_bytes()),
      context_(context),
      segment_(context.segment),
      state_(state),
      options_(options),
      cancelled_(cancelled),
      first_step_(state.step + 1) {
  publish_call(operation, segment_, rank, parity(1));
  segment_.control(rank).entered.store(first_step_, std::memory_order_release);
}

void Exchange::publish() {
  const uint64_t step = ++state_.step;
  segment_.control(rank).step.store(step);
  // Only the rank that completes the round needs to wake the others. All stores and loads of
  // steps are sequentially consistent, so the last to store sees all.
  for (int peer = 0; peer < size; ++peer)
    if (!arrived(peer)) return;
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) segment_.control(peer).round_event.notify();
}

void Exchange::await() {
  int next = 0;
  wait_until(
      segment_.control(rank).round_event, context_.sleeps, options_,
      [&] { return all_arrived(next); },
      [&](bool check_processes) { return fault_while_waiting(check_processes); });
  if (state_.step == first_step_) longest_bytes_ = agree(segment_, rank, parity(0), state_.peers);
}

void Exchange::check_stopped() const {
  if (auto fault = context_.stop_fault()) throw *fault;
}

void Exchange::check_deadline() const {
  if (auto fault = fault_while_waiting(false)) throw *fault;
}

bool Exchange::all_arrived(int& next) const {
  while (next < size && arrived(next)) ++next;
  return next == size;
}

std::optional<Fault> Exchange::fault_while_waiting(bool check_processes) const {
  if (cancelled_.load()) return Fault("aborted", {rank}, "the operation was cancelled");
  if (auto fault = context_.stop_fault()) return fault;
  std::vector<int> missing;
  for (int peer = 0; peer < size; ++peer)
    if (!arrived(peer)) missing.push_back(peer);
  context_.note_blocked(operation.sequence);
  if (auto fault = context_.lost_peers_fault(missing, check_processes)) return fault;
  if (now_ns() >= options_.deadline) return timeout_fault(missing);
  return std::nullopt;
}

bool Exchange::readable_in_place() const {
  const PeerBuffers& peers = state_.peers;
  const auto in_arena = [](uint64_t position) { return position != 0; };
  switch (operation.kind) {
    case OpKind::kBroadcast: return in_arena(peers.outputs[operation.root]);
    case OpKind::kScatter: return in_arena(peers.inputs[operation.root]);
    default: return std::all_of(peers.inputs.begin(), peers.inputs.end(), in_arena);
  }
}

bool Exchange::all_in_place() const {
  const auto& outputs = state_.peers.outputs;
  return readable_in_place() && std::count(outputs.begin(), outputs.end(), 0u) == 0;
}

char* Exchange::in_arena(int peer, uint64_t position, size_t offset, size_t bytes) const {
  try {
    if (position == 0 || offset > segment_.arena_bytes()) throw std::out_of_range("no such place");
    return segment_.in_arena(peer, position - 1 + offset, bytes);
  } catch (const std::exception& error) {
    throw Fault("aborted", {peer},
                "rank " + std::to_string(peer) +
                    "'s buffer in the segment cannot be used: " + error.what());
  }
}

Fault Exchange::timeout_fault(const std::vector<int>& missing) const {
  char text[96];
  if (missing.empty()) return Fault("timeout", {}, "others still go on with the operation");
  snprintf(text, sizeof text, " did not %s the operation within %.3g s",
           state_.step == first_step_ ? "enter" : "go on with", options_.seconds);
  return Fault("timeout", missing, format_ranks(missing) + text);
}

}  // namespace tilework
