// tilework._core for Python. Here, and only here, is the interpreter known: arguments are
// converted, the GIL is released around everything that may wait or copy, faults become exceptions.
// The contract is src/tilework/_core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tilework {
namespace {

// ---- signals, callbacks, finalisation ----------------------------------------------------------

bool finalising() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

/// Run Python's signal handlers if this is the thread that runs them; true if one raised.
bool signal_raised() {
  if (syscall(SYS_gettid) != getpid()) return false;
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

/// A callback for a ticket. Owns a reference, which the one call gives back.
std::function<void()> callback_of(nb::object fn) {
  PyObject* callee = fn.release().ptr();
  return [callee] {
    if (finalising()) return;  // the interpreter's threads are gone: leak rather than crash
    nb::gil_scoped_acquire gil;
    PyObject* result = PyObject_CallNoArgs(callee);
    if (result == nullptr) PyErr_WriteUnraisable(callee);
    Py_XDECREF(result);
    Py_DECREF(callee);
  };
}

/// A reference to a group, which in a forked child is leaked (see Group::foreign).
class GroupRef {
 public:
  explicit GroupRef(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  GroupRef(const GroupRef&) = default;
  GroupRef& operator=(const GroupRef&) = delete;
  ~GroupRef() {
    if (!group_) return;
    if (group_->foreign()) {
      new std::shared_ptr<Group>(std::move(group_));
      return;
    }
    if (group_.use_count() > 1) return;
    nb::gil_scoped_release nogil;  // closing joins threads that may want the GIL
    group_.reset();
  }
  Group* operator->() const { return group_.get(); }
  Group& operator*() const { return *group_; }

 private:
  std::shared_ptr<Group> group_;
};

/// All groups of this process, so that exit can close them while the interpreter still works.
/// Only touched with the GIL held.
std::vector<std::weak_ptr<Group>>& registry() {
  static auto* groups = new std::vector<std::weak_ptr<Group>>();
  return *groups;
}

void register_group(const std::shared_ptr<Group>& group) {
  auto& groups = registry();
  groups.erase(std::remove_if(groups.begin(), groups.end(), [](auto& g) { return g.expired(); }),
               groups.end());
  groups.push_back(group);
}

void close_all() {
  std::vector<GroupRef> open;
  for (auto& weak : registry())
    if (auto group = weak.lock()) open.emplace_back(std::move(group));
  nb::gil_scoped_release nogil;
  for (GroupRef& group : open) group->close();
}

// ---- arguments ---------------------------------------------------------------------------------

template <class Enum>
Enum checked(int value, size_t count, const char* what) {
  if (value < 0 || static_cast<size_t>(value) >= count)
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(value) + " is unknown");
  return static_cast<Enum>(value);
}

Buffer buffer_of(uint64_t address, int64_t bytes) {
  if (bytes < 0) throw std::invalid_argument("negative size: " + std::to_string(bytes));
  return {reinterpret_cast<char*>(address), static_cast<size_t>(bytes)};
}

std::vector<Buffer> buffers_of(const nb::sequence& pairs) {
  std::vector<Buffer> buffers;
  for (nb::handle pair : pairs) {
    auto [address, bytes] = nb::cast<std::tuple<uint64_t, int64_t>>(pair);
    buffers.push_back(buffer_of(address, bytes));
  }
  return buffers;
}

Buffers view(const std::vector<Buffer>& buffers) {
  return {buffers.data(), static_cast<int>(buffers.size())};
}

/// Any 64 bits, signed or not.
uint64_t label_of(const nb::int_& label) {
  return PyLong_AsUnsignedLongLongMask(label.ptr());
}

Operation operation_of(int kind, int dtype, int reduce_op, int root, double factor,
                       const nb::int_& label) {
  Operation operation{};
  operation.kind = checked<Kind>(kind, kKinds, "kind");
  operation.dtype = checked<DType>(dtype, kDTypes, "dtype");
  operation.reduce_op = checked<ReduceOp>(reduce_op, kReduceOps, "reduce_op");
  operation.root = root;
  operation.factor = factor;
  operation.label = label_of(label);
  return operation;
}

// ---- the classes -------------------------------------------------------------------------------

nb::tuple ranks_of(const std::vector<int>& ranks) { return nb::tuple(nb::cast(ranks)); }

nb::object text_of(const std::string& bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()),
                                        "replace"));
}

nb::tuple fault_args(const Fault& fault) {
  return nb::make_tuple(fault.kind, ranks_of(fault.ranks), text_of(fault.text));
}

struct PyTicket {
  std::shared_ptr<Ticket> ticket;
  GroupRef group;
  bool is_mail;

  bool wait(double timeout) const {
    nb::gil_scoped_release nogil;
    if (!group->wait(*ticket, is_mail, timeout, signal_raised)) return false;
    if (auto fault = ticket->fault()) throw *fault;
    return true;
  }
  nb::object fault() const {
    auto fault = ticket->fault();
    return fault ? nb::object(fault_args(*fault)) : nb::none();
  }
};

class PyGroup {
 public:
  PyGroup(int fd, int rank, int size, const nb::bytes& nonce)
      : group_(Group::make(fd, rank, size, std::string(nonce.c_str(), nonce.size()))) {
    register_group(group_);
  }
  ~PyGroup() {
    if (group_->foreign()) {
      new std::shared_ptr<Group>(std::move(group_));
      return;
    }
    nb::gil_scoped_release nogil;
    group_->close();
    group_.reset();
  }

  void run(int kind, int dtype, int reduce_op, int root, double factor, const nb::sequence& inputs,
           const nb::sequence& outputs, const nb::int_& label, double timeout) {
    Operation operation = operation_of(kind, dtype, reduce_op, root, factor, label);
    const auto in = buffers_of(inputs), out = buffers_of(outputs);
    operation.inputs = view(in);
    operation.outputs = view(out);
    nb::gil_scoped_release nogil;
    group_->run(operation, timeout, signal_raised);
  }

  void all_reduce(uint64_t address, int64_t nbytes, int dtype, int reduce_op, double factor,
                  const nb::int_& label, double timeout) {
    Operation operation =
        operation_of(static_cast<int>(Kind::kAllReduce), dtype, reduce_op, 0, factor, label);
    const Buffer buffer = buffer_of(address, nbytes);
    operation.inputs = operation.outputs = {&buffer, 1};
    nb::gil_scoped_release nogil;
    group_->run(operation, timeout, signal_raised);
  }

  PyTicket submit(int kind, int dtype, int reduce_op, int root, double factor,
                  const nb::sequence& inputs, const nb::sequence& outputs, const nb::int_& label,
                  double timeout) {
    Operation operation = operation_of(kind, dtype, reduce_op, root, factor, label);
    const auto in = buffers_of(inputs), out = buffers_of(outputs);
    operation.inputs = view(in);
    operation.outputs = view(out);
    nb::gil_scoped_release nogil;
    return {group_->submit(operation, timeout), GroupRef(group_), false};
  }

  PyTicket isend(int dst, uint64_t address, int64_t nbytes, int dtype, int64_t tag,
                 double timeout) {
    return post(request_of(true, dst, address, nbytes, dtype, tag, timeout));
  }
  PyTicket irecv(int src, uint64_t address, int64_t nbytes, int dtype, int64_t tag,
                 double timeout) {
    return post(request_of(false, src, address, nbytes, dtype, tag, timeout));
  }
  void send(int dst, uint64_t address, int64_t nbytes, int dtype, int64_t tag, double timeout) {
    transfer(request_of(true, dst, address, nbytes, dtype, tag, timeout));
  }
  int recv(int src, uint64_t address, int64_t nbytes, int dtype, int64_t tag, double timeout) {
    return transfer(request_of(false, src, address, nbytes, dtype, tag, timeout));
  }

  nb::list headers() {
    nb::list result;
    for (const auto& [call, pid] : group_->calls()) {
      const bool none = call.sequence == 0;
      result.append(nb::make_tuple(call.sequence, none ? "" : kind_name(call.kind()),
                                   none ? "" : dtype_name(call.dtype()),
                                   none ? "" : reduce_op_name(call.reduce_op()), call.root(),
                                   call.bytes, pid));
    }
    return result;
  }
  uint64_t sequence() { return group_->sequence(); }

  void say(const nb::str& text) {
    Py_ssize_t length = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
    if (utf8 == nullptr) throw nb::python_error();
    while (length > static_cast<Py_ssize_t>(kMaxWords) ||
           (length > 0 && (utf8[length] & 0xc0) == 0x80))
      --length;  // never half a character
    group_->say(std::string(utf8, static_cast<size_t>(length)));
  }
  nb::list heard(double timeout) {
    std::vector<std::optional<std::string>> words;
    {
      nb::gil_scoped_release nogil;
      words = group_->heard(timeout, signal_raised);
    }
    nb::list result;
    for (const auto& text : words) result.append(text ? text_of(*text) : nb::none());
    return result;
  }

  void abort(const std::string& kind, const std::string& text) { group_->abort(kind, text); }
  nb::object aborted() {
    auto abort = group_->aborted();
    if (!abort) return nb::none();
    return nb::make_tuple(abort->rank, text_of(abort->kind), text_of(abort->text));
  }
  void close() {
    if (group_->foreign()) return;
    nb::gil_scoped_release nogil;
    group_->close();
  }
  nb::dict statistics() {
    const Statistics figures = group_->statistics();
    nb::dict result;
    result["operations"] = figures.operations;
    result["bytes"] = figures.bytes;
    result["sleeps"] = figures.sleeps;
    result["segment_bytes"] = figures.segment_bytes;
    return result;
  }

 private:
  static RequestPtr request_of(bool is_send, int peer, uint64_t address, int64_t nbytes, int dtype,
                               int64_t tag, double timeout) {
    auto request = std::make_shared<Request>();
    request->is_send = is_send;
    request->peer = peer;
    request->buffer = buffer_of(address, nbytes);
    request->dtype = checked<DType>(dtype, kDTypes, "dtype");
    request->tag = tag;
    request->seconds = timeout;
    request->deadline = deadline_after(timeout);
    return request;
  }
  PyTicket post(const RequestPtr& request) {
    nb::gil_scoped_release nogil;
    group_->post(request, false);
    return {request->ticket, GroupRef(group_), true};
  }
  /// Post and wait, without waking a thread of the core; returns the source.
  int transfer(const RequestPtr& request) {
    nb::gil_scoped_release nogil;
    group_->post(request, true);
    try {
      group_->wait(*request->ticket, true, -1, signal_raised);
    } catch (const Interrupted&) {
      group_->cancel(request);  // the caller may free the buffer
      throw;
    }
    if (auto fault = request->ticket->fault()) throw *fault;
    return request->ticket->source();
  }

  std::shared_ptr<Group> group_;
};

nb::dict names_of(const char* const* names, size_t count) {
  nb::dict result;
  for (size_t i = 0; i < count; ++i) result[names[i]] = i;
  return result;
}

/// `payload` is the Python class.
void translate_fault(const std::exception_ptr& exception, void* payload) {
  try {
    std::rethrow_exception(exception);
  } catch (const Fault& fault) {
    PyErr_SetObject(static_cast<PyObject*>(payload), fault_args(fault).ptr());
  } catch (const Interrupted&) {
    // signal_raised() left the handler's exception pending
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetString(PyExc_OSError, error.what());
  }
}

void bind_group(nb::module_& m) {
  nb::class_<PyGroup>(m, "Group")
      .def(nb::init<int, int, int, const nb::bytes&>(), "fd"_a, "rank"_a, "size"_a, "nonce"_a)
      .def("run", &PyGroup::run, "kind"_a, "dtype"_a, "reduce_op"_a, "root"_a, "factor"_a,
           "inputs"_a, "outputs"_a, "label"_a, "timeout"_a)
      .def("all_reduce", &PyGroup::all_reduce, "address"_a, "nbytes"_a, "dtype"_a, "reduce_op"_a,
           "factor"_a, "label"_a, "timeout"_a)
      .def("submit", &PyGroup::submit, "kind"_a, "dtype"_a, "reduce_op"_a, "root"_a, "factor"_a,
           "inputs"_a, "outputs"_a, "label"_a, "timeout"_a)
      .def("isend", &PyGroup::isend, "dst"_a, "address"_a, "nbytes"_a, "dtype"_a, "tag"_a,
           "timeout"_a)
      .def("irecv", &PyGroup::irecv, "src"_a, "address"_a, "nbytes"_a, "dtype"_a, "tag"_a,
           "timeout"_a)
      .def("send", &PyGroup::send, "dst"_a, "address"_a, "nbytes"_a, "dtype"_a, "tag"_a,
           "timeout"_a)
      .def("recv", &PyGroup::recv, "src"_a, "address"_a, "nbytes"_a, "dtype"_a, "tag"_a,
           "timeout"_a)
      .def("headers", &PyGroup::headers)
      .def("sequence", &PyGroup::sequence)
      .def("say", &PyGroup::say, "text"_a)
      .def("heard", &PyGroup::heard, "timeout"_a)
      .def("abort", &PyGroup::abort, "kind"_a, "text"_a)
      .def("aborted", &PyGroup::aborted)
      .def("close", &PyGroup::close)
      .def("statistics", &PyGroup::statistics);
}

void bind_ticket(nb::module_& m) {
  nb::class_<PyTicket>(m, "Ticket")
      .def("done", [](const PyTicket& self) { return self.ticket->done(); })
      .def("wait", &PyTicket::wait, "timeout"_a)
      .def("fault", &PyTicket::fault)
      .def("add_done_callback",
           [](const PyTicket& self, nb::callable fn) {
             self.ticket->when_done(callback_of(std::move(fn)));
           },
           "fn"_a)
      .def("source", [](const PyTicket& self) { return self.ticket->source(); });
}

}  // namespace
}  // namespace tilework

NB_MODULE(_core, m) {
  using namespace tilework;
  nb::set_leak_warnings(false);  // groups may live until the process ends
  watch_forks();
  m.attr("ABI") = kAbi;
  m.attr("DEFAULT_SLOT_BYTES") = kDefaultSlotBytes;
  m.attr("KINDS") = names_of(kKindNames, kKinds);
  m.attr("DTYPES") = names_of(kDTypeNames, kDTypes);
  m.attr("REDUCE_OPS") = names_of(kReduceOpNames, kReduceOps);

  PyObject* fault = PyErr_NewException("tilework._core.Fault", PyExc_RuntimeError, nullptr);
  m.attr("Fault") = nb::steal(fault);
  nb::register_exception_translator(translate_fault, fault);

  m.def("create_segment",
        [](int size, size_t slot_bytes, const nb::bytes& nonce) {
          return create_segment(size, slot_bytes, std::string(nonce.c_str(), nonce.size()));
        },
        "size"_a, "slot_bytes"_a, "nonce"_a);
  m.def("segment_bytes", [](int size, size_t slot_bytes) { return Layout(size, slot_bytes).total; },
        "size"_a, "slot_bytes"_a);
  bind_ticket(m);
  bind_group(m);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(close_all));
}
