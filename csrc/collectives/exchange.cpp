#include "collectives/exchange.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <stdexcept>

namespace tilework {
namespace {

constexpr int kLookAhead = 8;  // ranks that a waiting one looks for on its core

}  // namespace

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
      first_step_(state.step + 1),
      read_(lengths_to_read(state.peers.reading)),
      form_(form_of(operation, size, read_)) {}

/// With the first round, so that whoever polls its line meets it once.
void Exchange::publish_header() {
  PeerMemory& memory = context_.memory;
  publish_call(operation, segment_, rank, first_step_, form_,
               {memory.readable(), memory.all_local(), prefers_outboxes()}, state_.short_data);
  segment_.control(rank).entered.store(first_step_, std::memory_order_release);
}

void Exchange::publish() {
  const uint64_t step = ++state_.step;
  context_.tell_core(current_core());
  if (step == first_step_)
    publish_header();
  else
    header(rank, parity(0)).step.store(step, std::memory_order_release);
  if (step == first_step_ && options_.interlude) use_interlude();
  // Only the rank that completes the round needs to wake the others. Between a rank's own step and its
  // look at the others' lies a fence, so the last to publish sees all, and who sleeps. Not a second
  // store: peers have the line by now, and would have to give it back.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < size; ++peer)
    if (!arrived(peer)) return;
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) segment_.control(peer).round_event.notify();
}

/// Do what others need not wait for, while this rank's own cache misses are under way.
void Exchange::use_interlude() {
  for (int peer = 0; peer < std::min(size, kLookAhead); ++peer) {
    if (peer == rank) continue;
    __builtin_prefetch(&header(peer, parity(0)));
    if (!form_.in_header) __builtin_prefetch(segment_.slot(peer, parity(0)));
  }
  options_.interlude->published();
}

void Exchange::await() {
  int next = 0;
  wait_until(
      segment_.control(rank).round_event, context_.sleeps, options_,
      [&] { return all_arrived(next); },
      [&](int core) {
        return context_.shares_core(
            core, next, options_.pace.crowded ? size : std::min(size, next + kLookAhead),
            [&](int peer) { return !arrived(peer); });
      },
      [&](bool check_processes) { return fault_while_waiting(check_processes); });
  own_line_soon(&header(rank, parity(1)));
  if (state_.step == first_step_)
    longest_bytes_ = compare_headers(segment_, rank, parity(0), read_, state_.peers);
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
  if (now_ns() >= options_.deadline()) return timeout_fault(missing);
  return std::nullopt;
}

// ---- reading peers' memory -------------------------------------------------------------------

/// The lengths of messages that are read, by what all ranks said with the operation before.
SizeRange Exchange::lengths_to_read(const ReadingFlags& reading) const {
  if (!reading.reads_peers || size == 1) return {};
  if (reading.shares_process) return {tunables().thread_copy_bytes, kNeverBytes};
  switch (operation.kind) {
    case OpKind::kAllGather: return tunables().read_all_gather;
    case OpKind::kAllToAll: return tunables().read_all_to_all;
    case OpKind::kReduceScatter: return tunables().read_reduce_scatter;
    default: return rooted(operation.kind) ? tunables().read_rooted : tunables().read_all_reduce;
  }
}

/// True if a buffer of this rank's lies in rows too short to be read or written one by one, or is
/// overwritten while others would read it.
bool Exchange::prefers_outboxes() const {
  if (read_.empty()) return false;
  if (overwrites_inputs(operation, rank)) return true;
  for (const Buffers* side : {&operation.inputs, &operation.outputs})
    for (int i = 0; i < side->count; ++i)
      if (!(*side)[i].dense() && (*side)[i].row_bytes < kLeastRowBytes) return true;
  return false;
}

bool Exchange::agreed_to_read() const {
  const ReadingFlags& reading = state_.peers.reading;
  return reading.reads_peers && !reading.prefers_outboxes;
}

void Exchange::show(size_t cell_offset, size_t index, const Buffer& buffer) const {
  const ShownBuffer shown = {reinterpret_cast<uint64_t>(buffer.data), buffer.bytes,
                             buffer.row_bytes, buffer.stride_bytes};
  memcpy(slot() + cell_offset, &shown, sizeof shown);
  context_.memory.show(parity(1), index, buffer);
}

ShownBuffer Exchange::shown(int peer, size_t cell_offset, size_t index) const {
  return context_.memory.shown(peer, parity(0), index, slot_of(peer) + cell_offset);
}

std::vector<uint64_t> Exchange::tell(uint64_t number) {
  memcpy(slot(), &number, sizeof number);
  round();
  std::vector<uint64_t> numbers(size);
  for (int peer = 0; peer < size; ++peer) memcpy(&numbers[peer], slot_of(peer), sizeof(uint64_t));
  return numbers;
}

// ---- arenas ----------------------------------------------------------------------------------

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
