"""Faults in csrc/."""

from __future__ import annotations

from tests.mutants.mutant import SIMULATION, Mutant

COLLECTIVES = "csrc/collectives/collectives.cpp"
EXCHANGE = "csrc/collectives/exchange.cpp"
POINT_TO_POINT = "csrc/collectives/point_to_point.cpp"

#: Orders, barriers and rings: seen in some interleavings only.
INTERLEAVINGS = [
    Mutant(
        "wake-up: none where nobody looks",
        "csrc/transport/wake_up.h",
        "if (oldest <= urgent_ || !looks_) condition_.notify_one();",
        "if (oldest <= urgent_) condition_.notify_one();",
        SIMULATION,
    ),
    Mutant(
        "wake-up: what a wait leaves is not posted",
        POINT_TO_POINT,
        "      engine.ensure_progress_thread(engine.long_requests_ > 0);\n",
        "",
        SIMULATION,
    ),
    Mutant(
        "moves: no last barrier",
        COLLECTIVES,
        "  x.round();  // peers have now read what this rank may change next\n",
        "",
        SIMULATION,
    ),
    Mutant(
        "round: no ring at its end",
        EXCHANGE,
        "if (peer != rank) segment_.control(peer).round_event.notify();",
        ";",
        SIMULATION,
    ),
    Mutant(
        "step: relaxed",
        EXCHANGE,
        ".step.store(step, std::memory_order_release);",
        ".step.store(step, std::memory_order_relaxed);",
        SIMULATION,
    ),
    Mutant(
        "step: no fence before the look at the others'",
        EXCHANGE,
        "  std::atomic_thread_fence(std::memory_order_seq_cst);\n  for",
        "  for",
        SIMULATION,
    ),
    Mutant(
        "slots: one in place of two",
        "csrc/collectives/exchange.h",
        "    return segment_.slot(rank, parity(1));\n",
        "    return segment_.slot(rank, 0);\n",
        SIMULATION,
    ),
    Mutant(
        "await: a round early",
        "csrc/collectives/exchange.h",
        "header(peer, parity(0)).step.load() >= state_.step;",
        "header(peer, parity(0)).step.load() + 1 >= state_.step;",
        SIMULATION,
    ),
    Mutant(
        "channel: head relaxed",
        POINT_TO_POINT,
        "cursor.head.store(out.head);",
        "cursor.head.store(out.head, std::memory_order_relaxed);",
        SIMULATION,
    ),
    Mutant(
        "channel: the bound of its ring dropped",
        POINT_TO_POINT,
        "    return used <= ring_bytes_ && ring_bytes_ - used >= room;\n",
        "    return used <= 2 * ring_bytes_;\n",
        SIMULATION,
    ),
    Mutant(
        "channel: tail told too early",
        POINT_TO_POINT,
        "  store_fragment(peer, envelope);\n  in.tail += fragment_room(envelope.bytes);\n",
        "  segment_.cursor(peer, rank_).tail.store(in.tail + fragment_room(envelope.bytes));\n"
        "  store_fragment(peer, envelope);\n  in.tail += fragment_room(envelope.bytes);\n",
        SIMULATION,
    ),
    Mutant(
        "eventcount: waiters read relaxed",
        "csrc/transport/segment.h",
        "if (waiters.load() > 0) notify_always();",
        "if (waiters.load(std::memory_order_relaxed) > 0) notify_always();",
        SIMULATION,
    ),
    Mutant(
        "abort: nobody is woken",
        "csrc/collectives/rank_context.cpp",
        "  record.state.store(2);\n  segment.notify_all_ranks();\n",
        "  record.state.store(2);\n",
        SIMULATION,
    ),
    Mutant(
        "close: nobody is woken",
        "csrc/collectives/group.cpp",
        "  control(rank_).departed.store(1);\n  engine_->context.segment.notify_all_ranks();\n",
        "  control(rank_).departed.store(1);\n",
        SIMULATION,
    ),
    Mutant(
        "fence: left out",
        "csrc/transport/segment.cpp",
        "  if (own_arena_position(data, bytes) != 0) own_arena_->detach(data, bytes);\n",
        "  static_cast<void>(own_arena_position(data, bytes));\n",
        SIMULATION,
    ),
    Mutant(
        "liveness: the lock is not looked at",
        "csrc/transport/liveness.cpp",
        "  if (peer.state != State::kDead && released(rank)) peer.state = State::kDead;\n",
        "  static_cast<void>(released(rank));\n",
        SIMULATION,
    ),
]

#: What is computed, compared and refused.
VALUES = [
    Mutant(
        "chunks: one too few",
        COLLECTIVES,
        "chunks = ceil_div(bytes, cell * size);",
        "chunks = std::max<size_t>(1, bytes / (cell * size));",
        "tests/csrc/collectives/test_collectives.py",
    ),
    Mutant(
        "cell: a peer's place a round too early",
        "csrc/collectives/exchange.h",
        "cell.place(state_.step, length)",
        "cell.place(state_.step - 1, length)",
        "tests/csrc/collectives/test_collectives.py",
    ),
    Mutant(
        "cell: one place too many",
        "csrc/collectives/exchange.h",
        "(bytes / distance)",
        "(bytes / distance + 1)",
        "tests/csrc/collectives/test_collectives.py",
    ),
    Mutant(
        "reduction: the order of ranks",
        "csrc/kernels/reduce_kernels.cpp",
        "for (int rank = 2; rank < ranks - 1; ++rank) add(",
        "for (int rank = ranks - 2; rank > 1; --rank) add(",
        "tests/csrc/kernels/test_reduce.py tests/csrc/collectives/test_collectives.py",
    ),
    Mutant(
        "bfloat16: ties are not rounded to even",
        "csrc/kernels/elements.h",
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16;",
        "(bits + 0x8000) >> 16;",
        "tests/csrc/kernels/test_reduce.py",
    ),
    Mutant(
        "header: labels are not compared",
        "csrc/collectives/operation_header.cpp",
        "labels_differ |= ((call.label ^ label) & compared) != 0 && call.label != 0;",
        "labels_differ |= false;",
        "tests/csrc/collectives/test_operation_header.py",
    ),
    Mutant(
        "header: provenance is not compared",
        "csrc/collectives/operation_header.cpp",
        "(header.provenance.load(relaxed) ^ mine.provenance.load(relaxed))",
        "0",
        "tests/csrc/collectives/test_operation_header.py",
    ),
    Mutant(
        "byte counts: what is expected is not compared",
        "csrc/collectives/operation_header.cpp",
        "if (sent != expected || sent < 0",
        "if (sent < 0",
        "tests/csrc/collectives/test_operation_header.py "
        "tests/csrc/collectives/test_collectives.py",
    ),
    Mutant(
        "buffers: an overlap is not refused",
        "csrc/collectives/operation.cpp",
        "if (!overlap(inputs[i], outputs[o])) continue;",
        "continue;",
        "tests/csrc/collectives/test_collectives.py",
    ),
    Mutant(
        "arena: bytes beyond a buffer's end",
        "csrc/transport/segment.cpp",
        "if (offset > layout_.arena_bytes || bytes > layout_.arena_bytes - offset)",
        "if (offset > layout_.arena_bytes)",
        "tests/csrc/transport/test_segment_garbage.py tests/csrc/transport/test_segment.py",
    ),
    Mutant(
        "channel: a fragment longer than its message",
        POINT_TO_POINT,
        "    if (envelope.bytes > in.current.total - in.received) return false;\n",
        "",
        "tests/csrc/transport/test_segment_garbage.py",
    ),
    Mutant(
        "liveness: a reused pid is taken for alive",
        "csrc/transport/liveness.cpp",
        "const bool another = start_time && now.start_time && now.start_time != start_time;",
        "const bool another = start_time && now.start_time && false;",
        SIMULATION,
    ),
    Mutant(
        "random: a part of a group begins at its start",
        "csrc/kernels/random.cpp",
        "std::memcpy(to_, group_ + begin * item_, done * item_);",
        "std::memcpy(to_, group_, done * item_);",
        "tests/dtensor/random/test_philox.py",
    ),
]

CORE = [*INTERLEAVINGS, *VALUES]
