// The fast path: an operation on torch tensors, with the least overhead between the program and the
// core. A call that needs preparation, or is invalid, is refused before anything is done; the caller then
// takes the general path through Python, which prepares it or raises.
#pragma once

#include "python/flight_ring.h"
#include "python/posted_call.h"
#include "python/py_group.h"

namespace tilework {

class FastPath {
 public:
  /// `on_failure(why, slot, operation, inputs, outputs, reduce_op, root)`: `why` is a fault's args,
  /// whose error it raises, or the exception of a signal handler, which propagates: then it only
  /// cleans up. Either way it ends the operation's slot in the flight ring.
  /// `make_work(call, operation, inputs, outputs, reduce_op, root)`: the Work of an operation that goes
  /// on, or, for a call of None, of one that is done. In both, messages have a tag and a peer last.
  FastPath(nb::object group, nb::object flight, double timeout, nb::object on_failure,
           nb::object make_work);

  /// Run an operation by its public name. Each side is a tensor, a list of them, or None. `in_rows`,
  /// `out_rows`: rows of dim 0 for each rank, where a tensor is not split equally. True: done. False:
  /// refused.
  bool run(nb::handle operation, nb::handle inputs, nb::handle outputs, nb::handle reduce_op,
           int root, nb::handle in_rows, nb::handle out_rows);
  /// The same by the number of its form; `operation` still names it.
  bool run_form(unsigned form, nb::handle operation, nb::handle inputs, nb::handle outputs,
                nb::handle reduce_op, int root, nb::handle in_rows, nb::handle out_rows);
  /// Likewise, start an operation; its Work, or null: refused.
  nb::object post(nb::handle operation, nb::handle inputs, nb::handle outputs, nb::handle reduce_op,
                  int root, nb::handle in_rows, nb::handle out_rows);
  nb::object post_form(unsigned form, nb::handle operation, nb::handle inputs, nb::handle outputs,
                       nb::handle reduce_op, int root, nb::handle in_rows, nb::handle out_rows);

  /// True: sent. False: refused.
  bool send(nb::handle tensor, int dst, int64_t tag);
  /// The source rank; -2: refused.
  int recv(nb::handle tensor, int src, int64_t tag);
  /// Start a message; its Work, or null: refused.
  nb::object isend(nb::handle tensor, int dst, int64_t tag);
  nb::object irecv(nb::handle tensor, int src, int64_t tag);

  int rank() const { return group_.core().rank(); }

  double timeout;

 private:
  class ShortCall;
  struct Message;
  bool read_message(bool is_send, nb::handle tensor, int peer, int64_t tag, Message& message);
  bool transfer_now(const Message& message, ShortCall& call);
  int transfer(bool is_send, nb::handle tensor, int peer, int64_t tag);
  nb::object post_message(bool is_send, nb::handle tensor, int peer, int64_t tag);
  /// With `posts` start it, and make its Work; else run it.
  bool execute(unsigned form, nb::handle operation, nb::handle inputs, nb::handle outputs,
               nb::handle reduce_op, int root, nb::handle in_rows, nb::handle out_rows, bool posts,
               nb::object& work);
  template <class Start>
  nb::object start(ShortCall& call, bool is_message, std::unique_ptr<PostedCall::Kept> kept,
                   nb::handle name, nb::handle reduce_op, int root, Start&& start);
  template <class Act, class Slot, class Fail>
  void run_recorded(Act&& act, Slot&& slot, Fail&& fail);

  nb::object group_owner_, flight_owner_;
  PyGroup& group_;
  FlightRing& flight_;
  nb::object on_failure_, make_work_;
};

/// The number of the form of a public operation; -1 if the fast path has none of this name.
int find_form(const std::string& name);

/// Set the objects that stand for the reductions: {object: name}.
void set_reduce_op_objects(const nb::dict& names);

/// While a profiler runs the fast path refuses everything: whoever prepares the operation then tells
/// the profiler of it.
void set_profiled(bool profiled);

}  // namespace tilework
