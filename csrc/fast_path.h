// The short way: a blocking operation on whole tensors, with the least between the program and the
// core. What needs preparation or looks wrong is refused without a trace, before anything moves;
// the caller then takes the long way through Python, which prepares, or says what is wrong.
#pragma once

#include "flight_ring.h"
#include "py_group.h"

namespace tilework {

class FastPath {
 public:
  /// `on_failure(why, slot, operation, inputs, outputs, reduce_op, root)`: why is a fault's args,
  /// whose error it raises, or the exception of a signal handler, on its way: then it only cleans
  /// up. Either way it ends the operation's slot in the flight record.
  FastPath(nb::object group, nb::object flight, double timeout, nb::object on_failure);

  /// The operation is named as users know it. Each side is a tensor, a list of them, or None. `in_rows`, `out_rows`: rows of dim 0 for each
  /// rank, where a tensor is not divided equally. True: done. False: nothing was done.
  bool run(nb::handle operation, nb::handle inputs, nb::handle outputs, nb::handle reduce_op, int root,
           nb::handle in_rows, nb::handle out_rows);

  /// True: sent. False: nothing was done.
  bool send(nb::handle tensor, int dst, int64_t tag);
  /// The source; -2: nothing was done.
  int recv(nb::handle tensor, int src, int64_t tag);

  double timeout;

 private:
  int transfer(bool is_send, nb::handle tensor, int peer, int64_t tag);
  template <class Act>
  bool run_recorded(uint64_t slot, nb::handle name, nb::handle inputs, nb::handle outputs,
               nb::handle reduce_op, int root, Act&& act);

  nb::object group_owner_, flight_owner_;
  PyGroup& group_;
  FlightRing& flight_;
  nb::object on_failure_;
};

/// Learn the objects that stand for the reductions: {object: name}.
void set_reduce_op_objects(const nb::dict& names);

}  // namespace tilework
