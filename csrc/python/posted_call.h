// An operation on tensors that the fast path has started and that goes on: its completion, what must live
// until then, and what follows.
#pragma once

#include <memory>
#include <vector>

#include "python/flight_ring.h"
#include "python/memory_hold.h"
#include "python/py_group.h"

namespace tilework {

/// Only touched with the GIL held.
class PostedCall {
 public:
  /// What must live until the operation is done. Each side is a tensor, a tuple of them, or None; both
  /// may be the same.
  struct Kept {
    /// `written`: the outputs' memory, dense and in order; none if they are not written.
    Kept(nb::object inputs, nb::object outputs, const Buffers& written);

    const nb::object inputs, outputs;
    const bool writes;
    MemoryHold hold;
  };

  PostedCall(PyCompletion completion, std::unique_ptr<Kept> kept, nb::object flight, uint64_t slot);
  PostedCall(const PostedCall&) = delete;
  PostedCall& operator=(const PostedCall&) = delete;
  ~PostedCall();

  const PyCompletion& completion() const { return completion_; }
  uint64_t slot() const { return slot_; }
  /// The program's call site: a code object and a line, or None.
  nb::object site() const { return site_of(call_.first); }
  /// See what_of(). Tensors may have got other shapes since.
  nb::object what() const { return what_of(call_.second); }

  /// True if it has ended well; then its outputs look written, the flight record tells of the end, and
  /// all is let go. False where it goes on, which with `blocks` is waited for, or where it failed.
  bool finish(bool blocks);
  /// Let go of what it keeps.
  void let_go() { kept_.reset(); }

 private:
  PyCompletion completion_;
  std::unique_ptr<Kept> kept_;  // null: finished or failed
  nb::object flight_owner_;
  FlightRing& flight_;
  const uint64_t slot_;
  const std::pair<CallPlace, OpRecord> call_;
};

}  // namespace tilework
