#include "python/posted_call.h"

namespace tilework {
namespace {

void add_storages(nb::handle tensors, std::vector<nb::object>& storages) {
  static PyObject* const name = PyUnicode_InternFromString("untyped_storage");
  if (tensors.is_none()) return;
  if (PyTuple_Check(tensors.ptr())) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors.ptr()); ++i)
      add_storages(PyTuple_GET_ITEM(tensors.ptr(), i), storages);
    return;
  }
  PyObject* const storage = PyObject_CallMethodNoArgs(tensors.ptr(), name);
  if (!storage) throw nb::python_error();
  storages.push_back(nb::steal(storage));
}

MemoryHold hold_tensors(const nb::object& inputs, const nb::object& outputs,
                        const Buffers& written) {
  std::vector<nb::object> storages;
  if (!inputs.is(outputs)) add_storages(inputs, storages);
  const size_t first = storages.size();  // of the outputs'
  add_storages(outputs, storages);
  const bool one_by_one = PyTuple_Check(outputs.ptr());  // else they are parts of one tensor
  std::vector<WrittenSpan> spans;
  for (int i = 0; i < written.count; ++i)
    spans.push_back({address_of(storages[first + (one_by_one ? i : 0)]),
                     reinterpret_cast<uintptr_t>(written[i].data), written[i].bytes});
  return MemoryHold(std::move(storages), std::move(spans));
}

}  // namespace

PostedCall::Kept::Kept(nb::object inputs_, nb::object outputs_, const Buffers& written)
    : inputs(std::move(inputs_)),
      outputs(std::move(outputs_)),
      writes(written.count > 0),
      hold(hold_tensors(inputs, outputs, written)) {}

PostedCall::PostedCall(PyCompletion completion, std::unique_ptr<Kept> kept, nb::object flight,
                       uint64_t slot)
    : completion_(std::move(completion)),
      kept_(std::move(kept)),
      flight_owner_(std::move(flight)),
      flight_(*nb::inst_ptr<FlightRing>(flight_owner_)),
      slot_(slot),
      call_(flight_.call(slot)) {
  flight_.follow(slot, completion_.completion);
}

/// Nobody waits for it any more: its tensors are let go as soon as it is done.
PostedCall::~PostedCall() {
  if (kept_ && !completion_.completion->done())
    completion_.completion->when_done(with_gil([kept = kept_.release()] { delete kept; }));
}

bool PostedCall::finish(bool blocks) {
  // A collective is not polled: whoever asks for its end without a wait expects others to reach it.
  const bool done = completion_.is_message ? completion_.poll() : completion_.completion->done();
  if (!done && !(blocks && completion_.wait_for_end(-1))) return false;
  if (completion_.completion->fault()) return false;
  const std::unique_ptr<Kept> kept = std::move(kept_);  // once, whichever thread comes first
  if (!kept) return true;
  flight_.end(slot_);
  kept->hold.copy_to_moved();
  if (kept->writes && !bump_versions(kept->outputs.ptr())) throw nb::python_error();
  return true;
}

}  // namespace tilework
